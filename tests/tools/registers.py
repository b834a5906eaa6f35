"""The nodes of an analysis (kernels/tilelang/lists), computed by PyTorch: what the kernel computes, for many tiles.

Every integer is checked to lie within its node's span, by which the kernel chooses int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tileattn.kernels.tilelang.lists.analysis import Analysis, WideLoad
from tileattn.kernels.tilelang.lists.registers import BOOL, INT, Register, nodes_of
from tileattn.variant.intervals.tables import over_ranges
from tileattn.variant.intervals.values import Ends


class Interpreter:
    """Computes nodes for tiles.

    Args:
        values: of the operands, by their names.
        q, k: the first and the last positions of each tile, int64 (tiles,).
        b, h: the batch element and the head.
        seqlen_k: of the call, for masks with ranges.
    """

    def __init__(
        self, of: Analysis, values: Mapping[str, Any], q: Ends, k: Ends, b: int, h: int, seqlen_k: int = 1
    ) -> None:
        self.of, self.values, self.known = of, values, {}  # type: ignore[var-annotated]
        self.inputs: dict[Any, Any] = {("b",): b, ("h",): h, ("seqlen_k",): seqlen_k}
        for name, ends in (("q", q), ("k", k)):
            self.inputs |= {(name, "first"): ends.first, (name, "last"): ends.last}
        self.wide = {"row": of.row_loads, "column": of.column_loads}

    def kinds(self) -> Tensor:
        return self(self.of.kind).expand(self.inputs["q", "first"].shape)

    def __call__(self, node: Register) -> Tensor:
        if node not in self.known:
            value = torch.as_tensor(self._computed(node))
            if node.kind == INT:
                assert value.dtype == torch.int64
                assert node.span is not None
                assert (value >= node.span[0]).all(), node.op
                assert (value <= node.span[1]).all(), node.op
            self.known[node] = value
        return self.known[node]

    def _computed(self, node: Register) -> Any:
        if node.op == "number":
            return node.args[0]
        if node.op == "input":
            name = node.args
            if name[0] == "size":
                return self.values[f"t{name[1]}"].shape[name[2]]
            return self.inputs[name] if name in self.inputs else self.values[name[0]]
        if node.op == "wide":
            side, load, end = node.args
            of = self.wide[side][load]
            self._check_reads(of)
            return self._ends(of.number, of.firsts, of.lasts, of.widths)[end]
        if node.op in ("element", "least", "greatest"):
            number, rank, *rest = node.args
            return self._ends(number, rest[:rank], rest[rank : 2 * rank])[node.op == "greatest"]
        args = [self(each) if isinstance(each, Register) else each for each in node.args]
        if node.op == "floordiv":
            return torch.div(*args, rounding_mode="floor")
        return _OPS[node.op](*args) if node.kind != BOOL or node.op != "not" else ~args[0]

    def _ends(
        self, number: int, firsts: Sequence[Register], lasts: Sequence[Register], widths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The least and the greatest element of a box, which lies within the tensor."""
        tensor = self.values[f"t{number}"]
        ranges = [(self(first), self(last)) for first, last in zip(firsts, lasts)]
        for axis, (first, last) in enumerate(ranges):
            assert (first >= 0).all()
            assert (first <= last).all()
            assert (last < tensor.shape[axis]).all()
            assert widths is None or (last - first <= min(widths[axis], 2**62)).all()
        least, greatest, _ = over_ranges(tensor, ranges)
        return least.long(), greatest.long()

    def _check_reads(self, load: WideLoad) -> None:
        """A wide load's indices are known without the tile on the other side."""
        side = "q" if load in self.wide["row"] else "k"
        for index in (*load.firsts, *load.lasts):
            names = {node.args[0] for node in nodes_of(index) if node.op == "input"}
            assert not names & ({"q", "k"} - {side})


_OPS: dict[str, Any] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "where": torch.where,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "shift": lambda x, y: x >> y,
    "abs": torch.abs,
    "double": lambda x: x.double(),
}
