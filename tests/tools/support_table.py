"""What each backend must run, by hand, from the pages attention, support, design/limits and ladder of docs/.

The table shares no code with any `refusal`. tests/runtime/test_dispatch.py compares the two on all combinations, and
the conformance suite skips a refused case only where the table says that the case need not run. When a backend learns
to run something, or stops to, its row here changes with it.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from tileattn.call.decoding import DecodeCall
from tileattn.call.facts import AttentionCall

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn

# Architectures as `AttentionCall` spells them, by what a block of threads has of shared memory.
LARGE_NVIDIA = ("sm_80", "sm_87", "sm_90a", "sm_100a", "sm_103a")  # 163 KiB or more
SMALL_NVIDIA = ("sm_86", "sm_89", "sm_120a", "sm_121a")  # 99 KiB
NVIDIA = LARGE_NVIDIA + SMALL_NVIDIA
AMD = ("gfx90a", "gfx942", "gfx1100")
OTHERS = ("cpu", "mps", "sm_70", "sm_75")  # of which "cpu" alone is what the tests run on
ANY = NVIDIA + AMD + OTHERS


@dataclass(frozen=True)
class Row:
    """Calls that a backend must run: those that have all of these.

    Attributes:
        dtypes: of q, k and v.
        head_dims: head dims of q and k, and of v, each one of these.
        archs: architectures.
        same_head_dims: whether head_dim and head_dim_v must be equal.
        gradients, packed, unaligned, dropout, sink: whether calls with this run, too.
        variants: "any" mask and any score modifications, or "full or causal" alone.
        float64_tensors: whether a mask or a modification may read a float64 tensor.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dims: range | tuple[int, ...]
    archs: tuple[str, ...]
    same_head_dims: bool = False
    gradients: bool = True
    packed: bool = True
    unaligned: bool = True
    dropout: bool = True
    sink: bool = True
    variants: str = "any"
    float64_tensors: bool = True

    def contains(self, call: AttentionCall) -> bool:
        """Whether the row promises this call."""
        return (
            call.dtype in self.dtypes
            and call.arch in self.archs
            and call.head_dim in self.head_dims
            and call.head_dim_v in self.head_dims
            and (call.head_dim == call.head_dim_v or not self.same_head_dims)
            and (self.gradients or not call.needs_grad)
            and (self.packed or not call.packed)
            and (self.unaligned or call.aligned)
            and (self.dropout or not call.dropout)
            and (self.sink or not call.sink)
            and (self.variants == "any" or call.variant in ("", "Causal()"))
            and (self.float64_tensors or "t:float64" not in call.variant)
        )


TABLE: dict[str, tuple[Row, ...]] = {
    # "float16 and bfloat16, head dims 16 to 256 in multiples of 8 (q and k may differ from v)"; packed calls on NVIDIA
    # GPUs only; fp8 on sm_90a, forward, aligned, in multiples of 16.
    "tilelang": (
        Row((FP16, BF16), range(16, 257, 8), NVIDIA, float64_tensors=False),
        Row((FP16, BF16), range(16, 257, 8), ("gfx942",), packed=False, float64_tensors=False),
        Row(
            (FP8,), range(16, 257, 16), ("sm_90a",),
            gradients=False, packed=False, unaligned=False, float64_tensors=False,
        ),
    ),
    # "NVIDIA GPUs from sm_80 on and AMD GPUs: float16, bfloat16 and float32, head dims 1 to 256, forward and gradients,
    # all masks and score modifications; no dropout." On a CPU in the interpreter (`possible`).
    "triton": (
        Row(
            (FP16, BF16, FP32), range(1, 257), (*NVIDIA, *AMD, "cpu"),
            packed=False, dropout=False, float64_tensors=False,
        ),
    ),
    # "forward, full and causal, head dims up to 1024", of docs/ladder.md's sizes; NVIDIA GPUs from sm_80 on. A block of
    # the large head dims' default tiles takes 108 to 150 KiB, but for 640 (85 KiB).
    "mma": tuple(
        Row(
            (FP16, BF16), head_dims, archs,
            same_head_dims=True, gradients=False, packed=False, unaligned=False, dropout=False, sink=False,
            variants="full or causal",
        )
        for head_dims, archs in (
            ((32, 64, 96, 128, 256, 384, 512, 640, 768, 896, 1024), LARGE_NVIDIA),
            ((32, 64, 96, 128, 640), SMALL_NVIDIA),
        )
    ),
    # "any device, float16 to float64, any head dim; gradients, dropout"; fp8 forward.
    "torch": (
        Row((FP16, BF16, FP32, FP64), range(1, 2**16), ANY),
        Row((FP8,), range(1, 2**16), ANY, gradients=False),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class DecodeRow:
    """Calls of `decode` that a backend must run: those that have all of these.

    Attributes: as those of :class:`Row`. Any page size, packed or not, with or without a sink, any splits: but `fixed`
    says whether a FixedSplit runs, too, and `packed_keys` whether keys may be packed.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dims: range
    archs: tuple[str, ...]
    unaligned: bool = True
    fixed: bool = True
    float64_tensors: bool = True
    packed_keys: bool = False

    def contains(self, call: DecodeCall) -> bool:
        """Whether the row promises this call."""
        return (
            call.dtype in self.dtypes
            and call.arch in self.archs
            and call.head_dim in self.head_dims
            and call.head_dim_v in self.head_dims
            and (self.unaligned or call.aligned)
            and (self.fixed or not call.fixed)
            and (self.float64_tensors or "t:float64" not in call.variant)
            and (self.packed_keys or not call.packed_keys)
        )


DECODE_TABLE: dict[str, tuple[DecodeRow, ...]] = {
    # "float16 and bfloat16, head dims 16 to 256 in multiples of 8"
    "tilelang": (DecodeRow((FP16, BF16), range(16, 257, 8), NVIDIA, float64_tensors=False, packed_keys=True),),
    # As forward.
    "triton": (DecodeRow((FP16, BF16, FP32), range(1, 257), (*NVIDIA, *AMD, "cpu"), float64_tensors=False),),
    "mma": (),
    # "any device, float16 to float64, any head dim"; on a GPU PyTorch's products depend on the batch.
    "torch": (
        DecodeRow((FP16, BF16, FP32, FP64), range(1, 2**16), ("cpu",)),
        DecodeRow((FP16, BF16, FP32, FP64), range(1, 2**16), ANY, fixed=False),
    ),
}


def must_decode(backend: str, call: DecodeCall) -> bool:
    """Whether the backend of this name must run a decode call, where what it needs is installed."""
    return any(row.contains(call) for row in DECODE_TABLE[backend])


def must_run(backend: str, call: AttentionCall) -> bool:
    """Whether the backend of this name must run a call, where what it needs is installed."""
    return any(row.contains(call) for row in TABLE[backend])


def possible(backend: str, arch: str) -> bool:
    """Whether this process has what the backend needs: its library and, on a CPU, Triton's interpreter."""
    library = {"tilelang": "tilelang", "triton": "triton", "mma": "cuda"}.get(backend)
    if library is not None and importlib.util.find_spec(library) is None:
        return False
    if backend == "mma" and importlib.util.find_spec("cuda.core") is None:
        return False
    return backend != "triton" or arch != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"


def default_backend(call: AttentionCall) -> str | None:
    """The backend that must run a call that names none; None where all refuse."""
    order = ("torch",) if call.arch == "cpu" else ("tilelang", "triton", "torch")
    return next((name for name in order if must_run(name, call)), None)


def default_decode_backend(call: DecodeCall) -> str | None:
    """The same as :func:`default_backend` of a decode call."""
    order = ("torch",) if call.arch == "cpu" else ("tilelang", "triton", "torch")
    return next((name for name in order if must_decode(name, call)), None)


def check_refusal(backend: str, call: AttentionCall, reason: str | None) -> None:
    """Raises AssertionError where a refusal (or that there is none) contradicts the table.

    Args:
        backend: the name of a backend that may run here (:func:`possible`).
        call: what it was asked.
        reason: what it said; None if it runs the call.
    """
    _check(backend, call, reason, must_run(backend, call))


def check_decode_refusal(backend: str, call: DecodeCall, reason: str | None) -> None:
    """The same as :func:`check_refusal` of a decode call; "it does not decode" is a refusal."""
    _check(backend, call, reason, must_decode(backend, call))


def _check(backend: str, call: AttentionCall | DecodeCall, reason: str | None, must: bool) -> None:
    if must:
        assert reason is None, f"{backend} must run this call and refuses it: {reason} ({call})"
    else:
        assert reason is not None, f"{backend} must refuse this call and accepts it ({call})"
