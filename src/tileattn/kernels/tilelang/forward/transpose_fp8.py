"""Values of fp8 for the matrix units: transposed, and with the keys in the order of the weights.

wgmma reads 8-bit operands only along the sum, and P V sums over keys: V must lie with its keys innermost. Within each
group of 16, keys are exchanged besides, so that each thread can use the weights that it holds as they are
(``softmax.key_of_column``; the idea is that of Shah et al. 2024, arXiv 2407.08608, section 3.3).

A block takes KEYS keys of one head of ``v`` (batch, seqlen_k, kv_heads, head_dim_v), any strides of 16 bytes, to
``transposed`` (batch, kv_heads, head_dim_v, padded_k), contiguous; padded_k is the next multiple of KEYS, and what lies
behind the last key is 0: a weight of 0 times the bits that happened to be there could be NaN.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder

from ....call.facts import AttentionCall
from ..architecture import TRANSPOSED_KEYS as KEYS
from ..architecture import padded
from ..build.compile import OWN_BARRIERS
from ..tile import softmax
from ..tile.assume import assume_aligned
from .signature import transposed_values

THREADS = 128


def transpose_kernel(call: AttentionCall) -> Any:
    """The TileLang function ``transpose(v, transposed)``."""
    builder = Builder()
    with builder.prim_func("transpose"):
        seqlen_k, kv_heads = T.dynamic("seqlen_k"), T.dynamic("kv_heads")
        strides = [T.dynamic(f"v_stride{axis}", "int64") for axis in range(3)] + [1]
        shape = [T.dynamic("v_batch"), seqlen_k, kv_heads, call.head_dim_v]
        v = builder.prim_func_arg("v", T.StridedTensor(shape, strides, "float8_e4m3fn"))
        transposed = builder.prim_func_arg("transposed", transposed_values(call, kv_heads))
        _body(padded(call.head_dim_v, 1))(v, transposed)
    return builder.get().with_attr(OWN_BARRIERS, True)


def _body(head_dim_v: int) -> Any:
    @T.macro
    def kernel(v, transposed):
        tiles = T.ceildiv(v.shape[1], KEYS)
        with T.Kernel(tiles * v.shape[2] * v.shape[0], threads=THREADS) as block:
            assume_aligned(v.strides, itemsize=1)
            rows = T.alloc_shared([KEYS, head_dim_v], "float8_e4m3fn")
            columns = T.alloc_shared([head_dim_v, KEYS], "float8_e4m3fn")
            k_lo = T.truncmod(block, tiles) * KEYS
            pair = T.truncdiv(block, tiles)
            b, h = T.truncdiv(pair, v.shape[2]), T.truncmod(pair, v.shape[2])
            # [KEYS, head_dim_v]
            T.copy(v[b, k_lo : k_lo + KEYS, h, 0:head_dim_v], rows)
            T.sync_threads()
            # Neighbouring threads read neighbouring bytes of a row; each writes 16 keys of a column of V at a time.
            thread = T.get_thread_binding()
            sixteen = T.alloc_local([16], "float8_e4m3fn")
            for n in T.unroll(head_dim_v * KEYS // 16 // THREADS):
                d, j = (n * THREADS + thread) % head_dim_v, (n * THREADS + thread) // head_dim_v * 16
                for i in T.unroll(16):
                    sixteen[i] = rows[j + softmax.key_of_column(i), d]
                for i in T.vectorized(16):
                    columns[d, j + i] = sixteen[i]
            T.fence_proxy_async()
            T.sync_threads()
            # [head_dim_v, KEYS]
            T.copy(columns, transposed[b, h, 0:head_dim_v, k_lo : k_lo + KEYS])

    return kernel
