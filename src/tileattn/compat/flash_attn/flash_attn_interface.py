"""``flash_attn.flash_attn_interface``: flash-attn's functions, each in terms of tileattn's.

Shapes and arguments are common to all, and described at :func:`flash_attn_func` and :func:`flash_attn_varlen_func`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ...call.facts import Packed
from ._absent import absent_names
from ._attend import Options, Result, attend, unpacked
from ._block_sizes import get_block_size_n
from ._names import renamed

_get_block_size_n = get_block_size_n  # under the name by which flash-attn has it

_NO_WINDOW = (-1, -1)
# What is one argument where queries and keys lie in one tensor.
_OF_BOTH = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen", "total") for side in "qk"}

if not TYPE_CHECKING:
    _WITH_LSE = "tileattn.attention(return_lse=True): gradients flow through o and lse, so that parts can be merged"
    _PACKED_WITH_LSE = _WITH_LSE.replace("attention(", "varlen_attention(")
    _EXTENSION = "the functions of this module: flash-attn's compiled extension is not there"
    __getattr__ = absent_names(
        __name__,
        {
            "flash_attn_gpu": _EXTENSION,
            "flash_attn_cuda": _EXTENSION,
            **dict.fromkeys(["_flash_attn_forward", "_flash_attn_backward"], _WITH_LSE),
            **dict.fromkeys(["_flash_attn_varlen_forward", "_flash_attn_varlen_backward"], _PACKED_WITH_LSE),
        },
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention on padded batches.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16 on a GPU; on a CPU float32 and float64 as well. Any
            head_dim up to 256: those that kernels do not take are padded with zeros.
        k: (batch, seqlen_k, kv_heads, head_dim), where kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, head_dim).
        dropout_p: the probability of being dropped, in every call where it is not 0.
        softmax_scale: of the scores; None means ``head_dim ** -0.5``.
        causal: query ``i`` sees the keys up to ``i + seqlen_k - seqlen_q``.
        window_size: (left, right): it sees those from that position minus left up to it plus right; -1 is no bound.
            With causal, right is 0.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 for no cap.
        alibi_slopes: (heads,) or (batch, heads): ``-slope * |i + seqlen_k - seqlen_q - j|`` is added to the scores.
        deterministic: ask for gradients that are bitwise equal from run to run.
        return_attn_probs: return ``(out, softmax_lse, S_dmask)``.

    Returns:
        out (batch, seqlen_q, heads, head_dim). softmax_lse (batch, heads, seqlen_q), float32: the scores' log-sum-exp,
        in natural logarithm. S_dmask is empty without dropout, as in flash-attn. With dropout it is (batch, heads,
        seqlen_q, seqlen_k) in q's dtype, without a gradient: the probabilities of the softmax, before dropout, with a
        minus sign where the weight was dropped.

        This S_dmask differs from flash-attn's, which is padded to multiples of 128 and holds unnormalised numbers: each
        block of keys is relative to a running maximum of its own, so that its readers, such as flash-attn's tests,
        normalise it block by block (`_get_block_size_n`). Skip that step here: these are probabilities already.
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend(q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor: kv (batch, seqlen_k, 2, kv_heads, head_dim)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    k, v = unpacked("kv", kv, 2, 2)
    return attend(q, k, v, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with all in one tensor: qkv (batch, seqlen, 3, heads, head_dim)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = unpacked("qkv", qkv, 2, 3)
    return attend(q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Result:
    """Attention on packed sequences: those of a batch one behind the other, each attended to by itself.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: (total_k, kv_heads, head_dim).
        cu_seqlens_q: int32 (batch + 1,): sequence ``b`` has the rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``.
        cu_seqlens_k: the same of keys and values.
        max_seqlen_q: an upper bound of the lengths.
        max_seqlen_k: the same of keys and values.
        dropout_p: as for :func:`flash_attn_func`, and so are the following.
        softmax_scale: see there.
        causal: see there; aligned by each sequence's own lengths.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: see there.
        block_table: paged keys and values, which tileattn does not have yet: must be None.

    Returns:
        out (total_q, heads, head_dim). softmax_lse (heads, total_q). S_dmask, with dropout, (batch, heads,
        max_seqlen_q, max_seqlen_k): of each sequence the probabilities in the upper left corner, zeros elsewhere.
        :func:`flash_attn_func` describes their signs, and how they differ from flash-attn's.

    Raises:
        NotImplementedError: a block_table is given.
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table: tileattn has no paged keys and values yet, they come with decoding; gather each sequence's "
            "keys and values into k and v (total_k, kv_heads, head_dim)"
        )
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, options, packed)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor: kv (total_k, 2, kv_heads, head_dim)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = unpacked("kv", kv, 1, 2)
    return attend(q, k, v, options, packed)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with all in one tensor: qkv (total, 3, heads, head_dim)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = unpacked("qkv", qkv, 1, 3)
    try:
        return attend(q, k, v, options, _packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))
    except (TypeError, ValueError) as error:
        raise renamed(error, _OF_BOTH) from None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> NoReturn:
    """Decoding with a cache of keys and values, which tileattn does not have yet.

    Raises:
        NotImplementedError: always; the message says what to call.
    """
    raise NotImplementedError(
        "flash_attn_with_kvcache: tileattn has no decoding with a cache yet; write the new keys and values to the "
        "cache and call flash_attn_func(q, k_cache[:, :n], v_cache[:, :n], causal=True) where each sequence has n of "
        "them, or tileattn.attention(q, k_cache, v_cache, key_padding_mask=torch.arange(k_cache.shape[1], "
        "device=q.device) < cache_seqlens[:, None]) for one query each of sequences with different lengths"
    )


def _packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any) -> Packed:
    longest = _longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)
    return Packed(cu_seqlens_q, cu_seqlens_k, *longest)


def _longest(name: str, size: Any) -> Any:
    """It may come as a tensor of one element, which flash-attn takes as well."""
    if not isinstance(size, Tensor):
        return size
    if size.numel() != 1 or size.dtype == torch.bool or size.is_floating_point() or size.is_complex():
        raise TypeError(
            f"{name} must be an int, or an integer tensor of one element, got a tensor of shape {tuple(size.shape)} in "
            f"{size.dtype}"
        )
    return int(size)
