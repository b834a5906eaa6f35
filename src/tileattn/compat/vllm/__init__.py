"""tileattn as an attention backend of vLLM, version 0.33.

vLLM finds :func:`load_plugin` by the entry point that tileattn's package declares (``vllm.general_plugins``). So where
both are installed, this is all::

    vllm serve MODEL --attention-backend CUSTOM

docs/serving.md says what is supported. The classes follow vLLM's interface and are tested by an engine of our own that
calls them as vLLM does; vLLM itself has not run with them.
"""

from __future__ import annotations

import logging

__all__ = ["load_plugin", "register"]

_logger = logging.getLogger(__name__)
_CLASS = "tileattn.compat.vllm.engine.TileAttentionBackend"


def register() -> None:
    """Registers tileattn as vLLM's backend ``CUSTOM``. It may be called several times, as vLLM does in each process.

    If another plug-in has that name already, it keeps it, and a warning says so.

    Raises:
        ImportError: vLLM is not installed, or does not have the interface of version 0.33.
    """
    try:
        from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: F401
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(
            "tileattn.compat.vllm needs vLLM with the interface of version 0.33: pip install vllm"
        ) from error
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != _CLASS:
        _logger.warning(
            "vLLM's attention backend CUSTOM is %s, which another plug-in has registered: tileattn is not registered",
            custom.get_path(),
        )
        return
    register_backend(custom, _CLASS)


def load_plugin() -> None:
    """The function of the entry point: :func:`register`, with a warning where vLLM is of another version.

    vLLM calls it at every start, also for users of other backends, and does not start if it raises.
    """
    try:
        register()
    except ImportError as error:
        _logger.warning("tileattn's attention backend is not registered: %s", error)
