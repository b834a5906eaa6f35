"""Times configurations of the Triton kernels on the present GPU; the best ones belong into kernels/triton/config.py.

    python benchmarks/tune_triton.py                       # D64 and D128, causal and full; a few minutes on an H200
    python benchmarks/tune_triton.py --dims 128 --kernels keys --causal
    python benchmarks/tune_triton.py --pointers --warp-specialize     # such candidates as well
    python benchmarks/tune_triton.py --show                # what would be measured; needs no GPU

Candidates are compiled in processes of their own first, which fill Triton's cache; one that does not compile, or hangs
there, is left out. Then each is checked against the default's result and timed. "queries" prepares what "keys" needs;
alone, "keys" has a kernel for that, which is in its time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tileattn.call import AttentionCall, BackwardCall, device_arch
from tileattn.kernels.triton.config import Config, default, overridden
from tileattn.variant import CAUSAL, Operands, encode

SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"block_M": (64, 128), "block_N": (64, 128), "num_stages": (2, 3, 4)},
    "keys": {"block_M": (32, 64, 128), "block_N": (64, 128), "num_stages": (2, 3)},
    "queries": {"block_M": (64, 128), "block_N": (32, 64, 128), "num_stages": (2, 3)},
}
TOKENS, CHANNELS = 16384, 2048
COMPILES_WITHIN_S = 120.0
WORST_ERROR = 0.02  # beside the default's result: a wrong kernel is far beyond it


def candidates(kernel: str, arch: str, head_dim: int, pointers: bool, warp_specialize: bool) -> list[Config]:
    """What is measured: the default first."""
    space = SPACE[kernel]
    copies = (True, False) if pointers else (True,)
    call = AttentionCall(torch.bfloat16, head_dim, head_dim, arch=arch)
    found = [default(kernel, call)]
    special = (False, True) if warp_specialize else (False,)
    for M, N, stages in itertools.product(*space.values()):
        for warps, tma, specialized in itertools.product((4, 8), copies, special):
            if tma or not specialized:
                found.append(Config(M, N, warps, stages, tma, specialized))
    return list(dict.fromkeys(found))


def prepared(kernel: str, head_dim: int, causal: bool, seqlen: int, config: Config | None) -> Any:
    """A function without arguments that runs the kernel on tensors of its own and returns what it computes."""
    from tileattn.kernels.triton.launch import Backward, Forward

    heads = CHANNELS // head_dim
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (max(TOKENS // seqlen, 1), seqlen, heads, head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
    key, _ = encode(CAUSAL if causal else None, ())
    call = AttentionCall(q.dtype, head_dim, head_dim, key, needs_grad=True, arch=device_arch(q.device))
    with overridden(**({} if config is None else {kernel: config})):
        forward = Forward(call, q.shape, k.shape, head_dim**-0.5)
        wants = (kernel == "queries", kernel == "keys", kernel == "keys", False)
        backward = Backward(BackwardCall(call, wants), q.shape, k.shape, head_dim**-0.5)
    if kernel == "forward":
        return lambda: forward(q, k, v, None, Operands())[0]
    o, lse = forward(q, k, v, None, Operands())

    def run() -> torch.Tensor:
        found = backward(do, None, q, k, v, o, lse, None, Operands())
        return torch.cat([x for x in found[:3] if x is not None])

    return run


def compiles(kernel: str, head_dim: int, causal: bool, config: Config) -> str | None:
    """None, or what went wrong."""
    try:
        prepared(kernel, head_dim, causal, 1024, config)()
        torch.cuda.synchronize()
    except Exception as error:  # Triton's compiler fails in many ways
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return None


def measure(kernel: str, head_dim: int, causal: bool, seqlen: int, config: Config) -> tuple[float, float]:
    """Milliseconds, and the error beside the default's result."""
    from triton.testing import do_bench

    expected = prepared(kernel, head_dim, causal, seqlen, None)().float()
    run = prepared(kernel, head_dim, causal, seqlen, config)
    error = float((run().float() - expected).norm() / expected.norm())
    return do_bench(run, warmup=10, rep=40, return_mode="median"), error


def tflops(kernel: str, head_dim: int, causal: bool, seqlen: int, ms: float) -> float:
    """Of the work that the kernel does, scores computed anew included."""
    products = {"forward": 2, "keys": 4, "queries": 3}[kernel]
    scores = max(TOKENS // seqlen, 1) * (CHANNELS // head_dim) * seqlen**2 * (0.5 if causal else 1.0)
    return 2 * products * scores * head_dim / ms * 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--kernels", default=",".join(SPACE))
    parser.add_argument("--causal", action="store_true", help="causal only; default: causal and full")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--pointers", action="store_true", help="without TMA as well")
    parser.add_argument("--warp-specialize", action="store_true", help="with Triton's warp specialisation as well")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16))
    args = parser.parse_args()
    arch = "sm_90a" if args.show else device_arch(torch.device("cuda"))
    for kernel, text in itertools.product(args.kernels.split(","), args.dims.split(",")):
        tune(kernel, int(text), arch, args)


def tune(kernel: str, head_dim: int, arch: str, args: argparse.Namespace) -> None:
    """Prints the candidates of one kernel, best first."""
    configs = candidates(kernel, arch, head_dim, args.pointers, args.warp_specialize)
    print(f"\n{kernel} D{head_dim}: {len(configs)} candidates", flush=True)
    if args.show:
        print(*configs, sep="\n")
        return
    began, kinds = time.perf_counter(), (True,) if args.causal else (True, False)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {(c, kind): pool.submit(compiles, kernel, head_dim, kind, c) for c in configs for kind in kinds}
        failed = {each: job.result(COMPILES_WITHIN_S * len(jobs)) for each, job in jobs.items()}
    print(f"  compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for causal in kinds:
        rows = []
        for config in configs:
            if failed[config, causal] is None:
                ms, error = measure(kernel, head_dim, causal, args.seqlen, config)
                rows.append((ms if error < WORST_ERROR else float("inf"), error, config))
            else:
                print(f"  left out: {config}: {failed[config, causal]}")
        print(f"  {'causal' if causal else 'full'}, seqlen {args.seqlen} (the default is {configs[0]})")
        for ms, error, config in sorted(rows)[:8]:
            rate = tflops(kernel, head_dim, causal, args.seqlen, ms)
            mark = "*" if config == configs[0] else " "
            print(f"  {mark} {ms:8.3f} ms  {rate:6.1f} TFLOPS  error {error:.1e}  {config}", flush=True)
        (ms, _, _), *_ = [row for row in rows if row[2] == configs[0]] or [(float("nan"), 0, 0)]
        print(f"    {ms:8.3f} ms  the default", flush=True)


if __name__ == "__main__":
    main()
