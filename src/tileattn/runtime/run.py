"""The general path of a call whose arguments are checked.

:func:`run` encodes the mask and the score modifications as a variant key. It then calls the operator if the call is
traced, autograd if it needs gradients or is under torch.func, and otherwise the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..call.dropout import Dropout, draw_seed
from ..call.facts import Packed, has_autocast, sizes
from ..call.fp8 import FP8, complete
from ..call.inputs import Inputs
from ..call.scalars import as_float
from ..call.validation import check_flags
from ..variant.key import encode, normalize
from ..variant.masks import Mask
from ..variant.scores import for_packed
from ..variant.sparse.blocks import for_call
from ..variant.validation import check_operand_devices, check_variant
from . import autograd
from . import operators as ops
from .dispatch import prepare_forward
from .operators import NO_DESCALES, GivenDescales, Options

MaskLike = Mask | Callable[..., Any]
ScoreModLike = Callable[..., Any] | Sequence[Callable[..., Any]]


class Choices(NamedTuple):
    """The options of a call that do not depend on its variant."""

    causal: bool
    scale: float | None
    return_lse: bool
    deterministic: bool
    backend: str | None


def checked_choices(
    causal: bool, scale: float | None, return_lse: bool, deterministic: bool, backend: str | None
) -> Choices:
    """The user's choices, with flags converted to bool. Raises TypeError if a flag is not a bool."""
    causal, return_lse, deterministic = check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic)
    return Choices(causal, scale, return_lse, deterministic, backend)


def autocast(x: Any) -> Any:
    """q, k or v cast to the dtype of torch.autocast, as for PyTorch's own attention; float64 stays."""
    return x.to(autocast_dtype(x)) if isinstance(x, torch.Tensor) else x


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that torch.autocast casts x to: its own if autocast is off or x is not float16, bfloat16 or float32."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return x.dtype
    device = x.device.type
    if not has_autocast(device) or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def as_bshd(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v, given in `layout`, as bshd tensors."""
    return (q, k, v) if layout == "bshd" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def scale_or_default(scale: float | None, q: torch.Tensor) -> float:
    """The scale, or 1 / sqrt(head_dim) if it is None."""
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)


def as_dropout_p(p: Any) -> Any:
    """The dropout probability as a float. Its range is checked with the other arguments."""
    return as_float("dropout_p", p, "a probability, a number from 0 to 1")


def requires_grad(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether one of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v are plain torch.Tensors in eager execution, outside of torch.func."""
    return (
        not ops.is_traced(q)
        and type(k) is torch.Tensor
        and type(v) is torch.Tensor
        and not torch._C._are_functorch_transforms_active()
    )


def first_positions(q: torch.Tensor, k: torch.Tensor, packed: Packed | None) -> int | torch.Tensor:
    """The position of the first query; of a packed call, of each sequence: int32 (sequences,)."""
    if packed is None:
        return k.shape[1] - q.shape[1]
    return packed.cu_seqlens_k.diff() - packed.cu_seqlens_q.diff()


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    mask: MaskLike | None,
    score_mod: ScoreModLike | None,
    dropout_p: float,
    choices: Choices,
    *,
    descales: GivenDescales = NO_DESCALES,
    packed: Packed | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and lse of any call.

    q, k, v (bshd), sink, numbers, descales and cu_seqlens must be checked. mask and score_mod are as the user gave
    them.
    """
    causal, scale, return_lse, deterministic, backend = choices
    normal_mask, mods = normalize(mask, score_mod, causal)
    if packed is not None:
        mods = for_packed(mods, packed.cu_seqlens_q, packed.cu_seqlens_k)
    of_q, of_k = sizes(q, k, packed)
    batch, seqlen_q, heads, _ = of_q
    normal_mask = for_call(
        normal_mask, lambda: (batch, heads, k.shape[2], seqlen_q, of_k[1]), lambda: first_positions(q, k, packed)
    )
    check_variant(normal_mask, mods, batch, heads, seqlen_q, of_k[1])
    variant, operands = encode(normal_mask, mods)
    check_operand_devices(operands.tensors, q)
    scale = scale_or_default(scale, q)
    needs_grad = torch.is_grad_enabled() and requires_grad((q, k, v, sink, *descales, *operands.tensors))
    dropout = Dropout(dropout_p, draw_seed(q.device)) if dropout_p else None
    inputs = Inputs(q, k, v, sink, operands, dropout, packed)
    traced, transformed = ops.is_traced(q), torch._C._are_functorch_transforms_active()
    if (needs_grad or (transformed and q.dtype != FP8)) and not traced:
        return autograd.attend(Options(variant, scale, backend, deterministic, True), inputs)
    if traced or transformed:
        return ops.trace_forward(Options(variant, scale, backend, deterministic, needs_grad), inputs, descales)
    if q.dtype == FP8:
        inputs = inputs._replace(descales=complete(*descales, k))
    call = ops.make_call(inputs, variant, return_lse=return_lse)
    return prepare_forward(call, backend, of_q, of_k, scale)(inputs)
