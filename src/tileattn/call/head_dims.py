"""Padding of head dims that GPU kernels do not support.

Head dims are padded with zeros, which change neither the scores nor the other elements of o. The adapters
(:mod:`tileattn.api.sdpa`, :mod:`tileattn.compat`) use it, because the functions that they replace accept any head dim.
:func:`tileattn.attention` itself does not pad.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP, _MIN, MAX = 8, 16, 256  # the head dims that GPU kernels support in 16 bits: multiples of 8 from 16 to 256


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (..., head_dim), with head dims padded for GPU kernels.

    Tensors on a CPU, in other than 16-bit dtypes or with a head dim above 256 are returned unchanged. The caller must
    pass the scale of the original head_dim, and use only the first ``v.shape[-1]`` elements of o. Differentiable.
    """
    in_16_bits = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cpu" or not in_16_bits or max(q.shape[-1], v.shape[-1]) > MAX:
        return q, k, v
    return pad(q), pad(k), pad(v)


def pad(x: Tensor) -> Tensor:
    """x with its last dimension, which must not be empty, padded to a multiple of 8, at least 16; x itself if it is."""
    size = x.shape[-1]
    missing = max(-(-size // _STEP) * _STEP, _MIN) - size
    return x if missing == 0 else torch.nn.functional.pad(x, (0, missing))
