"""dk, dv and dq's sums, generic schedule: FlashAttention-2's backward pass (Dao 2023, arXiv 2307.08691, algorithm 2).

Each block of threads owns one tile of ``block_N`` keys and values of one kv head. It walks over the query heads of the
group and, for each, over the tiles of ``block_M`` queries that the mask lets see its keys. Tiles of scores are
transposed, keys in rows, so that P^T and dS^T are first operands as they lie in registers:

    S = K Q^T, P = exp2(..)        see tile.py
    dV += P dO
    dP = V dO^T, dS = P * (dP - delta) * slope
    dK += dS Q
    dQ += dS^T K                   added to float32 sums in memory, by atomic operations

The scale joins at the end: dk's when it is stored, dq's in finish.py. dk and dv of a group of heads are summed in
registers. Where warps outnumber rows of 16 keys (wide heads), P and dS go through shared memory instead.

The tiles of all heads of a group make one loop, for a pipelined loop within another would be drained each time. They
are the same for each head; where the mask's answer depends on the head, all tiles.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ....call.facts import AttentionCall
from ....variant.program import Program
from ..architecture import padded
from ..tile import dropout, softmax
from ..tile.assume import assume_aligned, assume_filled
from ..tile.mask import keep_uniforms
from ..tile.softmax import ROWS
from ..tile.variables import address_holder, holder
from . import places, tile
from .config import BackwardConfig, copy_options, store_options, value_columns
from .operand_gradients import ADDED, BY_KEY, SPREAD, STORED, Path
from .operand_stores import add_to_elements, add_to_sums, hand_over_sums, spread, store_elements
from .visible import Viewers


def body(call: AttentionCall, config: BackwardConfig, traced: Program, paths: tuple[Path, ...], adds_dq: bool) -> Any:
    """The macro that emits the kernel, given its parameters (see signature.py).

    Args:
        call: of the forward pass.
        config: the tiles.
        traced: the variant.
        paths: to the tensors whose gradients are wanted.
        adds_dq: whether dq is added up here.
    """
    block_M, block_N = config.block_M, config.block_N
    dtype = str(call.dtype).removeprefix("torch.")
    head_dim, head_dim_v = padded(call.head_dim), value_columns(call, config)
    copy, store = copy_options(call), store_options(call)
    slopes = tile.Slopes(call, traced, tuple(path.load for path in paths)) if traced.score is not None else None
    # Python's tuples: a loop over them is unrolled while the kernel is traced, one over a range is a loop of its own.
    early_ones = tuple(range(len(slopes.program.early))) if slopes else ()
    sums_by_key = {
        index: number for number, index in enumerate(i for i, path in enumerate(paths) if path.way == BY_KEY)
    }
    shared = config.weights_shared(call)
    policy = T.GemmWarpPolicy.Square if shared else ROWS
    held, held_address = holder(call), address_holder(call)

    @T.macro
    def work(arg, at):
        seqlen_q, seqlen_k, kv_heads = arg.seqlen_q, arg.seqlen_k, arg.kv_heads
        key_tiles = T.ceildiv(seqlen_k, block_N)
        k_shared = T.alloc_shared([block_N, head_dim], dtype)
        v_shared = T.alloc_shared([block_N, head_dim_v], dtype)
        q_shared = T.alloc_shared([block_M, head_dim], dtype)
        do_shared = T.alloc_shared([block_M, head_dim_v], dtype)
        lse2_shared = T.alloc_shared([block_M], "float32")
        delta_shared = T.alloc_shared([block_M], "float32")
        ds_shared = T.alloc_shared([block_N, block_M], dtype)
        dk_shared = T.alloc_shared([block_N, head_dim], dtype)
        dv_shared = T.alloc_shared([block_N, head_dim_v], dtype)
        acc_s = T.alloc_fragment([block_N, block_M], "float32")
        acc_dp = T.alloc_fragment([block_N, block_M], "float32")
        early = [T.alloc_fragment([block_N, block_M], "float32") for _ in early_ones]
        acc_dk = T.alloc_fragment([block_N, head_dim], "float32")
        acc_dv = T.alloc_fragment([block_N, head_dim_v], "float32")
        acc_dq = T.alloc_fragment([block_M, head_dim], "float32")
        sums = [T.alloc_fragment([block_N], "float32") for _ in sums_by_key]
        tile_sum = T.alloc_fragment([block_N], "float32")
        if shared:
            p = T.alloc_shared([block_N, block_M], dtype)
            ds = ds_shared
        else:
            p = T.alloc_fragment([block_N, block_M], dtype)
            ds = T.alloc_fragment([block_N, block_M], dtype)

        assume_filled(arg.operands)
        if call.aligned:
            assume_aligned(arg.q.strides, arg.k.strides, arg.v.strides, arg.do.strides)
        # Held in variables: inlined wherever they are used, divisions would take the compiler most of its time.
        k_lo = T.alloc_var("int32", init=T.truncmod(at.block, key_tiles) * block_N)
        kv_h = T.alloc_var("int32", init=T.truncmod(T.truncdiv(at.block, key_tiles), kv_heads))
        b = T.alloc_var("int32", init=at.number(T.truncdiv(at.block, key_tiles)))
        q_b, k_b, v_b, do_b = (held_address(T.min(b, tensor.shape[0] - 1)) for tensor in (arg.q, arg.k, arg.v, arg.do))
        emit = tile.TileEmitter(arg.operands)
        visible = Viewers(traced, emit, seqlen_q, seqlen_k)
        k_hi = k_lo + block_N - 1
        first_head = kv_h * arg.heads_per_kv_head
        row_lo, row_hi = visible.rows(b, first_head, k_lo, k_hi)
        if visible.differ_by_head:
            # One loop for all heads of the group: their tiles must be the same.
            alone = arg.heads_per_kv_head == 1
            row_lo, row_hi = T.if_then_else(alone, row_lo, 0), T.if_then_else(alone, row_hi, seqlen_q)
        # By TMA at least one tile, all masked where nobody looks: the loads of K and V are waited for inside the loop.
        first = held(T.truncdiv(T.min(row_lo, seqlen_q - 1), block_M))
        tiles = held(T.max(T.ceildiv(row_hi, block_M) - first, at.least_tiles))
        first_position = seqlen_k - seqlen_q
        if not visible.differ_by_head:
            full_lo, full_hi = (held(bound) for bound in visible.full_rows(b, first_head, k_lo, k_hi))

        T.copy(arg.k[k_b, k_lo : k_lo + block_N, kv_h, 0:head_dim], k_shared, **copy)
        T.copy(arg.v[v_b, k_lo : k_lo + block_N, kv_h, 0:head_dim_v], v_shared, **copy)
        T.fill(acc_dk, 0)
        T.fill(acc_dv, 0)
        for number in sums_by_key.values():
            T.fill(sums[number], 0)
        c = arg.scale * softmax.LOG2E
        registers = slopes.allocate() if slopes is not None else None
        pattern = tile.Pattern(arg, early_ones) if call.dropout else None
        for step in T.Pipelined(tiles * arg.heads_per_kv_head, num_stages=config.num_stages):
            h = first_head + T.truncdiv(step, tiles)
            row = (first + T.truncmod(step, tiles)) * block_M
            q_lo = row + first_position
            # --- S, P
            T.copy(arg.q[q_b, row : row + block_M, h, 0:head_dim], q_shared, **copy)
            T.gemm(k_shared, q_shared, acc_s, transpose_B=True, clear_accum=True, policy=policy)
            T.copy(arg.lse2[b, h, row : row + block_M], lse2_shared, **copy)
            if slopes is not None:
                keep_uniforms(slopes, registers, emit, arg.scale, b, h)
                tile.modify(acc_s, early, slopes, registers, emit, arg.scale, b, h, q_lo, k_lo, block_N, block_M, True)
            if visible.differ_by_head:
                full_lo, full_hi = visible.full_rows(b, h, k_lo, k_hi)
            if (row < full_lo) | (row + block_M > full_hi):
                tile.hide(acc_s, visible, b, h, q_lo, k_lo, block_N, block_M, True)
            tile.probabilities(acc_s, lse2_shared, c if slopes is None else 1.0, block_N, block_M, True)
            # --- dV
            if call.dropout:
                dropout.enter_head(pattern.words, arg, b, h)
            tile.mark_dropped(acc_s, pattern, row, k_lo, block_N, block_M, True, False)
            tile.copy_kept(acc_s, p, pattern, block_N, block_M, True)
            for index in early_ones:
                tile.weigh(early[index], acc_s, block_N, block_M)
            T.copy(arg.do[do_b, row : row + block_M, h, 0:head_dim_v], do_shared, **copy)
            T.gemm(p, do_shared, acc_dv, policy=policy)
            # --- dP, dS
            T.gemm(v_shared, do_shared, acc_dp, transpose_B=True, clear_accum=True, policy=policy)
            T.copy(arg.delta[b, h, row : row + block_M], delta_shared, **copy)
            tile.drop_gradients(acc_s, acc_dp, pattern, block_N, block_M, True)
            if slopes is None or slopes.probability_is_kept():
                tile.score_gradients(acc_s, acc_dp, delta_shared, block_N, block_M, True)
            for index in early_ones:
                tile.score_gradients(early[index], acc_dp, delta_shared, block_N, block_M, True)
            # acc_dp has served and takes what is needed for a moment only.
            for index, path in enumerate(paths):
                factor = slopes.program.loads[index]
                if factor.late is not None:
                    tile.times_late(
                        acc_dp, tile.kept(factor, early, acc_s), factor.late, slopes, registers, emit, arg.scale, b,
                        h, q_lo, k_lo, block_N, block_M, True
                    )  # fmt: skip
                gradient = acc_dp if factor.late is not None else tile.kept(factor, early, acc_s)
                if path.way == BY_KEY:
                    add_to_sums(gradient, tile_sum, sums[sums_by_key[index]], block_N)
                    if T.truncmod(step, tiles) == tiles - 1:
                        hand_over_sums(sums[sums_by_key[index]], arg.handed_over[index], b, h, k_lo, block_N)
                if path.way == ADDED:
                    add_to_elements(gradient, arg.handed_over[index], path, emit, b, h, q_lo, k_lo, block_N, block_M)
                if path.way == STORED:
                    store_elements(gradient, arg.handed_over[index], path, emit, b, h, q_lo, k_lo, block_N, block_M)
                if path.way == SPREAD:
                    spread(gradient, arg.handed_over[index], b, h, row, k_lo, block_N, block_M)
            if slopes is None:
                T.copy(acc_s, ds)
            else:
                gradient = tile.kept(slopes.program.slope, early, acc_s)
                if slopes.program.slope.late is not None:
                    tile.times_late(
                        acc_dp, gradient, slopes.program.slope.late, slopes, registers, emit, arg.scale, b, h,
                        q_lo, k_lo, block_N, block_M, True
                    )  # fmt: skip
                    gradient = acc_dp
                T.copy(gradient, ds)
            if not shared:
                T.copy(ds, ds_shared)
            # --- dK, dQ
            T.gemm(ds, q_shared, acc_dk, policy=policy)
            if adds_dq:
                T.gemm(ds_shared, k_shared, acc_dq, transpose_A=True, clear_accum=True)
                for i, d in T.Parallel(block_M, head_dim):
                    T.atomic_add(arg.dq_sum[b, h, row + i, d], acc_dq[i, d])

        for i, d in T.Parallel(block_N, head_dim):
            acc_dk[i, d] *= arg.scale
        if call.dropout:
            for i, d in T.Parallel(block_N, head_dim_v):
                acc_dv[i, d] *= arg.weight
        T.copy(acc_dk, dk_shared)
        T.copy(dk_shared, arg.dk[b, k_lo : k_lo + block_N, kv_h, 0:head_dim], **store)
        T.copy(acc_dv, dv_shared)
        T.copy(dv_shared, arg.dv[b, k_lo : k_lo + block_N, kv_h, 0:head_dim_v], **store)

    @T.macro
    def kernel(arg):
        with T.Kernel(places.blocks(arg, "seqlen_k", block_N, arg.kv_heads), threads=config.threads) as block:
            at = places.find(arg, block, arg.kv_heads)
            if at.exists:
                work(at.arg, at)

    return kernel
