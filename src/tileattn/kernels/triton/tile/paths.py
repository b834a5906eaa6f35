"""Loads of tensors in score modifications, as paths of gradients: see operand_gradients.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ....variant.derivative import float_loads
from ....variant.expression import Expr, nodes
from ....variant.program import program


@dataclass(frozen=True)
class Path:
    """One load of a tensor whose gradient is wanted.

    Attributes:
        load: the node ``(load name *indices)``.
        tensor: which of the variant's tensors it reads.
    """

    load: Expr
    tensor: int

    @functools.cached_property
    def symbols(self) -> set[str]:
        """Which of ``b h q k`` the indices depend on."""
        found = {node.args[0] for index in self.load.args[1:] for node in nodes(index) if node.op == "symbol"}
        return found & {"b", "h", "q", "k"}

    @property
    def spread(self) -> bool:
        """Whether each score has a place of its own in the workspace."""
        return "q" in self.symbols

    @property
    def axes(self) -> tuple[str, ...]:
        """The workspace's."""
        return ("b", "h", "q", "k") if self.spread else ("b", "h", "k")


@functools.lru_cache(maxsize=1024)
def paths(key: str, wanted: tuple[bool, ...]) -> tuple[Path, ...]:
    """All paths to the `wanted` ones of a variant's tensors."""
    if not any(wanted):
        return ()
    traced = program(key)
    numbers = {tensor.name: index for index, tensor in enumerate(traced.tensors)}
    found = [Path(load, numbers[load.args[0]]) for load in float_loads(traced.score)]
    return tuple(path for path in found if wanted[path.tensor])
