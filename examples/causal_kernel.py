"""A causal attention kernel of forty lines in TileLang, explained line by line in docs/tutorial/kernel.md.

    python examples/causal_kernel.py

It checks the kernel against PyTorch: without a GPU in the emulator, on a GPU there, where it is also timed.
"""

from typing import Any

import tilelang
import tilelang.language as T
import torch
import torch.nn.functional as F

from tileattn.testing import emulate


def causal_attention(heads, seqlen, dim, block_M=64, block_N=64):
    shape, rows = (heads, seqlen, dim), T.GemmWarpPolicy.FullRow
    scale = dim**-0.5 * 1.4426950408889634  # log2(e): GPUs compute 2^x
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
            m_old = T.alloc_fragment([block_M], "float32")
            alpha = T.alloc_fragment([block_M], "float32")
            l = T.alloc_fragment([block_M], "float32")
            l_tile = T.alloc_fragment([block_M], "float32")
            first = block * block_M
            T.copy(q[head, first : first + block_M, :], q_tile)
            T.fill(m, minus_inf)
            T.fill(l, 0)
            T.fill(acc, 0)
            end = T.min(first + block_M, seqlen)
            for tile in T.Pipelined(T.ceildiv(end, block_N), num_stages=1):
                key = tile * block_N
                T.copy(k[head, key : key + block_N, :], k_tile)
                for i, j in T.Parallel(block_M, block_N):
                    s[i, j] = T.if_then_else(key + j <= first + i, 0, minus_inf)
                T.gemm(q_tile, k_tile, s, transpose_B=True, policy=rows)  # s += q k^T
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    alpha[i] = T.exp2((m_old[i] - m[i]) * scale)
                for i, j in T.Parallel(block_M, block_N):
                    s[i, j] = T.exp2((s[i, j] - m[i]) * scale)
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


def compiled(function: Any, device: str) -> Any:
    """What runs the function on tensors of the device."""
    if device == "cpu":
        return emulate(function)
    # The copies stay in the warps that compute. The page on Hopper has warps of their own for them.
    return tilelang.compile(function, pass_configs={"tl.disable_warp_specialized": True})


def largest_error(heads: int, seqlen: int, dim: int, device: str) -> float:
    """The largest difference between the kernel's output and attention in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, seqlen, dim, generator=generator).half().to(device) for _ in range(3))
    o = torch.full_like(q, torch.nan)
    compiled(causal_attention(heads, seqlen, dim), device)(q, k, v, o)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    return (o - expected).abs().max().item()


def milliseconds(call: Any) -> float:
    """The median of 20 runs on the GPU."""
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[5:])[10]


def main() -> None:
    """Check the kernel; on a GPU, time it beside PyTorch's own attention."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"largest error on {device}: {largest_error(2, 200, 64, device):.1e}")
    if device == "cpu":
        return
    heads, seqlen, dim = 32, 4096, 64
    q, k, v = (torch.randn(heads, seqlen, dim, device=device).half() for _ in range(3))
    o = torch.empty_like(q)
    run = compiled(causal_attention(heads, seqlen, dim), device)
    flops = 4 * heads * dim * seqlen**2 / 2  # two products of 2 N N D each, the causal half
    for name, call in (
        ("this kernel", lambda: run(q, k, v, o)),
        ("PyTorch", lambda: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)),
    ):
        ms = milliseconds(call)
        print(f"{name}: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOPS")


if __name__ == "__main__":
    main()
