"""The classes that vLLM imports: those of :mod:`.backend` with vLLM's own base classes. It needs vLLM.

The base classes have defaults for what vLLM asks beside the methods of :mod:`.backend`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import vllm.envs as envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)

from ...call.decoding import FixedSplit
from .backend import Backend, Impl, MetadataBuilder


class TileAttentionMetadataBuilder(MetadataBuilder, AttentionMetadataBuilder):
    """Makes the metadata of a step."""

    # Nothing of a step depends on values that the host must know.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    # vLLM's batch-invariant mode asks for bits that do not depend on the other requests of a step.
    splits = FixedSplit(1024) if envs.VLLM_BATCH_INVARIANT else None


class TileAttentionImpl(Impl, AttentionImpl):
    """Attention of one layer."""


class TileAttentionBackend(Backend, AttentionBackend):
    """What vLLM's selector asks."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return TileAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return TileAttentionMetadataBuilder
