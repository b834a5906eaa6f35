"""What is measured: tileattn, and PyTorch's SDPA and FlashAttention-3, which run in the same process.

FlashInfer and XQA, which run in a process of their own, are in flashinfer.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tileattn
from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.problem import Problem
from tileattn.bench.decode.variants import PLAIN, Variant
from tileattn.call.decoding import FixedSplit, Splits

# The folder with FlashAttention-3's extension module and the site with FlashInfer.
PEERS = "DECODE_PEERS"
FA3_MODULE = "_vllm_fa3_C.abi3.so"
CUDA_ONLY = "it runs on CUDA only"
HALF_ONLY = "it takes float16 and bfloat16 only"
NO_PAGES = "it takes no pages"

Attend = Callable[[int], Tensor]  # the number of a cache -> o, (batch, heads, head_dim) in any shape


class Method(Protocol):
    """Something that decodes; `name` is its column in tables and its `backend` in result files."""

    @property
    def name(self) -> str: ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs in the process of the baselines."""

    @property
    def variant(self) -> Variant | None:
        """What it computes, which its output is checked by; None if it has no output to check."""

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        """A short reason why it cannot run this row here; None if it can."""

    def prepare(self, problem: Problem) -> Attend:
        """Does what a server does once a step for all layers (a plan), and returns the call of a layer."""


@dataclass(frozen=True)
class Own:
    """`tileattn.decode`.

    planned: whether the plan is made ahead, as for the layers of a model; else each call makes its own.
    """

    name: str
    planned: bool = True
    splits: Splits = None
    backend: str | None = None
    variant: Variant = PLAIN
    q_len: int = 1
    causal: bool = True
    is_elsewhere: bool = False

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def options(self, heads: int, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of `tileattn.decode` that do not depend on a row's tensors."""
        given = self.variant.options(heads, device)
        return {"splits": self.splits, "backend": self.backend, "causal": self.causal, **given}

    def prepare(self, problem: Problem) -> Attend:
        # Called through the module, so that whoever replaces the function is measured.
        problem = problem.shortened(self.variant.keys)
        q, k, v, seqlens = problem.queries(self.q_len), problem.k, problem.v, problem.seqlens
        options = self.options(problem.case.heads, q.device)
        options |= {"page_table": problem.table, "scale": problem.scale}
        plan = tileattn.decode_plan(q, k[0], v[0], seqlens, **options) if self.planned else None
        return lambda i: tileattn.decode(q, k[i], v[i], seqlens, plan=plan, **options)[:, -1]


@dataclass(frozen=True)
class Plan:
    """`tileattn.decode_plan` alone; not a speed of attention."""

    name: str = f"{OWN}-plan"
    backend: str | None = None
    variant: None = None
    is_elsewhere: bool = False

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Attend:
        options: dict[str, Any] = {"page_table": problem.table, "scale": problem.scale, "backend": self.backend}

        def plan(i: int) -> Tensor:
            made = tileattn.decode_plan(problem.q, problem.k[i], problem.v[i], problem.seqlens, **options)
            return problem.seqlens if made.tensor is None else made.tensor

        return plan


@dataclass(frozen=True)
class Launch:
    """The smallest kernel, to compare a plan with: what a launch takes in a graph."""

    name: str = "launch"
    variant: None = None
    is_elsewhere: bool = False

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Attend:
        one = torch.zeros(1, device=problem.q.device)
        return lambda i: one.add_(1)  # a kernel; zero_ would be a memset


@dataclass(frozen=True)
class Sdpa:
    """PyTorch's SDPA over a contiguous cache: with its own choice of kernel, or restricted to one of CUDA's."""

    name: str
    kernel: SDPBackend | None = None
    q_len: int = 1
    variant: Variant = PLAIN
    is_elsewhere: bool = False

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        if case.page:
            return NO_PAGES
        if self.kernel is None:
            return None
        if device.type != "cuda":
            return CUDA_ONLY
        return None if dtype.itemsize == 2 else HALF_ONLY

    def prepare(self, problem: Problem) -> Attend:
        q = problem.queries(self.q_len).transpose(1, 2)
        grouped = problem.case.heads != problem.case.kv_heads
        kernel = self.kernel

        def attend(i: int) -> Tensor:
            k, v = problem.k[i].transpose(1, 2), problem.v[i].transpose(1, 2)
            return scaled_dot_product_attention(q, k, v, scale=problem.scale, enable_gqa=grouped)[:, :, -1]

        def restricted(i: int) -> Tensor:
            assert kernel is not None
            with sdpa_kernel(kernel):
                return attend(i)

        return attend if kernel is None else restricted


@dataclass(frozen=True)
class FlashAttention3:
    """FlashAttention-3 by the extension module of vllm 0.25.1 (built for torch 2.11 and CUDA 13), metadata ahead."""

    name: str = "fa3"
    variant: Variant = PLAIN
    is_elsewhere: bool = False

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return CUDA_ONLY
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "it runs on Hopper only"
        if dtype.itemsize != 2:
            return HALF_ONLY
        module = fa3_module()
        return None if module is not None else f"the folder that {PEERS} names has no {FA3_MODULE}, or is not named"

    def prepare(self, problem: Problem) -> Attend:
        fa3 = _load(str(fa3_module()))
        case, seqlens, table = problem.case, problem.seqlens, problem.table
        ends = None
        q = problem.q
        if table is not None:  # packed queries, as vLLM calls it
            ends = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device)
            q = q.view(case.batch, case.heads, case.head_dim)
        dims = (case.heads, case.kv_heads, case.head_dim, case.head_dim)
        metadata = fa3.get_scheduler_metadata(
            case.batch, 1, case.context, *dims, q.dtype, seqlens, ends, None, None, None, None, case.page or None,
            0, False, -1, -1, False, 0, None, 0,
        )  # fmt: skip

        def attend(i: int) -> Tensor:
            out = fa3.fwd(
                q, problem.k[i], problem.v[i], None, None, None, None, ends, None, None, None, seqlens, 1,
                case.context, table, None, None, None, None, None, None, None, None, problem.scale, False, -1, -1,
                0.0, True, metadata, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip
            return out[0]

        return attend


def fa3_module() -> Path | None:
    """The extension module of FlashAttention-3, if the folder of the baselines has it."""
    folder = os.environ.get(PEERS)
    path = Path(folder, FA3_MODULE) if folder else None
    return path if path is not None and path.exists() else None


@lru_cache(maxsize=1)
def _load(module: str) -> Any:
    torch.ops.load_library(module)
    return torch.ops._vllm_fa3_C


def fa3_version() -> str | None:
    """What identifies the extension module: the start of its SHA-256. None if there is none."""
    module = fa3_module()
    if module is None:
        return None
    return f"{FA3_MODULE} sha256 {hashlib.sha256(module.read_bytes()).hexdigest()[:16]}"


def own_methods(backend: str | None) -> Sequence[Method]:
    """The ways in which tileattn is always measured: with the plan made ahead, and planning in each call."""
    return Own(OWN, backend=backend), Own(f"{OWN}-planning", planned=False, backend=backend)


FIXED = f"{OWN}-fixed"


def fixed(backend: str | None) -> Method:
    """tileattn with batch-invariant splits."""
    return Own(FIXED, splits=FixedSplit(1024), backend=backend)


LOCAL: tuple[Method, ...] = (
    FlashAttention3(),
    Sdpa("fa2", SDPBackend.FLASH_ATTENTION),
    Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    Sdpa("sdpa"),
)
