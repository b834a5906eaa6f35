"""tileattn as an attention backend of SGLang, version 0.5.23.

SGLang finds :func:`register` by the entry point that tileattn's package declares (``sglang.srt.plugins``). So where
both are installed, this is all::

    python -m sglang.launch_server --model-path MODEL --attention-backend tileattn

docs/serving.md says what is supported. The class follows SGLang's interface and is tested by an engine of our own that
calls it as SGLang does; SGLang itself has not run with it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "tileattn"


def register() -> None:
    """Registers tileattn as SGLang's attention backend ``tileattn``. It may be called several times.

    Raises:
        ImportError: SGLang is not installed, or does not have the interface of version 0.5.23.
    """
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        raise ImportError(
            "tileattn.compat.sglang needs SGLang with the interface of version 0.5.23: pip install sglang"
        ) from error
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    """The backend of a model runner. SGLang calls it in each worker."""
    from .engine import TileAttentionBackend

    return TileAttentionBackend(runner)
