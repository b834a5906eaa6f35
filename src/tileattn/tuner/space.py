"""The configurations of a call, as a backend describes them to the tuner."""

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
        call: All static facts of the call as text: the key of its results.
        sizes: batch * heads, seqlen_q, seqlen_k, query heads per key/value head.
        default: The configuration without a result.
        candidates: Returns the configurations to measure, without the default. Each is valid and fits shared memory and
            registers. Lazy: most callers never search.
        compile: ``compile(configs)`` compiles them in parallel and yields each with its error or None when it is ready.
        prepare: ``prepare(config)`` returns the backend's loaded function for the call with a configuration.
        gradients: Whether the function returns gradients, rather than o and lse.
        known: Whether there is a valid result already.
    """

    call: str
    sizes: tuple[int, int, int, int]
    default: AnyConfig
    candidates: Callable[[], Sequence[AnyConfig]]
    compile: Callable[[Sequence[AnyConfig]], Iterator[tuple[AnyConfig, str | None]]]
    prepare: Callable[[AnyConfig], Callable[..., Any]]
    known: bool = False
    gradients: bool = False
