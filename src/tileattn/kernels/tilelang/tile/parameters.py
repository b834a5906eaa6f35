"""Parameters that kernels of both passes have: sizes, and the variant's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
import torch

NO_PATTERN = {"weight": None}
SIZES = ("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads")


def operand(symbol: Any) -> Any:
    """A tensor that the variant carries: any strides; sizes of 1 are broadcast and known, the others are not.

    Of an aligned one the last dimension is contiguous.
    """
    shape = [1 if one else T.dynamic(f"{symbol.name}_size{axis}") for axis, one in enumerate(symbol.ones)]
    strides = [T.dynamic(f"{symbol.name}_stride{axis}", "int64") for axis in range(symbol.ndim)]
    if symbol.aligned:
        strides[-1] = 1
    dtype = "uint8" if symbol.dtype is torch.bool else str(symbol.dtype).removeprefix("torch.")
    return T.StridedTensor(shape, strides, dtype)


def declare_pattern(scalar: Callable[[str, str], Any]) -> dict[str, Any]:
    """The numbers of dropout: the threshold, the weight of what is kept, and the call's place in the whole call.

    The place is ``tileattn.call.dropout.Place``, but rows and keys are counted in groups (tile/dropout.py).
    """
    kinds = {"threshold": "int", "weight": "float", "pattern_heads": "int", "first_head": "int"}
    kinds |= {"first_row_group": "int", "first_key_group": "int"}
    return {name: scalar(name, kind) for name, kind in kinds.items()}
