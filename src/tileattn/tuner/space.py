"""What a backend tells the tuner about the configurations of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# A frozen dataclass of a backend: tile sizes and the like.
AnyConfig = Any


@dataclass(frozen=True)
class Space:
    """The configurations of one call with tensors of known sizes.

    Attributes:
        call: the call's text, by which results are kept; all of its static facts and nothing else.
        sizes: batch * heads, seqlen_q, seqlen_k, query heads per key/value head.
        default: what the call gets without a result.
        candidates: what is worth measuring, without the default; each is valid and fits shared memory and registers.
            A function, for few who ask for a space go on to search it.
        compile: ``compile(configs)`` compiles them in parallel and yields each, as it is ready, with the error or None.
        prepare: ``prepare(config)`` is the backend's function for the call with a configuration, loaded and ready.
        gradients: whether the function returns gradients, rather than o and lse.
        known: whether there is a result already, which is valid.
    """

    call: str
    sizes: tuple[int, int, int, int]
    default: AnyConfig
    candidates: Callable[[], Sequence[AnyConfig]]
    compile: Callable[[Sequence[AnyConfig]], Iterator[tuple[AnyConfig, str | None]]]
    prepare: Callable[[AnyConfig], Callable[..., Any]]
    known: bool = False
    gradients: bool = False
