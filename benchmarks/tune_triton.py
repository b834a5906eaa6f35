"""Times configurations of the Triton kernels on this machine's GPU; the best belong into kernels/triton/defaults.py.

    python benchmarks/tune_triton.py                       # D64 and D128, causal and full; a few minutes on an H200
    python benchmarks/tune_triton.py --dims 128 --kernels keys --causal
    python benchmarks/tune_triton.py --pointers --warp-specialize     # such candidates as well
    python benchmarks/tune_triton.py --dtype float32 --seqlen 2048
    python benchmarks/tune_triton.py --show                # what would be measured; needs no GPU

Candidates are first compiled in processes of their own, which fill Triton's cache. One that does not compile, or hangs,
is left out. Then each is checked against the default's result and timed. The kernel "queries" prepares what "keys"
needs. "keys" alone needs another kernel for that, whose time is included.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

from tileattn.call.facts import AttentionCall, BackwardCall, device_arch
from tileattn.call.inputs import Inputs
from tileattn.kernels.triton.defaults import default, overridden
from tileattn.kernels.triton.tile_sizes import Config
from tileattn.variant.key import CAUSAL, encode

SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"block_M": (64, 128), "block_N": (64, 128), "num_stages": (2, 3, 4)},
    "keys": {"block_M": (32, 64, 128), "block_N": (64, 128), "num_stages": (2, 3)},
    "queries": {"block_M": (64, 128), "block_N": (32, 64, 128), "num_stages": (2, 3)},
}
# A product in float32 is six of bfloat16, whose factors are in registers: small tiles.
SPACE_FLOAT32: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"block_M": (32, 64, 128), "block_N": (16, 32, 64), "num_stages": (1, 2)},
    "keys": {"block_M": (16, 32), "block_N": (16, 32, 64, 128), "num_stages": (1,)},
    "queries": {"block_M": (32, 64, 128), "block_N": (16, 32), "num_stages": (1, 2)},
}
TOKENS, CHANNELS = 16384, 2048
COMPILES_WITHIN_S = 120.0
WORST_ERROR = 0.02  # beside the default's result: a wrong kernel is far beyond it


class Problem(NamedTuple):
    """The call that a kernel is timed on: causal or full attention of a number of tokens."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    causal: bool
    seqlen: int

    def run(self, config: Config | None) -> Any:
        """A function without arguments that runs the kernel on tensors of its own and returns what it computes."""
        from tileattn.kernels.triton.backward.launch import Backward
        from tileattn.kernels.triton.forward.launch import Forward

        heads, scale = CHANNELS // self.head_dim, self.head_dim**-0.5
        shape = (max(TOKENS // self.seqlen, 1), self.seqlen, heads, self.head_dim)
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=self.dtype, generator=generator) for _ in range(4))
        key, _ = encode(CAUSAL if self.causal else None, ())
        call = AttentionCall(self.dtype, *shape[3:] * 2, key, needs_grad=True, arch=device_arch(q.device))
        with overridden(**({} if config is None else {self.kernel: config})):
            forward = Forward(call, q.shape, k.shape, scale)
            wants = (self.kernel == "queries", self.kernel == "keys", self.kernel == "keys", False)
            backward = Backward(BackwardCall(call, wants), q.shape, k.shape, scale)
        if self.kernel == "forward":
            return lambda: forward(Inputs(q, k, v))[0]
        o, lse = forward(Inputs(q, k, v))
        assert lse is not None  # the call asks for it

        def gradients() -> torch.Tensor:
            parts = backward(Inputs(q, k, v), o, lse, do, None)
            return torch.cat([x for x in parts[:3] if x is not None])

        return gradients

    def tflops(self, ms: float) -> float:
        """TFLOPS of the kernel's work, recomputed scores included."""
        products = {"forward": 2, "keys": 4, "queries": 3}[self.kernel]
        heads = max(TOKENS // self.seqlen, 1) * (CHANNELS // self.head_dim)
        scores = heads * self.seqlen**2 * (0.5 if self.causal else 1.0)
        return 2 * products * scores * self.head_dim / ms * 1e-9


def candidates(problem: Problem, arch: str, pointers: bool, warp_specialize: bool) -> list[Config]:
    """The configurations that are measured, the default first."""
    exact = problem.dtype == torch.float32
    space = (SPACE_FLOAT32 if exact else SPACE)[problem.kernel]
    copies = (False,) if exact else (True, False) if pointers else (True,)
    key, _ = encode(CAUSAL if problem.causal else None, ())
    call = AttentionCall(problem.dtype, problem.head_dim, problem.head_dim, key, arch=arch)
    configs = [default(problem.kernel, call, problem.seqlen)]
    special = (False, True) if warp_specialize else (False,)
    for M, N, stages in itertools.product(*space.values()):
        for warps, tma, specialized in itertools.product((4, 8), copies, special):
            if tma or not specialized:
                configs.append(Config(M, N, warps, stages, tma, specialized))
    return list(dict.fromkeys(configs))


def compiles(problem: Problem, config: Config) -> str | None:
    """None if the configuration compiles, else the reason why it does not."""
    try:
        problem.run(config)()
        torch.cuda.synchronize()
    except Exception as error:  # Triton's compiler fails in many ways
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return None


def measure(problem: Problem, config: Config) -> tuple[float, float]:
    """Milliseconds, and the error beside the default's result."""
    from triton.testing import do_bench

    expected = problem.run(None)().float()
    run = problem.run(config)
    error = float((run().float() - expected).norm() / expected.norm())
    return do_bench(run, warmup=10, rep=40, return_mode="median"), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--kernels", default=",".join(SPACE))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--causal", action="store_true", help="causal only; default: causal and full")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--pointers", action="store_true", help="without TMA as well")
    parser.add_argument("--warp-specialize", action="store_true", help="with Triton's warp specialisation as well")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16))
    args = parser.parse_args()
    for kernel in args.kernels.split(","):
        if kernel not in SPACE:
            raise SystemExit(f"--kernels: {kernel!r} is not known; accepted: {', '.join(SPACE)}")
    if not args.show and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here to measure on; --show lists the candidates")
    arch = "sm_90a" if args.show else device_arch(torch.device("cuda"))
    kinds = (True,) if args.causal else (True, False)
    for kernel, dim, causal in itertools.product(args.kernels.split(","), args.dims.split(","), kinds):
        tune(Problem(kernel, getattr(torch, args.dtype), int(dim), causal, args.seqlen), arch, args)


def tune(problem: Problem, arch: str, args: argparse.Namespace) -> None:
    """Prints the candidates of one kernel, best first."""
    configs = candidates(problem, arch, args.pointers, args.warp_specialize)
    kind = "causal" if problem.causal else "full"
    print(f"\n{problem.kernel} D{problem.head_dim} {kind}: {len(configs)} candidates", flush=True)
    if args.show:
        print(*configs, sep="\n")
        return
    began = time.perf_counter()
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {config: pool.submit(compiles, problem._replace(seqlen=1024), config) for config in configs}
        failed = {config: job.result(COMPILES_WITHIN_S * len(jobs)) for config, job in jobs.items()}
    print(f"  compiled in {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for config in configs:
        if failed[config] is None:
            ms, error = measure(problem, config)
            rows.append((ms if error < WORST_ERROR else float("inf"), error, config))
        else:
            print(f"  left out: {config}: {failed[config]}")
    print(f"  {args.dtype}, seqlen {problem.seqlen} (the default is {configs[0]})")
    for ms, error, config in sorted(rows)[:8]:
        mark = "*" if config == configs[0] else " "
        print(f"  {mark} {ms:8.3f} ms  {problem.tflops(ms):6.1f} TFLOPS  error {error:.1e}  {config}", flush=True)
    own = next((ms for ms, _, config in rows if config == configs[0]), float("nan"))
    print(f"    {own:8.3f} ms  the default", flush=True)


if __name__ == "__main__":
    main()
