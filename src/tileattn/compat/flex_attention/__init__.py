"""FlexAttention's interface: ``from tileattn.compat.flex_attention import flex_attention, create_block_mask``.

Code written for ``torch.nn.attention.flex_attention`` runs on tileattn's backends with only the import line changed.
The names and signatures are those of the installed PyTorch (2.11 to 2.13 were compared). ``BlockMask``, ``AuxRequest``,
``AuxOutput``, ``FlexKernelOptions`` and ``create_mask`` are PyTorch's own. docs/compat.md says what differs.

- interface.py: :func:`flex_attention` and the checks of its arguments.
- lazy.py: :func:`create_block_mask`, whose blocks are computed only when something asks for them.
- blocks.py: the mask of a BlockMask, for tileattn.
- mods.py: ``and_masks``, ``or_masks``, ``noop_mask``, and the check of a function.
- tracing.py: how tileattn traces mask and score functions.
- kernel_options.py: which options are accepted without effect.
"""

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions, create_mask

from .interface import flex_attention
from .lazy import create_block_mask
from .mods import and_masks, noop_mask, or_masks

__all__ = [
    "BlockMask",
    "flex_attention",
    "AuxOutput",
    "AuxRequest",
    "FlexKernelOptions",
    "create_block_mask",
    "create_mask",
    "or_masks",
    "and_masks",
    "noop_mask",
]
