"""Head dims that kernels do not take: padded with zeros, which change neither scores nor the values that are there.

For the doors through which existing code comes in (:mod:`tileattn.api.sdpa`, :mod:`tileattn.compat`), whose originals
take any. :func:`tileattn.attention` itself never copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP, _MIN, MAX = 8, 16, 256  # what the kernels for GPUs run in 16 bits


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (..., head_dim) with head dims that kernels for GPUs run, if they run tensors like these otherwise.

    The scale must be given for the original head_dim; of o the first ``v.shape[-1]`` elements count. Differentiable.
    """
    in_16_bits = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cpu" or not in_16_bits or max(q.shape[-1], v.shape[-1]) > MAX:
        return q, k, v
    return pad(q), pad(k), pad(v)


def pad(x: Tensor) -> Tensor:
    """x with its last dimension, which is not empty, padded to a multiple of 8 from 16 on; x itself if it is one."""
    size = x.shape[-1]
    missing = max(-(-size // _STEP) * _STEP, _MIN) - size
    return x if missing == 0 else torch.nn.functional.pad(x, (0, missing))
