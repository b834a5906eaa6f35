"""The masks, as users import them; the code is in variant/masks.py."""

from .variant.masks import (
    FIRST_POSITION,
    MAX_SIZE,
    And,
    Causal,
    Documents,
    FunctionMask,
    KeyPadding,
    Mask,
    Or,
    PrefixLM,
    Range,
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
    "MAX_SIZE",
    "check_key_padding",
]
