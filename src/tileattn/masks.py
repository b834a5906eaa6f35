"""The masks, as users import them; the code is in variant/masks.py."""

from .variant.mask_bounds import Range
from .variant.masks import (
    FIRST_POSITION,
    And,
    Causal,
    Documents,
    FunctionMask,
    KeyPadding,
    Mask,
    Or,
    PrefixLM,
    SlidingWindow,
    check_key_padding,
)

__all__ = [
    "Mask",
    "Causal",
    "SlidingWindow",
    "PrefixLM",
    "Documents",
    "KeyPadding",
    "FunctionMask",
    "And",
    "Or",
    "Range",
    "FIRST_POSITION",
    "check_key_padding",
]
