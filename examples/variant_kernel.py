"""The kernel of causal_kernel.py with any mask and score function, explained in docs/tutorial/variants.md.

    python examples/variant_kernel.py

It checks two variants against PyTorch in float64: without a GPU in the emulator, on a GPU there.
"""

from typing import Any

import tilelang
import tilelang.language as T
import torch

from tileattn.testing import emulate


def attention_kernel(heads, seqlen, dim, allows, key_range, modify, block_M=64, block_N=64):
    """Attention where allows(b, h, q, k) and modify(score, b, h, q, k) are Python functions of positions.

    key_range(q_lo, q_hi, seqlen) returns the keys lo <= k < hi that the queries q_lo..q_hi can see. Each query must see
    a key.
    """
    shape, rows = (heads, seqlen, dim), T.GemmWarpPolicy.FullRow
    scale, log2_e = dim**-0.5, 1.4426950408889634
    minus_inf = -T.infinity("float32")

    @T.prim_func
    def kernel(
        q: T.Tensor(shape, "float16"),
        k: T.Tensor(shape, "float16"),
        v: T.Tensor(shape, "float16"),
        o: T.Tensor(shape, "float16"),
    ):
        with T.Kernel(T.ceildiv(seqlen, block_M), heads, threads=128) as (block, head):
            q_tile = T.alloc_shared([block_M, dim], "float16")
            k_tile = T.alloc_shared([block_N, dim], "float16")
            v_tile = T.alloc_shared([block_N, dim], "float16")
            s = T.alloc_fragment([block_M, block_N], "float32")
            p = T.alloc_fragment([block_M, block_N], "float16")
            acc = T.alloc_fragment([block_M, dim], "float32")
            m = T.alloc_fragment([block_M], "float32")
            alpha = T.alloc_fragment([block_M], "float32")
            base = T.alloc_fragment([block_M], "float32")
            l = T.alloc_fragment([block_M], "float32")
            l_tile = T.alloc_fragment([block_M], "float32")
            first = block * block_M
            T.copy(q[head, first : first + block_M, :], q_tile)
            T.fill(m, minus_inf)
            T.fill(l, 0)
            T.fill(acc, 0)
            lo, hi = key_range(first, T.min(first + block_M, seqlen) - 1, seqlen)
            begin = T.max(lo, 0) // block_N
            end = T.ceildiv(T.min(hi, seqlen), block_N)
            for tile in T.Pipelined(end - begin, num_stages=1):
                key = (begin + tile) * block_N
                T.copy(k[head, key : key + block_N, :], k_tile)
                T.clear(s)
                T.gemm(q_tile, k_tile, s, transpose_B=True, policy=rows)  # s = q k^T
                for i, j in T.Parallel(block_M, block_N):
                    s[i, j] = T.if_then_else(
                        (key + j < seqlen) & allows(0, head, first + i, key + j),
                        modify(s[i, j] * scale, 0, head, first + i, key + j) * log2_e,
                        minus_inf,
                    )
                T.copy(m, alpha)  # the old maximum
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    base[i] = T.if_then_else(m[i] == minus_inf, 0, m[i])
                for i in T.Parallel(block_M):
                    alpha[i] = T.exp2(alpha[i] - base[i])
                for i, j in T.Parallel(block_M, block_N):
                    s[i, j] = T.exp2(s[i, j] - base[i])
                T.reduce_sum(s, l_tile, dim=1)
                for i in T.Parallel(block_M):
                    l[i] = alpha[i] * l[i] + l_tile[i]
                for i, j in T.Parallel(block_M, dim):
                    acc[i, j] *= alpha[i]
                T.copy(s, p)
                T.copy(v[head, key : key + block_N, :], v_tile)
                T.gemm(p, v_tile, acc, policy=rows)  # acc += p v
            for i, j in T.Parallel(block_M, dim):
                acc[i, j] /= l[i]
            T.copy(acc, o[head, first : first + block_M, :])

    return kernel


# --- Two variants ---


def near(b, h, q, k):
    """A query sees its own key and the 99 before it."""
    return (k <= q) & (q - k < 100)


def near_keys(q_lo, q_hi, seqlen):
    """The keys that the queries from q_lo to q_hi can see."""
    return q_lo - 99, q_hi + 1


def nearer(score, b, h, q, k):
    """Far keys weigh less, and in each head differently."""
    return score - 0.02 * (h + 1) * (q - k)


def chunk(b, h, q, k):
    """A query sees the keys of its own 128 positions, up to itself."""
    return (q // 128 == k // 128) & (k <= q)


def chunk_keys(q_lo, q_hi, seqlen):
    """The keys that the queries from q_lo to q_hi can see."""
    return q_lo // 128 * 128, q_hi + 1


def plain(score, b, h, q, k):
    """The score as it is."""
    return score


VARIANTS = {"near": (near, near_keys, nearer), "chunk": (chunk, chunk_keys, plain)}

# --- The check ---


def expected(q, k, v, allows, modify):
    """Attention by its definition in float64; the same two functions, on tensors of positions."""
    q, k, v = q.double(), k.double(), v.double()
    heads, seqlen, dim = q.shape
    position = torch.arange(seqlen, device=q.device)
    head, row, column = torch.arange(heads, device=q.device)[:, None, None], position[:, None], position[None, :]
    scores = modify(q @ k.transpose(1, 2) * dim**-0.5, 0, head, row, column)
    return scores.masked_fill(~allows(0, head, row, column), -torch.inf).softmax(dim=-1) @ v


def compiled(function: Any, device: str) -> Any:
    """What runs the function on tensors of the device."""
    if device == "cpu":
        return emulate(function)
    return tilelang.compile(function, pass_configs={"tl.disable_warp_specialized": True})


def largest_error(name: str, device: str, heads: int = 2, seqlen: int = 300, dim: int = 32) -> float:
    """The largest difference between a variant's output and its definition."""
    allows, key_range, modify = VARIANTS[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, seqlen, dim, generator=generator).half().to(device) for _ in range(3))
    o = torch.full_like(q, torch.nan)
    compiled(attention_kernel(heads, seqlen, dim, allows, key_range, modify), device)(q, k, v, o)
    return (o - expected(q, k, v, allows, modify)).abs().max().item()


def main() -> None:
    """Check both variants."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in VARIANTS:
        print(f"{name}: largest error on {device}: {largest_error(name, device):.1e}")


if __name__ == "__main__":
    main()
