"""How the lines of a call are made (visits.py): by a kernel in one launch, or by PyTorch's operations. No TileLang.

The kernel knows most masks. PyTorch's operations take over where it does not: floats, tensors of which a tile reads
many elements, and calls beyond the limits of lists/analysis.py. Nothing is read on the host either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .....call.decoding import DecodeCall, DecodeInputs
from .....call.inputs import Operands
from ....tile_lists import Cut, Sizes
from ...host import as_bytes
from ...lists import launch as lists
from ...lists.analysis import Analysis
from .library import lines_function
from .visits import MOST_KEYS, Lines, analysis_of


def write(call: DecodeCall, lines: Lines, inputs: DecodeInputs, plan: Tensor, first_line: int) -> None:
    """Writes the lines of a call to its plan, from a row on."""
    found = analysis_of(call.variant, lines.queries) if _on_nvidia(plan) else None
    if found is None or not fits(found, lines, inputs.operands):
        lines.write(inputs, plan[first_line:])
        return
    function = lines_function(call.arch, call.packed, call.variant, lines.queries)
    by_kernel(function, found, lines, inputs, plan, first_line)


def _on_nvidia(plan: Tensor) -> bool:
    return plan.is_cuda and torch.version.hip is None


def fits(of: Analysis, lines: Lines, operands: Operands) -> bool:
    """Whether a call is within what the kernel assumes."""
    sizes, most = lines.sizes, lines.sizes.max_seqlen_q
    of_lists = Sizes(sizes.batch, sizes.heads, most, sizes.capacity), Cut(lines.block_M, lines.block_N)
    return lines.most_queries < lines.queries and lines.block_N <= MOST_KEYS and lists.fits(of, operands, *of_lists)


def by_kernel(
    function: Callable[..., Any], of: Analysis, lines: Lines, inputs: DecodeInputs, plan: Tensor, first_line: int
) -> None:
    """Writes the lines by the compiled kernel of the analysis."""
    operands, sizes = inputs.operands, lines.sizes
    function(
        plan.view(-1),
        inputs.seqlens_k,
        *(() if inputs.cu_seqlens_q is None else (inputs.cu_seqlens_q,)),
        *(as_bytes(operands.tensors[number]).reshape(-1).contiguous() for number in of.tensors),
        *(operands.tensors[number].shape[axis] for number, axis in of.sizes),
        *(operands.ints[number] for number in of.ints),
        lines.items * lines.planes,
        sizes.max_seqlen_q,
        sizes.heads // sizes.kv_heads,
        sizes.kv_heads,
        sizes.capacity,
        lines.block_M,
        lines.block_N,
        first_line,
        lines.rows_of_each,
        lines.tiles,
    )
