"""The kernel of append_kv: rotates new keys and queries, and writes keys and values into the cache.

Block (row, part) has some pieces (pieces.py) of row `row` of k, v and q: each thread has one. The threads of a block
find the row's sequence, position and page by themselves: they read the same few integers. A thread loads its elements
before it looks for their place, so that the latencies overlap.

Places that do not exist are left out, so that nothing outside of the cache is written, and are recorded in the device's
status (:mod:`tileattn.call.cache_status`) by one thread of the row.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call.appending import AppendCall
from ....call.cache_fields import FIELDS, POSITIONS
from ..packed.dependent_launch import let_next_start
from ..tile.assume import assume_aligned
from .elements import move, rotate
from .pieces import pieces_of
from .place import NOWHERE, check_bounds, find_page, find_position, find_sequence

THREADS = 128
OF_K, OF_V, OF_Q, NOTHING = range(4)  # whose piece a thread has


def append_kernel(call: AppendCall) -> Any:
    """The TileLang function ``append(k, v, k_cache, v_cache, seqlens_k, status, [page_table], [cu_seqlens_q], [cos,
    sin], [positions], [q, rotated], [q_positions], capacity, pages, rows, steps)``

    Tensors are those of :class:`AppendInputs`; ``rotated`` is q's result, contiguous. ``capacity`` and ``pages`` are
    the cache's, and 0 for an empty cache, whose tensors must have elements. ``rows`` is the number of rows of each
    batch element: the larger one of k's and q's. ``steps`` is that of the search for a row's sequence: 2**steps is at
    least the number of sequences.
    """
    builder = Builder()
    with builder.prim_func("append"):
        _kernel(call)(_declare(builder, call))
    return builder.get()


def _declare(builder: Builder, call: AppendCall) -> SimpleNamespace:
    sizes = {name: T.dynamic(name) for name in ("batch", "k_rows", "kv_heads", "cache_rows", "tokens", "sequences")}
    s = SimpleNamespace(**sizes)
    dtype = str(call.dtype).removeprefix("torch.")

    def strided(name: str, shape: list[Any], dtype: str = dtype, last: Any = 1) -> Any:
        strides = [T.dynamic(f"{name}_stride{axis}", "int64") for axis in range(len(shape) - 1)]
        return builder.prim_func_arg(name, T.StridedTensor(shape, [*strides, last], dtype))

    def of_ints(name: str, shape: list[Any]) -> Any:
        return strided(name, shape, "int32", T.dynamic(f"{name}_last_stride", "int64"))

    arg = SimpleNamespace(page_table=None, cu_seqlens_q=None, cos=None, sin=None, positions=None, q=None, rotated=None)
    arg.q_positions, arg.q_rows, arg.heads = None, 0, 0
    arg.k = strided("k", [s.batch, s.k_rows, s.kv_heads, call.head_dim])
    arg.v = strided("v", [s.batch, s.k_rows, s.kv_heads, call.head_dim_v])
    arg.k_cache = strided("k_cache", [s.cache_rows, s.tokens, s.kv_heads, call.head_dim])
    arg.v_cache = strided("v_cache", [s.cache_rows, s.tokens, s.kv_heads, call.head_dim_v])
    arg.seqlens_k = builder.prim_func_arg("seqlens_k", T.Tensor([s.sequences], "int32"))
    arg.status = builder.prim_func_arg("status", T.Tensor([FIELDS], "int32"))
    if call.paged:
        arg.page_table = of_ints("page_table", [s.sequences, T.dynamic("width")])
    if call.packed:
        arg.cu_seqlens_q = builder.prim_func_arg("cu_seqlens_q", T.Tensor([T.dynamic("bounds")], "int32"))
    if call.rotary_dim:
        table = str(call.table_dtype).removeprefix("torch.")
        arg.angles = T.dynamic("angles")
        # Not "cos" and "sin", which are functions in CUDA.
        arg.cos, arg.sin = (strided(name, [arg.angles, call.rotary_dim // 2], table) for name in ("cosines", "sines"))
    if call.positions:
        arg.positions = of_ints("positions", [s.batch, s.k_rows])
    if call.with_q:
        arg.q_rows, arg.heads = T.dynamic("q_rows"), T.dynamic("heads")
        arg.q = strided("q", [s.batch, arg.q_rows, arg.heads, call.head_dim])
        of_q = [s.batch, arg.q_rows, arg.heads, call.head_dim]
        arg.rotated = builder.prim_func_arg("rotated", T.Tensor(of_q, dtype))
    if call.q_positions:
        arg.q_positions = of_ints("q_positions", [s.batch, arg.q_rows])
    scalars = {name: builder.prim_func_arg(name, T.int32()) for name in ("capacity", "pages", "rows", "steps")}
    return SimpleNamespace(**vars(arg), **sizes, **scalars)


def _kernel(call: AppendCall) -> Any:
    """The macro that emits the kernel, given its parameters."""
    dtype, most = str(call.dtype).removeprefix("torch."), 16 // call.dtype.itemsize
    of_k, of_v = pieces_of(call, call.head_dim, call.rotary_dim), pieces_of(call, call.head_dim_v, 0)

    @T.macro
    def kernel(arg):
        of_keys, of_values = arg.kv_heads * of_k.count, arg.kv_heads * of_v.count
        blocks = T.ceildiv(of_keys + of_values + arg.heads * of_k.count, THREADS)
        with T.Kernel(arg.batch * arg.rows, blocks, threads=THREADS) as (block_row, part):
            let_next_start(call.arch)
            _promise_alignment(call, arg)
            thread = T.get_thread_binding()
            b = T.alloc_var("int32", init=T.truncdiv(block_row, arg.rows))
            i = T.alloc_var("int32", init=T.truncmod(block_row, arg.rows))
            # The thread's tensor, head and piece. Variables do not change in a branch whose condition reads them:
            # TileLang 0.1.15 takes the condition to hold in the whole branch.
            unit = T.alloc_var("int32", init=part * THREADS + thread)
            tensor = T.if_then_else(unit < of_keys, OF_K, T.if_then_else(unit < of_keys + of_values, OF_V, OF_Q))
            own = T.alloc_var("int32", init=tensor)
            before = T.if_then_else(own == OF_K, 0, T.if_then_else(own == OF_V, of_keys, of_keys + of_values))
            rest = T.alloc_var("int32", init=unit - before)
            pieces = T.alloc_var("int32", init=T.if_then_else(own == OF_V, of_v.count, of_k.count))
            h = T.alloc_var("int32", init=T.truncdiv(rest, pieces))
            piece = T.alloc_var("int32", init=rest - h * pieces)
            exists = (i < T.if_then_else(own == OF_Q, arg.q_rows, arg.k_rows)) & ((own != OF_Q) | (h < arg.heads))
            which = T.alloc_var("int32", init=T.if_then_else(exists, own, NOTHING))
            # [most]
            low, high = T.alloc_local([most], dtype), T.alloc_local([most], dtype)
            if which == OF_K:
                move(of_k, arg.k, b, i, h, piece, low, high, to_registers=True)
            if which == OF_V:
                move(of_v, arg.v, b, i, h, piece, low, high, to_registers=True)
            if call.with_q:
                if which == OF_Q:
                    move(of_k, arg.q, b, i, h, piece, low, high, to_registers=True)

            # The row's place in its sequence: position j of sequence `number`, or -1.
            reports = (part == 0) & (thread == 0)
            number, j, j_of_q = b, 0, 0
            if call.packed:
                number, j = find_sequence(arg, i)
                j_of_q = j
                if (block_row == 0) & (part == 0):
                    check_bounds(arg, thread, THREADS)
            else:
                seqlen = T.alloc_var("int32", init=T.max(arg.seqlens_k[b], 0))
                j, j_of_q = seqlen - arg.k_rows + i, seqlen - arg.q_rows + i
            page, token = find_page(call, arg, i, number, j, reports)
            if call.rotary_dim > 0:
                if (which == OF_K) | (which == OF_Q):
                    position = find_position(call, arg, b, i, which == OF_Q, j, j_of_q)
                    rotate(of_k, arg.cos, arg.sin, position, piece, low, high)
                    if (position >= arg.angles) & (h == 0) & (piece == 0):
                        arg.status[POSITIONS] = number + 1
            if page != NOWHERE:
                if which == OF_K:
                    move(of_k, arg.k_cache, page, token, h, piece, low, high, to_registers=False)
                if which == OF_V:
                    move(of_v, arg.v_cache, page, token, h, piece, low, high, to_registers=False)
            if call.with_q:
                if which == OF_Q:
                    move(of_k, arg.rotated, b, i, h, piece, low, high, to_registers=False)

    return kernel


def _promise_alignment(call: AppendCall, arg: Any) -> None:
    if call.aligned:
        tensors = [arg.k, arg.v, arg.k_cache, arg.v_cache, *((arg.q,) if call.with_q else ())]
        assume_aligned(*(x.strides for x in tensors), itemsize=call.dtype.itemsize)
    if call.table_dtype is not None and call.aligned_tables:
        assume_aligned(arg.cos.strides, arg.sin.strides, itemsize=call.table_dtype.itemsize)
