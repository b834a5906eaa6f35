"""A warning where a call reads (batch, seqlen, heads, head_dim) and its tensors are likely (batch, heads, seqlen, ...).

Both layouts have four dimensions, so the wrong one is no error and gives wrong results. There is at most one warning in
a process.
"""

from __future__ import annotations

import sys
import warnings

import torch

# No published model has more key/value heads: a larger number in their place is a sequence length.
MOST_HEADS = 128
# A step of decoding, or a short prompt, has fewer queries than heads.
FEW_QUERIES = 16

_state = {"warned": False}


def warn_of_bhsd(q: torch.Tensor, k: torch.Tensor) -> None:
    """Warns once per process if q and k, which a call reads as bshd, are likely bhsd.

    That is likely where, as bshd, they have more key/value heads than :data:`MOST_HEADS`, and as bhsd at most as many
    heads, of which k's number divides q's. There is no warning for :data:`FEW_QUERIES` queries or fewer, in a traced
    graph, for tensors without values, and under torch.func.

    Args:
        q: (batch, seqlen_q, heads, head_dim) as the call reads it.
        k: (batch, seqlen_k, kv_heads, head_dim) as the call reads it.
    """
    if torch.compiler.is_compiling():
        return
    seqlen_q, seqlen_k, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    likely = FEW_QUERIES < seqlen_q <= MOST_HEADS < kv_heads and seqlen_k > 0 and seqlen_q % seqlen_k == 0
    if not likely or _state["warned"] or not _is_eager(q):
        return
    _state["warned"] = True
    warnings.warn(
        f"tileattn: q has shape {tuple(q.shape)} and k {tuple(k.shape)}, read as (batch, seqlen, heads, head_dim): "
        f"{seqlen_q} queries of {q.shape[2]} heads. If they are (batch, heads, seqlen, head_dim), as for PyTorch's "
        'attention, pass layout="bhsd". This is said once per process.',
        stacklevel=_caller(),
    )


def _is_eager(q: torch.Tensor) -> bool:
    """Whether q has values, and no dispatch mode, tensor subclass or transform traces the call."""
    plain = type(q) in (torch.Tensor, torch.nn.Parameter) and torch._C._len_torch_dispatch_stack() == 0
    return plain and not q.is_meta and not torch._C._are_functorch_transforms_active()


def _caller() -> int:
    """The stacklevel, seen from the function that warns, of the first frame outside of the package."""
    package, level = __name__.partition(".")[0], 2
    frame = sys._getframe(level)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
