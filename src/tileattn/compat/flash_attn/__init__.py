"""The functions of flash-attn 2.8, with its names, argument order, defaults and return values, by tileattn's kernels.

Existing code needs one line before its own ``import flash_attn``::

    import tileattn.compat.flash_attn as flash_attn_compat

    flash_attn_compat.install()

What differs from flash-attn is listed in docs/compat.md. ``flash_attn_with_kvcache`` and ``block_table`` raise
NotImplementedError: they come with decoding. So do imports of flash-attn's other modules; the error is an ImportError
as well, and names what to use.
"""

from __future__ import annotations

from . import bert_padding
from ._install import install, uninstall
from ._version import __version__
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
