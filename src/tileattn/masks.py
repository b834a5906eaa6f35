"""The masks, as users import them; the code is in variant/masks.py and variant/sparse/."""

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
from .variant.sparse.block_lists import check_blocks
from .variant.sparse.blocks import BlockSparse
from .variant.sparse.neighborhood import Neighborhood
from .variant.sparse.patterns import Dilated, GlobalTokens, ImageTextDocuments, Strided

__all__ = [
    "Mask",
    "BlockSparse",
    "Causal",
    "SlidingWindow",
    "PrefixLM",
    "Documents",
    "KeyPadding",
    "Dilated",
    "Strided",
    "GlobalTokens",
    "Neighborhood",
    "ImageTextDocuments",
    "FunctionMask",
    "And",
    "Or",
    "Range",
    "FIRST_POSITION",
    "check_blocks",
    "check_key_padding",
]
