"""The ceilings of a device: the speeds of a matrix product and of a copy, measured in the same run as attention.

They put attention's speed in relation: GPUs of one model differ, and one GPU is slower when it is hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from tileattn.measure import timing

MATMUL_SIZE = 8192
COPIED_BYTES = 2**30


@dataclass(frozen=True)
class Ceiling:
    """One measurement of both ceilings.

    when: "before" the first case or "after" the last.
    matmul_tflops: cuBLAS, bfloat16, 8192 x 8192 by 8192 x 8192, in 10^12 FLOPs per second.
    copy_tbps: A copy of 1 GiB on the device, in 10^12 bytes per second, read and written bytes added up.
    """

    when: str
    matmul_tflops: float
    copy_tbps: float


def measure(
    when: str,
    device: torch.device,
    effort: timing.Effort,
    size: int = MATMUL_SIZE,
    copied: int = COPIED_BYTES,
    dtype: torch.dtype = torch.bfloat16,
) -> Ceiling:
    """Times a matrix product and a copy by the method for attention.

    size, dtype: Of the matrices. copied: Bytes of the copy's source.
    """
    # Random values: zeros take less power than real ones, and the clock would be higher.
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randint(-128, 128, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    matmul_ms: list[float] = []
    copy_ms: list[float] = []
    for _ in range(effort.rounds):
        matmul_ms += timing.sample_ms(lambda: torch.matmul(a, b, out=product), device, effort)
        copy_ms += timing.sample_ms(lambda: target.copy_(source), device, effort)
    return Ceiling(when, 2 * size**3 / median(matmul_ms) / 1e9, 2 * copied / median(copy_ms) / 1e9)


def overall(ceilings: Sequence[Ceiling]) -> Ceiling | None:
    """The median of a run's measurements (with two, the mean of before and after); None if there is none."""
    if not ceilings:
        return None
    return replace(
        ceilings[0],
        when=" and ".join(each.when for each in ceilings),
        matmul_tflops=median(each.matmul_tflops for each in ceilings),
        copy_tbps=median(each.copy_tbps for each in ceilings),
    )
