"""``flash_attn.flash_attn_interface``: flash-attn's functions by tileattn's kernels.

:func:`flash_attn_func` and :func:`flash_attn_varlen_func` describe the shapes and arguments of all functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...call.argument_names import renamed
from ._absent import absent_names
from ._attend import Options, Result, attend, attend_pages, packed_of, unpacked
from ._block_sizes import get_block_size_n
from ._kv_cache import Cache, NewKeys, attend_cache
from ._pass_functions import (
    flash_attn_backward,
    flash_attn_forward,
    flash_attn_varlen_backward,
    flash_attn_varlen_forward,
)

# Under the names by which flash-attn has them.
_get_block_size_n = get_block_size_n
_flash_attn_forward = flash_attn_forward
_flash_attn_backward = flash_attn_backward
_flash_attn_varlen_forward = flash_attn_varlen_forward
_flash_attn_varlen_backward = flash_attn_varlen_backward

_NO_WINDOW = (-1, -1)
# With q, k and v in one tensor, one argument stands for both `_q` and `_k`: errors then name it without the suffix.
_OF_BOTH = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen", "total") for side in "qk"}

if not TYPE_CHECKING:
    _EXTENSION = "the functions of this module: flash-attn's compiled extension is not there"
    __getattr__ = absent_names(__name__, {"flash_attn_gpu": _EXTENSION, "flash_attn_cuda": _EXTENSION})


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
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16 on a GPU; on a CPU also float32 and float64. Any
            head_dim up to 256; one that the kernels do not support is padded with zeros.
        k: (batch, seqlen_k, kv_heads, head_dim), where kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, head_dim).
        dropout_p: the probability of dropping a weight; it applies whenever it is not 0, in training or not.
        softmax_scale: factor of the inner products; None means ``head_dim ** -0.5``.
        causal: query ``i`` sees the keys up to position ``i + seqlen_k - seqlen_q``.
        window_size: (left, right): query ``i`` sees the keys from that position minus left to that position plus
            right; -1 means no bound. With causal, right is 0.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 means no cap.
        alibi_slopes: (heads,) or (batch, heads): ``-slope * |i + seqlen_k - seqlen_q - j|`` is added to the scores.
        deterministic: whether gradients must be bitwise equal from run to run.
        return_attn_probs: whether to return ``(out, softmax_lse, S_dmask)``.

    Returns:
        out (batch, seqlen_q, heads, head_dim). softmax_lse (batch, heads, seqlen_q), float32: the log-sum-exp of the
        scores, natural logarithm. S_dmask is empty without dropout, as in flash-attn. With dropout it is (batch, heads,
        seqlen_q, seqlen_k) in q's dtype, without a gradient: the probabilities before dropout, negative where dropout
        dropped the weight.

        flash-attn's S_dmask differs: it is padded to multiples of 128, and each block of keys holds unnormalised
        numbers, relative to a running maximum. Code that reads it, such as flash-attn's tests, normalises it block by
        block (`_get_block_size_n`). Skip that step here: tileattn's S_dmask holds probabilities.
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
    """:func:`flash_attn_func` with q, k and v in one tensor: qkv (batch, seqlen, 3, heads, head_dim)."""
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
    """Attention on packed sequences: the batch's sequences are one after another, and each attends only to itself.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim).
        v: (total_k, kv_heads, head_dim).
        cu_seqlens_q: int32 (batch + 1,): sequence ``b`` has the rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` of q.
        cu_seqlens_k: int32 (batch + 1,): the same for k and v.
        max_seqlen_q: an upper bound of the sequences' numbers of queries.
        max_seqlen_k: an upper bound of the sequences' numbers of keys.
        dropout_p: as for :func:`flash_attn_func`.
        softmax_scale: as for :func:`flash_attn_func`.
        causal: as for :func:`flash_attn_func`, aligned bottom-right in each sequence.
        window_size: as for :func:`flash_attn_func`, aligned bottom-right in each sequence.
        softcap: as for :func:`flash_attn_func`.
        alibi_slopes: as for :func:`flash_attn_func`.
        deterministic: as for :func:`flash_attn_func`.
        return_attn_probs: as for :func:`flash_attn_func`.
        block_table: int32 (batch, pages_per_sequence): k and v are then pages (pages, page_size, kv_heads, head_dim) of
            any page size, and key ``j`` of sequence ``b`` is token ``j % page_size`` of page ``block_table[b, j //
            page_size]``; the differences of cu_seqlens_k are the lengths. Without dropout. There are no gradients: a
            backward pass through the result raises.

    Returns:
        out (total_q, heads, head_dim). softmax_lse (heads, total_q). S_dmask, empty without dropout, else (batch,
        heads, max_seqlen_q, max_seqlen_k): each sequence's probabilities are in the upper left corner, the rest is 0.
        :func:`flash_attn_func` describes their signs and the difference from flash-attn's S_dmask.
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        return attend_pages(q, k, v, options, packed, block_table)
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
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
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
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor: qkv (total, 3, heads, head_dim)."""
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = unpacked("qkv", qkv, 1, 3)
    try:
        return attend(q, k, v, options, packed_of(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))
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
    *,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache of keys and values, to which new ones are first appended in place.

    There is no host-device synchronisation. There are no gradients: a backward pass through the result raises.

    Args:
        q: (batch, q_len, heads, head_dim), dtypes and head dims as for :func:`flash_attn_func`.
        k_cache: (batch_cache, seqlen_cache, kv_heads, head_dim); with block_table pages (pages, page_size, kv_heads,
            head_dim) of any page size. Any strides with a contiguous last dimension.
        v_cache: the same for values.
        k: new keys (batch, new, kv_heads, head_dim), written to the cache from position cache_seqlens on; or None.
        v: new values, the same.
        rotary_cos: (positions, rotary_dim / 2), at least as many positions as are used. Key ``i`` of the new ones is
            rotated to position cache_seqlens + i. With causal or a window, so is query ``i``; else all queries are
            rotated to position cache_seqlens. Any even rotary_dim up to head_dim. It needs k and v.
        rotary_sin: the sines, the same.
        cache_seqlens: int, or int32 (batch,): the keys of each sequence before the new ones. None: all keys of the
            cache count; with k and v it must be given.
        cache_batch_idx: int32 (batch,): the row of the cache that each sequence has. None: its number in the batch.
        cache_leftpad: int32 (batch,): the position of each sequence's first key; those before it are not seen.
        block_table: int32 (batch, pages_per_sequence): key ``j`` of sequence ``b`` is token ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Entries past a sequence's length may be anything.
        softmax_scale: as for :func:`flash_attn_func`.
        causal: query ``i`` sees the keys up to position ``i + seqlen_k - q_len``, where seqlen_k counts the new keys.
        window_size: as for :func:`flash_attn_func`, with that seqlen_k.
        softcap: as for :func:`flash_attn_func`.
        rotary_interleaved: whether elements 2 i and 2 i + 1 are rotated together, else i and i + rotary_dim / 2.
        alibi_slopes: as for :func:`flash_attn_func`, with that seqlen_k.
        num_splits: in how many parts the keys of a sequence are computed; 0 leaves it to tileattn.
        return_softmax_lse: whether to return ``(out, softmax_lse)``.
        page_table: FlashAttention-3's name of block_table.
        s_aux: FlashAttention-3's sink, (heads,): a logit per head that joins the softmax's denominator only.

    Returns:
        out (batch, q_len, heads, head_dim). softmax_lse (batch, heads, q_len), float32; a query without keys has
        out = 0 and ``-inf``.

    Raises:
        TypeError, ValueError: an argument is wrong, or two exclude each other. That cache_seqlens and a table's values
            are right is checked at once on a CPU, and on a GPU with a later call, or by
            :func:`tileattn.check_caches`.
    """
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of one argument, got both")
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
    new = NewKeys(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    table = page_table if block_table is None else block_table
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, table)
    return attend_cache(q, new, cache, options, num_splits, s_aux)
