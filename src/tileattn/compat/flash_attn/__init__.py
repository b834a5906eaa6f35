"""The functions of flash-attn 2.8 by tileattn's kernels, with flash-attn's names, argument order, defaults and results.

Existing code needs these lines before its own ``import flash_attn``::

    import tileattn.compat.flash_attn as flash_attn_compat

    flash_attn_compat.install()

docs/compat.md lists the differences from flash-attn. Importing another module of flash-attn raises NotImplementedError;
that error is an ImportError too, and its message names an alternative.
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
