"""The public function :func:`append_kv`, which writes new keys and values into a cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.appending import AppendInputs
from ..call.validation import refuse_unknown, without_unknown
from ..runtime.append import run_append


@without_unknown
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens_k: Tensor,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
    q: Tensor | None = None,
    q_positions: Tensor | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor | None:
    """Writes new keys and values in place into a cache, with rotary embeddings applied on the way.

    Token i of a sequence's n new ones is written at position ``seqlens_k - n + i``: the new tokens are its last ones.
    With cos and sin, keys (and q, which is returned) are rotated by their positions before they are written. There is
    no host-device synchronisation, and one CUDA graph serves all lengths: `seqlens_k` and `page_table` are read on the
    device when the graph is replayed.

    Args:
        k: new keys (batch, new, kv_heads, head_dim), or with cu_seqlens_q (total, kv_heads, head_dim). float16,
            bfloat16, float32 or float64 (GPU kernels: not float64). All tensors of keys, values and queries have one
            dtype, and any strides with a contiguous last dimension.
        v: new values, the same with head_dim_v.
        k_cache: (batch, capacity, kv_heads, head_dim), or with page_table pages (pages, page_size, kv_heads, head_dim)
            of any size. Written in place; k_cache and v_cache may be views of one buffer. Rows that no new token
            belongs to are neither read nor written.
        v_cache: the same with head_dim_v.
        seqlens_k: int32 (batch,), contiguous, on the device: the number of keys of each sequence, the new ones
            included. A sequence with fewer keys than new tokens keeps the last ones: tokens at negative positions are
            not written. So a padding entry of a batch has a length of 0.
        page_table: int32 (batch, width), any strides: position j of sequence b is token ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Entries that no new token belongs to may be anything, such as -1. For a
            contiguous cache whose rows are in another order than the batch: ``page_table=rows[:, None]``.
        cu_seqlens_q: int32 (batch + 1,), contiguous: the new tokens of sequence b are rows ``cu_seqlens_q[b] :
            cu_seqlens_q[b + 1]`` of k, v and q. Rows behind the last sequence are ignored.
        cos: (rows, rotary_dim / 2): row p has the cosines of the angles at position p; any floating-point dtype. The
            first rotary_dim elements of each head are rotated, which may be fewer than head_dim.
        sin: the sines, of cos's shape and dtype.
        interleaved: whether the pairs that are rotated are neighbours, elements 2 i and 2 i + 1 (GPT-J). Else they are
            elements i and i + rotary_dim / 2 (GPT-NeoX, Llama in transformers).
        positions: int32 (batch, new), or (total,) with cu_seqlens_q, any strides: the rotary positions of the new
            tokens, and of q. None: their positions in the cache. They differ for drafts of speculative decoding, whose
            siblings in a tree have one position, and for caches that have dropped tokens.
        q: queries to rotate (batch, q_len, heads, head_dim), or (total, heads, head_dim) with cu_seqlens_q; any number
            of heads.
        q_positions: int32 (batch, q_len), or (total,): the rotary positions of q. None: `positions`, or without these
            ``seqlens_k - q_len + i`` for query i. To rotate all queries of a sequence by one position, as flash-attn
            does without a causal mask or a window: ``position[:, None].expand(-1, q_len)``.
        backend: "tilelang", "triton" or "torch". The named backend runs the call or raises; None takes the first that
            accepts the call.
        **unknown: not accepted. Any other name raises a TypeError that suggests the right argument.

    Returns:
        The rotated q, a new contiguous tensor; None without q. The rotation is computed in float32 (float64 for
        float64) and rounded once. A row at a negative position is returned, or written, as it is; so is a row of no
        sequence, unless `positions` or `q_positions` give it a position.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what is accepted. The
            *values* of seqlens_k (from 0 to the capacity), page_table, cu_seqlens_q and the positions (below the rows
            of cos) are checked at once on a CPU, before anything is written. On a GPU that would take a
            synchronisation: tokens whose place does not exist are not written, and a later call on caches, or
            :func:`tileattn.check_caches`, raises.
        NotImplementedError: no backend, or not the named one, runs the call; or a cache is in fp8.

    Two tokens must not be written at one place: if the tables of two sequences share the page of new tokens, or one
    table has it twice, either token may be there afterwards. Only the device knows the tables, so this is not checked.
    Pages of a common prefix may be shared, as nothing is written to them.

    There are no gradients: a cache must not require grad, nor other tensors while grad mode is on. Under torch.compile
    it is one operator, ``tileattn::append_kv``, which mutates the caches in place.

    Source: Su et al. 2021 (RoFormer, arXiv 2104.09864); pages: Kwon et al. 2023 (vLLM, arXiv 2309.06180).
    """
    if unknown:
        refuse_unknown(append_kv, unknown)
    inputs = AppendInputs(
        k, v, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, cos, sin, positions, q, q_positions
    )
    return run_append(inputs, interleaved, backend)
