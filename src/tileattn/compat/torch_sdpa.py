"""Implements PyTorch's flash operators: ``activate_flash_attention_impl("tileattn")`` registers these kernels.

``torch.nn.functional.scaled_dot_product_attention`` chooses among fused operators. :class:`Handle` registers kernels
for the flash operators, forward and backward, on CUDA devices (ROCm's have the same name), and puts flash first in
PyTorch's order of choice. Existing calls that flash attention supports then run on tileattn: no attn_mask, 16 bits,
equal head dims up to 256, causal only for L = S. Other calls use PyTorch's other operators, as without tileattn. The
packed function ``torch.nn.attention.varlen.varlen_attn`` uses the same operators.

The signatures are those of PyTorch's operators; versions 2.11 to 2.13 differ in optional arguments. Operators that the
running version does not have are not registered. PyTorch passes a generator's state from the forward to the backward
pass; here that state holds tileattn's dropout seed (:mod:`tileattn.call.dropout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend

from ..api.varlen_cache import UsedKeys, attend_used
from ..call.dropout import Dropout, draw_seed
from ..call.facts import Packed
from ..call.inputs import Inputs
from ..call.sequences import check_metadata
from ..runtime import operators as ops
from ..runtime.run import requires_grad, scale_or_default
from ..variant.key import encode
from .windows import window_mask

# What the operators return: o, lse, the generator's state, one unused tensor, and a debug mask.
FlashOutput = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Handle:
    """Keeps the kernels registered until `remove`. PyTorch's registry holds it while the implementation is active."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: Library | None = register_kernels(dispatch_key)
        self._order = _put_flash_first()

    def remove(self) -> None:
        """Restores the operators' previous kernels and the previous order of PyTorch's backends."""
        if self._library is not None:
            self._library = None
            torch._C._set_sdp_priority_order(self._order)


def register_kernels(dispatch_key: str) -> Library:
    """Registers the operators' kernels for a dispatch key, for the lifetime of the returned library."""
    library = Library("aten", "IMPL", dispatch_key)
    for name, kernel in KERNELS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, kernel, dispatch_key)
    return library


def _put_flash_first() -> list[int]:
    """Puts flash first in PyTorch's order of attention backends; returns the previous order."""
    if torch.cuda.is_available():
        # PyTorch sets its own order (with cuDNN first on some GPUs) at its first choice; this call triggers it.
        x = torch.empty(1, 1, 1, 16, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)
    before = list(torch._C._get_sdp_priority_order())
    flash = SDPBackend.FLASH_ATTENTION.value
    torch._C._set_sdp_priority_order([flash, *(backend for backend in before if backend != flash)])
    return before


# --- The operators on (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cum_seq ---


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> FlashOutput:
    """``aten::_flash_attention_forward``; keys are split, by num_splits, with seqused_k or block_table only."""
    _refuse(return_debug_mask, alibi_slopes)
    if seqused_k is not None or block_table is not None:
        if dropout_p > 0:
            raise ValueError(f"dropout_p must be 0 with seqused_k or block_table, got {dropout_p}")
        used = UsedKeys(cum_seq_k, max_k, seqused_k, block_table)
        o, lse = _of_used_keys(
            (query, key, value),
            cum_seq_q,
            max_q,
            used,
            (is_causal, window_size_left, window_size_right),
            scale,
            num_splits,
        )
        state = _state(None, query.device)
        return _laid_out_as(o, query), lse, state, torch.empty_like(state.reshape(-1)[0]), query.new_empty(0)
    packed = _packed(cum_seq_q, cum_seq_k, max_q, max_k, query.device)
    options, inputs = _call(query, key, value, packed, (is_causal, window_size_left, window_size_right), scale)
    seed = draw_seed(query.device) if dropout_p > 0 else None
    needs_grad = torch.is_grad_enabled() and requires_grad((query, key, value))
    o, lse = ops.run_forward(options._replace(needs_grad=needs_grad), _dropping(inputs, dropout_p, seed))
    o, lse = (o, lse) if cum_seq_q is None else (o[0], lse[0])
    state = _state(seed, query.device)
    return _laid_out_as(o, query), lse, state, torch.empty_like(state.reshape(-1)[0]), query.new_empty(0)


def flash_attention_forward_no_dropout_inplace(out: Tensor, query: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace`` (PyTorch 2.13): writes o to `out` and returns lse."""
    o, lse, *_ = flash_attention_forward(query, *arguments, **options)
    out.copy_(o)
    return lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_backward``: the gradients of query, key and value."""
    packed = _packed(cum_seq_q, cum_seq_k, max_q, max_k, query.device)
    options, inputs = _call(query, key, value, packed, (is_causal, window_size_left, window_size_right), scale)
    if cum_seq_q is not None:
        grad_out, out, logsumexp = grad_out[None], out[None], logsumexp[None]
    needs = (True, True, True, False)
    seed = _seed(rng_state) if dropout_p > 0 else None
    inputs = _dropping(inputs, dropout_p, seed)
    gradients = ops.run_backward(options, inputs, needs, _rows(out), logsumexp, grad_out, None)
    gradients = gradients if cum_seq_q is None else [gradient[0] for gradient in gradients]
    return tuple(_laid_out_as(gradient, x) for gradient, x in zip(gradients, (query, key, value)))


# --- The operators on (batch, heads, seqlen, head_dim) ---


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = q.shape[1], k.shape[1]
    o, lse, *rest = flash_attention_forward(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return o.transpose(1, 2), lse, None, None, max_q, max_k, *rest


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, ...]:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    do, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    return tuple(x.transpose(1, 2) for x in flash_attention_backward(do, q, k, v, o, *arguments, **options))


KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_flash_attention_backward,
}


# --- What they share ---


def _packed(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, device: torch.device
) -> Packed | None:
    """Where sequences lie, checked; None for a call that is not packed."""
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise ValueError("cum_seq_q and cum_seq_k must be given together, or neither")
    if cum_seq_q is None or cum_seq_k is None:
        return None
    packed = Packed(cum_seq_q, cum_seq_k, max_q, max_k)
    check_metadata(packed, device)
    return packed


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed | None,
    window: tuple[bool, int | None, int | None],
    scale: float | None,
) -> tuple[ops.Options, Inputs]:
    """A call in tileattn's terms, without dropout.

    Args:
        query: as PyTorch gives it, and so are key and value.
        key: see there.
        value: see there.
        packed: where sequences lie, or None.
        window: whether the call is causal, and how far a query sees to the left and to the right.
        scale: of the scores, or None.
    """
    q, k, v = _rows(query), _rows(key), _rows(value)
    if packed is not None:
        q, k, v = q[None], k[None], v[None]
    variant, operands = encode(window_mask(*window, key.shape[1] if packed is None else packed.max_seqlen_k), ())
    return ops.Options(variant, scale_or_default(scale, q), None), Inputs(q, k, v, None, operands, None, packed)


def _dropping(inputs: Inputs, p: float, seed: Tensor | None) -> Inputs:
    return inputs if seed is None else inputs._replace(dropout=Dropout(p, seed))


def _of_used_keys(
    inputs: tuple[Tensor, Tensor, Tensor],
    cum_seq_q: Tensor | None,
    max_q: int,
    used: UsedKeys,
    window: tuple[bool, int | None, int | None],
    scale: float | None,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    """O (total_q, heads, head_dim) and lse (heads, total_q) of a packed call over a cache; without gradients."""
    if cum_seq_q is None:
        raise ValueError("cum_seq_q must be given with seqused_k or block_table: the queries are packed")
    q, k, v = map(_rows, inputs)
    table = used.block_table
    mask = window_mask(*window, used.max_seqlen_k if table is None else table.shape[-1] * k.shape[1])
    options = {"mask": mask, "causal": False, "scale": scale, "splits": num_splits or None, "return_lse": True}
    with torch.no_grad():
        o, lse = attend_used(q, k, v, cum_seq_q, max_q, used, **options)
    return o, lse


def _refuse(return_debug_mask: bool, alibi_slopes: Any) -> None:
    for name, is_given, instead in (
        ("return_debug_mask", return_debug_mask, "tileattn.compat.flash_attn has return_attn_probs"),
        ("alibi_slopes", alibi_slopes is not None, "use tileattn.attention with score_mod=ALiBi(slopes)"),
    ):
        if is_given:
            raise NotImplementedError(f"tileattn as PyTorch's flash attention does not take {name}: {instead}")


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Gives x the strides of ``empty_like(like)``, which PyTorch reports and graphs of torch.compile rely on.

    x is copied only if the queries are stored as (batch, heads, seqlen, head_dim).
    """
    expected = torch.empty_like(like)
    return x if x.stride() == expected.stride() else expected.copy_(x)


def _state(seed: Tensor | None, device: torch.device) -> Tensor:
    """The seed in the form of PyTorch's generator state: two words, on ROCm one."""
    if torch.version.hip is not None:
        return torch.empty((), dtype=torch.int64, device=device) if seed is None else seed.reshape(())
    if seed is None:
        return torch.empty(2, dtype=torch.uint64, device=device)
    return seed.expand(2).contiguous().view(torch.uint64)


def _seed(state: Tensor) -> Tensor:
    return state.view(torch.int64).reshape(-1)[:1]
