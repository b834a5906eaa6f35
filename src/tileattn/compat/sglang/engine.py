"""The class that SGLang gets: that of :mod:`.backend` with SGLang's own base class. It needs SGLang.

The base class chooses between `forward_decode` and `forward_extend`, and has defaults for what SGLang asks besides.
"""

from __future__ import annotations

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from .backend import Backend


class TileAttentionBackend(Backend, AttentionBackend):
    """Attention of all layers of a model runner."""
