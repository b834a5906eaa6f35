"""FlashAttention in one file: forward and backward kernels in TileLang, a reference, a check and a timing.

    python examples/flash_attention.py             # with a GPU: check, then time beside PyTorch
    python examples/flash_attention.py --causal    # without one: check, on the emulator of tileattn.testing

Copy the file and change it. It needs torch and tilelang; without a GPU also tileattn and g++. Tensors are (batch,
seqlen, heads, head_dim), float16 or bfloat16. The package's own kernels do more (docs/tutorial).

Algorithm: FlashAttention-2 (Dao 2023, arXiv 2307.08691), with exponents to base 2, as the hardware computes them.
"""

import argparse
import functools
import math

import tilelang
import tilelang.language as T
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

LOG2E = math.log2(math.e)
ROWS = T.GemmWarpPolicy.FullRow  # each warp (32 threads) has whole rows of a product
PASSES = {
    "tl.enable_fast_math": True,
    # TileLang 0.1.15's own division of a block into loading and computing warps can hang where the number of tiles is
    # known at run time only. Here all warps compute.
    "tl.disable_warp_specialized": True,
}


def forward_kernel(
    head_dim: int, causal: bool, dtype: str, block_M: int = 128, block_N: int = 64, threads: int = 256, stages: int = 1
):
    """o = softmax(scale * q k^T) v, and lse2, the logarithm to base 2 of each row's denominator."""
    batch, seqlen, heads = T.dynamic("batch"), T.dynamic("seqlen"), T.dynamic("heads")
    shape, rows = [batch, seqlen, heads, head_dim], [batch, heads, seqlen]
    c = head_dim**-0.5 * LOG2E  # exp(scale * s) = exp2(c * s)

    def seen(row):
        """How many keys, from key 0 on, the query in this row sees."""
        return row + 1 if causal else seqlen

    @T.prim_func
    def forward(
        q: T.Tensor(shape, dtype), k: T.Tensor(shape, dtype), v: T.Tensor(shape, dtype),
        o: T.Tensor(shape, dtype), lse2: T.Tensor(rows, "float32"),
    ):  # fmt: skip
        # One block of threads for each block of queries of each head. The longest work first.
        with T.Kernel(T.ceildiv(seqlen, block_M), heads, batch, threads=threads) as (number, h, b):
            row = (T.ceildiv(seqlen, block_M) - 1 - number) * block_M
            q_shared = T.alloc_shared([block_M, head_dim], dtype)
            k_shared = T.alloc_shared([block_N, head_dim], dtype)
            v_shared = T.alloc_shared([block_N, head_dim], dtype)
            s = T.alloc_fragment([block_M, block_N], "float32")  # a fragment lies in the threads' registers
            p = T.alloc_fragment([block_M, block_N], dtype)
            acc_o = T.alloc_fragment([block_M, head_dim], "float32")
            m, m_old, alpha, l, l_tile = (T.alloc_fragment([block_M], "float32") for _ in range(5))

            T.copy(q[b, row : row + block_M, h, :], q_shared)  # rows beyond the last one are read as 0
            T.fill(m, -T.infinity("float32"))
            T.fill(l, 0)
            T.fill(acc_o, 0)
            for tile in T.Pipelined(T.ceildiv(T.min(seen(row + block_M - 1), seqlen), block_N), num_stages=stages):
                # S = Q K^T, -inf where a query does not see a key
                T.copy(k[b, tile * block_N : (tile + 1) * block_N, h, :], k_shared)
                T.gemm(q_shared, k_shared, s, transpose_B=True, clear_accum=True, policy=ROWS)
                if (tile + 1) * block_N > seen(row):
                    for i, j in T.Parallel(block_M, block_N):
                        s[i, j] = T.if_then_else(tile * block_N + j < seen(row + i), s[i, j], -T.infinity("float32"))
                # m = max(m_old, max of S), finite from the first tile on: every query sees key 0
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                # P = exp2(c * (S - m)); what was summed so far shrinks by alpha
                for i in T.Parallel(block_M):
                    alpha[i] = T.exp2(c * (m_old[i] - m[i]))
                for i, j in T.Parallel(block_M, block_N):
                    s[i, j] = T.exp2(c * s[i, j] - c * m[i])
                T.reduce_sum(s, l_tile, dim=1)
                for i in T.Parallel(block_M):
                    l[i] = l[i] * alpha[i] + l_tile[i]
                for i, d in T.Parallel(block_M, head_dim):
                    acc_o[i, d] *= alpha[i]
                # O += P V
                T.copy(s, p)
                T.copy(v[b, tile * block_N : (tile + 1) * block_N, h, :], v_shared)
                T.gemm(p, v_shared, acc_o, policy=ROWS)
            for i, d in T.Parallel(block_M, head_dim):
                acc_o[i, d] /= l[i]
            T.copy(acc_o, o[b, row : row + block_M, h, :])  # rows beyond the last one are not written
            for i in T.Parallel(block_M):
                l[i] = T.log2(l[i]) + c * m[i]
            T.copy(l, lse2[b, h, row : row + block_M])

    return forward


def backward_kernel(
    head_dim: int, causal: bool, dtype: str, block_M: int = 64, block_N: int = 128, threads: int = 256, stages: int = 1
):
    """dk and dv, and what is added to dq_sum (without the scale); delta = rowsum(do * o)."""
    batch, seqlen, heads = T.dynamic("batch"), T.dynamic("seqlen"), T.dynamic("heads")
    shape, rows = [batch, seqlen, heads, head_dim], [batch, heads, seqlen]
    scale = head_dim**-0.5

    def seen(row):
        return row + 1 if causal else seqlen

    @T.prim_func
    def backward(
        q: T.Tensor(shape, dtype), k: T.Tensor(shape, dtype), v: T.Tensor(shape, dtype), do: T.Tensor(shape, dtype),
        lse2: T.Tensor(rows, "float32"), delta: T.Tensor(rows, "float32"),
        dq_sum: T.Tensor(shape, "float32"), dk: T.Tensor(shape, dtype), dv: T.Tensor(shape, dtype),
    ):  # fmt: skip
        # One block of threads for each block of keys. It walks over the blocks of queries that see them.
        with T.Kernel(T.ceildiv(seqlen, block_N), heads, batch, threads=threads) as (number, h, b):
            key = number * block_N
            k_shared = T.alloc_shared([block_N, head_dim], dtype)
            v_shared = T.alloc_shared([block_N, head_dim], dtype)
            q_shared = T.alloc_shared([block_M, head_dim], dtype)
            do_shared = T.alloc_shared([block_M, head_dim], dtype)
            lse2_shared = T.alloc_shared([block_M], "float32")
            delta_shared = T.alloc_shared([block_M], "float32")
            ds_shared = T.alloc_shared([block_N, block_M], dtype)
            # Tiles of scores are transposed, keys in rows: P^T and dS^T are first operands as they lie in registers.
            s = T.alloc_fragment([block_N, block_M], "float32")
            ds = T.alloc_fragment([block_N, block_M], "float32")
            rounded = T.alloc_fragment([block_N, block_M], dtype)
            acc_dk = T.alloc_fragment([block_N, head_dim], "float32")
            acc_dv = T.alloc_fragment([block_N, head_dim], "float32")
            acc_dq = T.alloc_fragment([block_M, head_dim], "float32")

            T.copy(k[b, key : key + block_N, h, :], k_shared)
            T.copy(v[b, key : key + block_N, h, :], v_shared)
            T.fill(acc_dk, 0)
            T.fill(acc_dv, 0)
            first = key // block_M if causal else 0
            for tile in T.Pipelined(T.ceildiv(seqlen, block_M) - first, num_stages=stages):
                row = (first + tile) * block_M
                # S^T = K Q^T, P = exp2(c * S - lse2): no maximum is needed, for lse2 contains it
                T.copy(q[b, row : row + block_M, h, :], q_shared)
                T.copy(lse2[b, h, row : row + block_M], lse2_shared)
                T.gemm(k_shared, q_shared, s, transpose_B=True, clear_accum=True, policy=ROWS)
                for j, i in T.Parallel(block_N, block_M):
                    s[j, i] = T.exp2(scale * LOG2E * s[j, i] - lse2_shared[i])
                if key + block_N > seen(row):
                    for j, i in T.Parallel(block_N, block_M):
                        s[j, i] = T.if_then_else(key + j < seen(row + i), s[j, i], 0.0)
                # dV += P^T dO
                T.copy(s, rounded)
                T.copy(do[b, row : row + block_M, h, :], do_shared)
                T.gemm(rounded, do_shared, acc_dv, policy=ROWS)
                # dP^T = V dO^T, dS = P * (dP - delta)
                T.copy(delta[b, h, row : row + block_M], delta_shared)
                T.gemm(v_shared, do_shared, ds, transpose_B=True, clear_accum=True, policy=ROWS)
                for j, i in T.Parallel(block_N, block_M):
                    ds[j, i] = s[j, i] * (ds[j, i] - delta_shared[i])
                # dK += dS^T Q
                T.copy(ds, rounded)
                T.gemm(rounded, q_shared, acc_dk, policy=ROWS)
                # dQ += dS K: other blocks add to the same rows at the same time
                T.copy(rounded, ds_shared)
                T.gemm(ds_shared, k_shared, acc_dq, transpose_A=True, clear_accum=True)
                for i, d in T.Parallel(block_M, head_dim):
                    if row + i < seqlen:
                        T.atomic_add(dq_sum[b, row + i, h, d], acc_dq[i, d])
            for j, d in T.Parallel(block_N, head_dim):
                acc_dk[j, d] *= scale
            T.copy(acc_dk, dk[b, key : key + block_N, h, :])
            T.copy(acc_dv, dv[b, key : key + block_N, h, :])

    return backward


@functools.cache
def compiled(kernel, head_dim: int, causal: bool, dtype: str, device: str):
    """The kernel as a function of tensors. New sizes compile nothing; a new head dim, dtype or mask does."""
    function = kernel(head_dim, causal, dtype)
    if device == "cuda":
        return tilelang.compile(function, target="cuda", pass_configs=PASSES)
    from tileattn.testing import emulate

    return emulate(function)


class FlashAttention(torch.autograd.Function):
    """What autograd calls. Only o and one number for each row are kept, no N x N matrix."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        q, k, v = (x.contiguous() for x in (q, k, v))
        o, lse2 = torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.kernel = q.shape[3], causal, str(q.dtype).removeprefix("torch."), q.device.type
        compiled(forward_kernel, *ctx.kernel)(q, k, v, o, lse2)
        ctx.save_for_backward(q, k, v, o, lse2)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse2 = ctx.saved_tensors
        delta = (do.float() * o.float()).sum(-1).transpose(1, 2).contiguous()
        dq_sum, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
        compiled(backward_kernel, *ctx.kernel)(q, k, v, do.contiguous(), lse2, delta, dq_sum, dk, dv)
        return (dq_sum * q.shape[3] ** -0.5).to(q.dtype), dk, dv, None


def attention(q, k, v, causal: bool = False):
    """Attention of q, k and v, all (batch, seqlen, heads, head_dim) of one shape and dtype, with gradients."""
    shapes, dtypes = ({str(each(x)) for x in (q, k, v)} for each in (lambda x: tuple(x.shape), lambda x: x.dtype))
    if len(shapes) > 1 or len(dtypes) > 1 or q.dtype not in (torch.float16, torch.bfloat16):
        given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"q, k and v must have one shape and one dtype, float16 or bfloat16, got {given}")
    if q.dim() != 4 or q.numel() == 0 or q.shape[3] not in (32, 64, 128):
        raise ValueError(f"q must be (batch, seqlen, heads, head_dim), head_dim 32, 64 or 128, got {tuple(q.shape)}")
    return FlashAttention.apply(q, k, v, causal)


def reference(q, k, v, causal: bool = False):
    """The definition, with the whole N x N matrix."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def outputs(function, q, k, v, do):
    """o, dq, dk and dv of an attention function."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = function(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def check(q, k, v, do, causal: bool = False) -> None:
    """Prints the largest errors against float64; raises if one is over twice that of the definition in q's dtype."""
    definition = functools.partial(reference, causal=causal)
    exact = outputs(definition, *(x.double() for x in (q, k, v, do)))
    eager = outputs(definition, q, k, v, do)
    ours = outputs(functools.partial(attention, causal=causal), q, k, v, do)
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), ours, eager, exact, strict=True):
        error, eager_error = ((x.double() - c).abs().max().item() for x in (a, b))
        print(f"{name:2}  error {error:.1e}, of the definition in {q.dtype}: {eager_error:.1e}")
        if not error <= 2 * eager_error + torch.finfo(q.dtype).eps * c.abs().max().item():  # also if it is NaN
            raise AssertionError(f"{name} is wrong: its error is {error:.1e}, and {eager_error:.1e} by the definition")


def measure(q, k, v, do, causal: bool = False) -> None:
    """Prints the times of this file and of PyTorch's attention, forward and backward, on a GPU."""
    batch, seqlen, heads, head_dim = q.shape
    # Two products of 2 * N * N * head_dim operations for each head; causal, half of them.
    operations = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1)

    def pytorch(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    for name, function in ("this file", functools.partial(attention, causal=causal)), ("PyTorch", pytorch):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = function(*leaves)
        forward = Timer("f(*x)", globals={"f": function, "x": (q, k, v)}).blocked_autorange().median
        gradients = functools.partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
        backward = Timer("f()", globals={"f": gradients}).blocked_autorange().median
        # The backward pass has five products where the forward pass has two.
        speeds = operations / forward / 1e12, 2.5 * operations / backward / 1e12
        print(f"{name:9}  forward {forward * 1e3:7.3f} ms, {speeds[0]:4.0f} TFLOPS", end="")
        print(f"    backward {backward * 1e3:7.3f} ms, {speeds[1]:4.0f} TFLOPS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--causal", action="store_true", help="a query sees no key after itself")
    parser.add_argument("--seqlen", type=int, help="queries and keys of the timing (default: 4096)", default=4096)
    options = parser.parse_args()
    if options.seqlen < 1:
        parser.error(f"--seqlen must be at least 1, got {options.seqlen}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # An odd length, for the ends of tiles. The emulator runs each GPU thread in turn, so it gets a small problem.
    shape = (2, 1111, 4, 64) if device == "cuda" else (1, 150, 1, 64)
    check(*(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)), options.causal)
    if device == "cuda":
        shape = (max(1, 16384 // options.seqlen), options.seqlen, 16, 64)
        measure(*(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)), options.causal)
    else:
        print("No GPU: the kernels ran on tileattn's emulator. It checks results; it says nothing about speed.")


if __name__ == "__main__":
    main()
