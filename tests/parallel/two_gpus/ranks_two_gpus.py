"""What ranks run for the test_two_gpus files: calls on a GPU each, beside the same calls on one GPU.

Values are drawn on the GPU from seeds, so all ranks draw the same. Results are compared there, and only answers return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import tileattn
from tileattn.kernels.tilelang import buckets
from tileattn.parallel import Plan

DEVICE = "cuda"  # another in benchmarks/precompile.py
NAMES = ("o", "lse", "dq", "dk", "dv", "dsink")


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if DEVICE == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def drawn_qkv(
    seqlen: int, dim: int, heads: tuple[int, int] = (8, 4), dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v of the whole sequence, and do."""
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [drawn(seed, 1, seqlen, count, dim, dtype=dtype) for seed, count in enumerate(counts)]


def rows_of_lse(plan: Plan, lse: Tensor) -> Tensor:
    """This rank's rows of lse (batch, heads, seqlen)."""
    return plan.shard(lse.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


# --- Bits ---


def bits(options: dict[str, Any], seqlen: int, dim: int, mask: Any) -> dict[str, bool]:
    """Whether o and lse have the bits of one GPU, with the same kernel on both."""
    plan = Plan(None, seqlen)
    whole = drawn_qkv(seqlen, dim)[:3]
    rows = [plan.shard(x) for x in whole]
    with buckets.only("long"):  # a run of 1024 queries and a sequence of 4096 may have kernels of their own
        o, lse = plan.attention(*rows, mask=mask, return_lse=True, **options)
        whole_o, whole_lse = tileattn.attention(*whole, mask=mask, return_lse=True)
    return {"o": torch.equal(o, plan.shard(whole_o)), "lse": torch.equal(lse, rows_of_lse(plan, whole_lse))}


def passes(plan: Plan, rows: Sequence[Tensor], sink: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv and, with a sink, dsink. rows: of q, k, v and do."""
    leaves = [x.detach().requires_grad_() for x in (*rows[:3], *(() if sink is None else (sink,)))]
    options |= {} if sink is None else {"sink": leaves[3]}
    o, lse = plan.attention(*leaves[:3], return_lse=True, deterministic=True, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, rows[3])


def repeated(options: dict[str, Any], seqlen: int, dim: int, mask: Any, dtype: torch.dtype, runs: int) -> list[str]:
    """Outputs and gradients whose bits differ between runs."""
    plan = Plan(None, seqlen)
    rows = [plan.shard(x) for x in drawn_qkv(seqlen, dim, dtype=dtype)]
    sink = drawn(9, 8, dtype=torch.float32)
    found = [passes(plan, rows, sink, mask=mask, **options) for _ in range(runs)]
    return [name for name, *each in zip(NAMES, *found) if not all(torch.equal(each[0], other) for other in each)]


# --- Streams and memory ---


def on_another_stream(options: dict[str, Any], seqlen: int) -> list[str]:
    """Outputs and gradients that differ between the default stream and another one, which is busy at first."""
    plan = Plan(None, seqlen)
    whole = drawn_qkv(seqlen, 64)
    expected = passes(plan, [plan.shard(2 * x) for x in whole], causal=True, **options)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        rows = [plan.shard(2 * x) for x in whole]  # far from done when the call is made
        found = passes(plan, rows, causal=True, **options)
    torch.cuda.current_stream().wait_stream(stream)
    return [name for name, a, b in zip(NAMES, found, expected) if not torch.equal(a, b)]


def under_pressure(options: dict[str, Any], seqlen: int, calls: int) -> dict[str, int]:
    """Many calls without a wait of the host, whose tensors are freed at once and their memory filled with NaN.

    Returns how often each output and gradient differed from the first time; o and lse from those of one GPU.
    """
    plan = Plan(None, seqlen)
    inputs = [[seed + x for x in drawn_qkv(seqlen, 64)] for seed in range(3)]
    expected = []
    with buckets.only("long"):
        for q, k, v, do in inputs:
            o, lse = tileattn.attention(q, k, v, causal=True, return_lse=True)
            rows = [plan.shard(x) for x in (q, k, v, do)]
            first = passes(plan, rows, causal=True, **options)
            torch.cuda.synchronize()  # nothing is under way here
            expected.append((plan.shard(o), rows_of_lse(plan, lse), *first[2:]))
        wrong = torch.zeros(5, dtype=torch.int64, device=DEVICE)
        for number in range(calls):
            which = number % 3
            found = passes(plan, [plan.shard(x) for x in inputs[which]], causal=True, **options)
            wrong += torch.stack([(a != b).any() for a, b in zip(found, expected[which])])
            del found
            refuse = [torch.full((size,), torch.nan, device=DEVICE) for size in _sizes(seqlen)]
            if number % 4 == 3:
                del refuse
                torch.cuda.empty_cache()
    return dict(zip(NAMES, wrong.tolist()))


def _sizes(seqlen: int) -> Iterator[int]:
    """Numbers of floats: about those of what is sent, received and computed."""
    for heads in (1, 2, 4, 8, 16):
        yield from (seqlen * heads * 32 // parts for parts in (1, 2, 4))


def in_a_graph(options: dict[str, Any], seqlen: int) -> bool:
    """Whether a forward pass in a CUDA graph gives, on new inputs, the bits of a call outside."""
    plan = Plan(None, seqlen)
    rows = [plan.shard(x) for x in drawn_qkv(seqlen, 64)[:3]]
    call = functools.partial(plan.attention, *rows, causal=True, **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):  # agreement, kernels, connections
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog, heartbeats) may call CUDA meanwhile.
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        o = call()
    for x in rows:
        x.mul_(-1.5)
    graph.replay()
    replayed = o.clone()
    return torch.equal(replayed, call())


def peak(options: dict[str, Any], seqlen: int, heads: tuple[int, int], dim: int) -> dict[str, int]:
    """Bytes allocated at most by a forward and backward pass, q, k, v, o, do and the gradients with it."""
    plan = Plan(None, seqlen)
    bytes_of = torch.cuda.memory_allocated

    def both() -> None:
        counts = (heads[0], heads[1], heads[1], heads[0])
        *leaves, do = (torch.randn(1, plan.rows, count, dim, device=DEVICE, dtype=torch.bfloat16) for count in counts)
        for x in leaves:
            x.requires_grad_()
        plan.attention(*leaves, causal=True, **options).backward(do)

    both()  # loads kernels, connects the GPUs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = bytes_of()
    both()
    torch.cuda.synchronize()
    return {"peak": torch.cuda.max_memory_allocated() - before, "before": before}


# --- Kernels to compile ahead ---


def calls() -> Iterator[Callable[[], object]]:
    """The calls of the test_two_gpus files but for conformance, on tensors of "meta", for benchmarks/precompile.py."""
    from tests.parallel.two_gpus import test_two_gpus_bits as tests

    for options, dim, mask in tests.BITS:
        yield functools.partial(bits, options, 4096, dim, mask)
    for options, mask, dtype in tests.REPEATED:
        for dim in tests.DIMS:
            yield functools.partial(repeated, options, tests.SEQLEN, dim, mask, dtype, 1)
    for options in tests.OPTIONS:
        for bucket in (None, "long"):
            yield functools.partial(_both_passes, bucket, options, 4096, 64)
        yield functools.partial(_both_passes, None, options, 1 << 16, 128)


def _both_passes(bucket: str | None, options: dict[str, Any], seqlen: int, dim: int) -> None:
    plan = Plan(None, seqlen)
    with nullcontext() if bucket is None else buckets.only(bucket):
        passes(plan, [plan.shard(x) for x in drawn_qkv(seqlen, dim)], causal=True, **options)
