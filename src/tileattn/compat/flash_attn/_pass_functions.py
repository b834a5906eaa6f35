"""The four functions of flash-attn that ring-flash-attn and its like call: one pass each, without autograd.

flash-attn keeps them in flash_attn_interface, with a leading underscore. The signatures are those of flash-attn 2.8, so
these functions take more than ten arguments. :mod:`._passes` does the work.
"""

from __future__ import annotations

from torch import Tensor

from ._attend import packed_of
from ._passes import (
    Gradients,
    Results,
    backward_pass,
    forward_pass,
    forward_pass_of_pages,
    pass_options,
    refuse_leftpad,
)

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """The forward pass on padded batches.

    Args:
        q: as for :func:`.flash_attn_interface.flash_attn_func`, like the other arguments.
        k: see there.
        v: see there.
        dropout_p: see there.
        softmax_scale: see there.
        causal: see there.
        window_size_left: how many keys a query sees to the left; -1: no bound.
        window_size_right: the same to the right.
        softcap: see there.
        alibi_slopes: see there.
        return_softmax: whether to return S_dmask; only with dropout.

    Returns:
        out (batch, seqlen_q, heads, head_dim). softmax_lse (batch, heads, seqlen_q), float32, ``-inf`` in a row that
        sees no key. S_dmask as `flash_attn_func` gives it, empty without return_softmax. rng_state, int64 (2,), which
        the backward pass needs with dropout.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    given = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return forward_pass(q, k, v, pass_options(*given), return_softmax)


def flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Forward:
    """The forward pass on packed sequences: :func:`flash_attn_forward` of each by itself.

    Args:
        q: as for :func:`.flash_attn_interface.flash_attn_varlen_func`, like the arguments that are not described here.
        k: see there.
        v: see there.
        cu_seqlens_q: see there.
        cu_seqlens_k: see there.
        max_seqlen_q: see there.
        max_seqlen_k: see there.
        dropout_p: see there.
        softmax_scale: see there.
        causal: see there.
        window_size_left: as for :func:`flash_attn_forward`.
        window_size_right: as for :func:`flash_attn_forward`.
        softcap: see there.
        alibi_slopes: see there.
        return_softmax: as for :func:`flash_attn_forward`.
        block_table: see there.
        leftpad_k: must be None.
        seqused_k: int32 (batch,): how many keys of each sequence are seen, from its first; without dropout.
        zero_tensors: accepted; rows of no sequence have out = 0 and lse = -inf anyhow.

    Returns:
        As :func:`flash_attn_forward`, with out (total_q, heads, head_dim) and softmax_lse (heads, total_q).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        NotImplementedError: leftpad_k is given.
    """
    refuse_leftpad(leftpad_k)
    given = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options, packed = pass_options(*given), packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None or seqused_k is not None:
        used = {"block_table": block_table, "seqused_k": seqused_k}
        return forward_pass_of_pages(q, k, v, options, return_softmax, packed, used)
    return forward_pass(q, k, v, options, return_softmax, packed)


def flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """The backward pass on padded batches. It writes the gradients into dq, dk and dv.

    Args:
        dout: the gradient of out, (batch, seqlen_q, heads, head_dim), in q's dtype.
        q: as for :func:`flash_attn_forward`, like the arguments that are not described here.
        k: see there.
        v: see there.
        out: the forward pass's out, or what several were merged to, in q's dtype.
        softmax_lse: the lse that belongs to out, (batch, heads, seqlen_q), float32 (float64 for float64 inputs).
        dq: as q in shape and dtype, of any strides; it is overwritten. None: the gradient is not computed.
        dk: the same for k.
        dv: the same for v.
        dropout_p: see there.
        softmax_scale: see there.
        causal: see there.
        window_size_left: see there.
        window_size_right: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: whether the gradients must be bitwise equal from run to run.
        rng_state: the forward pass's; it must be given with dropout.

    Returns:
        An empty float32 tensor. flash-attn returns rowsum(dout * out) here, padded, which no caller is known to read.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    given = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options = pass_options(*given, deterministic=deterministic)
    return backward_pass(q, k, v, Results(dout, out, softmax_lse), Gradients(dq, dk, dv), options, rng_state)


def flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The backward pass on packed sequences: :func:`flash_attn_backward` of each by itself.

    Args:
        dout: as for :func:`flash_attn_backward`, with (total_q, heads, head_dim); so are the arguments below.
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: (total_k, kv_heads, head_dim).
        out: (total_q, heads, head_dim).
        softmax_lse: (heads, total_q).
        dq: as q.
        dk: as k.
        dv: as v.
        cu_seqlens_q: as for :func:`flash_attn_varlen_forward`.
        cu_seqlens_k: see there.
        max_seqlen_q: see there.
        max_seqlen_k: see there.
        dropout_p: see there.
        softmax_scale: see there.
        causal: see there.
        window_size_left: see there.
        window_size_right: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: as for :func:`flash_attn_backward`.
        rng_state: as for :func:`flash_attn_backward`.
        zero_tensors: accepted; rows of no sequence have gradients of 0 anyhow.

    Returns:
        As :func:`flash_attn_backward`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    given = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options = pass_options(*given, deterministic=deterministic)
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    results, gradients = Results(dout, out, softmax_lse), Gradients(dq, dk, dv)
    return backward_pass(q, k, v, results, gradients, options, rng_state, packed)
