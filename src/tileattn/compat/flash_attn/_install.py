"""`install` makes ``import flash_attn`` import this package, in the current process.

Code tests for flash-attn in three ways: it imports it, it calls ``importlib.util.find_spec``, or it asks
``importlib.metadata`` for the version of the distribution ``flash-attn`` (transformers does all three). After
`install` all three find this package. A flash-attn on disk is hidden. Importing a module that this package does not
have (``ops.fused_dense``, ``cute``, ...) raises :class:`._absent.NotProvided`, an ImportError and NotImplementedError
whose message names an alternative; ``find_spec`` returns None for such a module.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ._absent import absent_module
from ._version import __version__

_HERE = __name__.rpartition(".")[0]
_MODULES = (
    "",
    ".flash_attn_interface",
    ".bert_padding",
    ".layers",
    ".layers.rotary",
    ".modules",
    ".modules.mha",
    ".ops",
    ".ops.triton",
    ".ops.triton.rotary",
)


def install() -> None:
    """Makes ``import flash_attn`` import tileattn's replacement.

    The replacement has the modules flash_attn_interface, bert_padding, layers.rotary, modules.mha and
    ops.triton.rotary. Call install() before anything imports flash_attn or tests for it. A second call does nothing.

    Raises:
        RuntimeError: another flash_attn is already imported. Names imported from it would keep pointing to its
            functions.
    """
    others = sorted(name for name, module in _imported().items() if not _is_ours(module))
    if others:
        where = getattr(sys.modules[others[0]], "__file__", None) or "an unknown place"
        raise RuntimeError(
            f"{others[0]} is already imported, from {where}: call tileattn.compat.flash_attn.install() before "
            f"anything imports flash_attn"
        )
    for name in _MODULES:
        sys.modules["flash_attn" + name] = importlib.import_module(_HERE + name)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undoes :func:`install`: the next ``import flash_attn`` looks for the package on disk.

    Names imported earlier keep pointing to tileattn's functions.
    """
    for name, module in _imported().items():
        if _is_ours(module):
            del sys.modules[name]
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


def _imported() -> dict[str, Any]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "flash_attn"}


def _is_ours(module: ModuleType | None) -> bool:
    return f"{getattr(module, '__name__', '')}.".startswith(f"{_HERE}.")


class _FlashAttn(Distribution):
    """The distribution ``flash-attn``, as ``importlib.metadata`` reports it after `install`."""

    def read_text(self, filename: Any) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {__version__}\nSummary: tileattn's\n",
            "top_level.txt": "flash_attn\n",
        }
        return texts.get(str(filename))

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(MetaPathFinder):
    """An entry of ``sys.meta_path`` that provides the metadata and refuses modules that this package does not have.

    The modules that it does have are in ``sys.modules``, so that Python does not ask a finder for them.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raises :class:`NotProvided` for an import of an absent module; ``importlib.util.find_spec`` gets None."""
        name = fullname
        if fullname.startswith(f"{_HERE}."):  # `from flash_attn import cute` looks for this name
            if target is not None or PathFinder.find_spec(fullname, path) is not None:
                return
            name = f"flash_attn{fullname.removeprefix(_HERE)}"
        if name.startswith("flash_attn.") and not _is_asked():
            raise absent_module(name)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        name = getattr(context, "name", None)
        return [_FlashAttn()] if name is None or re.sub(r"[-_.]+", "-", name).lower() == "flash-attn" else []


def _is_asked() -> bool:
    """Whether ``importlib.util.find_spec`` called the finder, rather than an import.

    Both call the finder through the same function of importlib, so the caller of that function is examined.
    """
    caller = sys._getframe(2).f_back
    return caller is not None and caller.f_globals.get("__name__") == "importlib.util"


_FINDER = _Finder()
