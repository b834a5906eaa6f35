"""FlashInfer's decode kernels, and XQA (TensorRT-LLM's, which FlashInfer has): baselines in a process of their own.

FlashInfer's packages are another apache-tvm-ffi than TileLang's. worker.py is the process; it has the folder `site` of
the folder that DECODE_PEERS names in front of its path. FlashInfer compiles its kernels with nvcc when they are first
called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.methods import CUDA_ONLY, HALF_ONLY, PEERS, Attend
from tileattn.bench.decode.problem import Problem
from tileattn.bench.decode.variants import PLAIN, Variant

PACKAGES = ("flashinfer-python", "apache-tvm-ffi")
WORKSPACE_BYTES = 384 * 2**20
XQA_PAGES = (16, 32, 64, 128)


@lru_cache(maxsize=2)
def _workspace(name: str, device: torch.device) -> Tensor:
    """Zeros for the kernels of one name: XQA keeps its semaphores there, so nobody else may write to its workspace."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _unusable(case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return CUDA_ONLY
    if dtype.itemsize != 2:
        return HALF_ONLY
    if not case.page:
        return "it takes pages only"
    return None if _installed() else f"flashinfer is not installed, and {PEERS} names no folder with it"


def _installed() -> bool:
    return (site() is not None) or find_spec("flashinfer") is not None


def site() -> Path | None:
    """The folder of packages for the process of the baselines, if there is one."""
    folder = os.environ.get(PEERS)
    path = Path(folder, "site") if folder else None
    return path if path is not None and (path / "flashinfer").is_dir() else None


@dataclass(frozen=True)
class FlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores; its plan is made ahead, on the host."""

    name: str = "flashinfer"
    variant: Variant = PLAIN
    is_elsewhere: bool = True

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        return _unusable(case, device, dtype)

    def prepare(self, problem: Problem) -> Attend:
        import flashinfer  # type: ignore[import-not-found]

        case, table = problem.case, problem.table
        assert table is not None
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(self.name, table.device), "NHD", use_tensor_cores=True
        )
        pages = torch.arange(case.batch + 1, dtype=torch.int32) * (case.context // case.page)
        last = torch.full((case.batch,), case.page, dtype=torch.int32)
        dtype = problem.q.dtype
        wrapper.plan(
            pages, table.flatten(), last, case.heads, case.kv_heads, case.head_dim, case.page, sm_scale=problem.scale,
            q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip
        q = problem.q.squeeze(1)
        return lambda i: wrapper.run(q, (problem.k[i], problem.v[i]))


@dataclass(frozen=True)
class Xqa:
    """xqa_batch_decode_with_kv_cache, which needs no plan."""

    name: str = "xqa"
    variant: Variant = PLAIN
    is_elsewhere: bool = True

    def refusal(self, case: Case, device: torch.device, dtype: torch.dtype) -> str | None:
        if (reason := _unusable(case, device, dtype)) is not None:
            return reason
        return None if case.page in XQA_PAGES else f"it takes pages of {', '.join(map(str, XQA_PAGES))} only"

    def prepare(self, problem: Problem) -> Attend:
        from flashinfer import decode

        q, seqlens = problem.q.squeeze(1), problem.seqlens.view(torch.uint32)
        workspace = _workspace(self.name, q.device)

        def attend(i: int) -> Tensor:
            out = torch.empty_like(q)
            decode.xqa_batch_decode_with_kv_cache(
                q, (problem.k[i], problem.v[i]), workspace, problem.table, seqlens, problem.case.context,
                bmm1_scale=problem.scale, bmm2_scale=1.0, out=out, kv_layout="NHD",
            )  # fmt: skip
            return out

        return attend


ELSEWHERE = (FlashInfer(), Xqa())
