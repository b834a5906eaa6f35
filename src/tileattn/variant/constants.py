"""A mask as a key of a table of prepared calls. (Not in key.py, whose text is in each kernel's key.)"""

from __future__ import annotations

from typing import Any

import torch

from .key import field_names
from .masks import Mask
from .sparse.blocks import blocks_of

_PACKAGE = __name__.partition(".")[0] + "."


def constants_of(mask: Any, tensors: list[torch.Tensor] | None = None) -> tuple[Any, ...] | None:
    """The class of a mask and its fields; None for a mask with other fields than ints, masks and, if asked, tensors.

    Masks with equal constants have one variant key, and operands that are equal but for their tensors. Of a tensor, the
    metadata is in the constants.

    Args:
        tensors: where those of the mask are put, in the order of the operands; None for masks without tensors only. Not
            asked for are tensors with gradients, and those of a user's class, whose `check` may look at values.
    """
    if not isinstance(mask, Mask) or blocks_of(mask):  # a call computes with other tensors than those of blocks
        return None
    kind = type(mask)
    try:
        names = field_names(kind)
    except TypeError:  # which encode raises, after the checks of other arguments
        return None
    constants: list[Any] = [kind]
    for name in names:
        value: Any = getattr(mask, name)
        if value is not None and type(value) is not int:
            if tensors is not None and type(value) is torch.Tensor and not value.requires_grad and _is_ours(kind):
                tensors.append(value)
                value = (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16)
            else:
                value = constants_of(value, tensors)
                if value is None:
                    return None
        constants.append(value)
    return tuple(constants)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(_PACKAGE)
