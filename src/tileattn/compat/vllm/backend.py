"""vLLM's three classes on tileattn's kernels, without vLLM's base classes: :mod:`.engine` adds these.

In a step vLLM calls ``builder.build`` once for each group of layers, and then ``impl.forward`` in every layer. The
layer's cache is (blocks, kv_heads, block_size, head_size + head_size_v) in any order of memory: the keys of a token and
then its values. ``forward`` writes the new keys and values to the slots that vLLM has chosen, and attends by
:func:`tileattn.decode`. The host reads no length, so that one CUDA graph serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...api.append import append_kv
from ...call.decoding import FixedSplit
from ..engine_step import LayerOptions, Step

CACHE_DTYPES = ("auto", "float16", "bfloat16")


@dataclass(eq=False)
class Metadata:
    """The metadata of a step, for the layers of a group.

    Attributes:
        num_actual_tokens: rows of the step's tensors that may belong to a request; further rows are padding.
        slot_mapping: int64 (num_actual_tokens,): block * block_size + the token's place; -1 for a token that is not
            written.
        step: the sequences.
    """

    num_actual_tokens: int
    slot_mapping: Tensor
    step: Step
    _places: dict[tuple[bool, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def write(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Writes new keys (rows, kv_heads, head_size) and values to their slots."""
        tokens = self.slot_mapping.shape[0]
        lengths, pages = self._at(k_cache.shape[1])
        k, v = key[:tokens].unsqueeze(1), value[:tokens].unsqueeze(1)
        append_kv(k, v, k_cache, v_cache, lengths, page_table=pages)

    def _at(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Each token as a sequence of one block: int32 lengths (tokens,) up to it, and blocks (tokens, 1).

        A length of 0 is not written. The first layer computes it, in a CUDA graph as a part of the graph.
        """
        captured = self.slot_mapping.is_cuda and torch.cuda.is_current_stream_capturing()
        if (captured, block_size) not in self._places:
            slots = self.slot_mapping
            lengths = (slots % block_size + 1) * (slots >= 0)
            pages = torch.div(slots, block_size, rounding_mode="floor")
            self._places[captured, block_size] = lengths.to(torch.int32), pages.to(torch.int32).unsqueeze(1)
        return self._places[captured, block_size]


class MetadataBuilder:
    """AttentionMetadataBuilder: it makes the metadata of a step from vLLM's CommonAttentionMetadata."""

    splits: FixedSplit | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Keeps what vLLM gives.

        Args:
            kv_cache_spec: what the cache of these layers is like.
            layer_names: the layers that share the metadata.
            vllm_config: vLLM's configuration.
            device: where the tensors are.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The metadata of a step.

        Args:
            common_prefix_len: is not needed: a prefix that requests share is read like other keys.
            common_attn_metadata: vLLM's description of the step.
            fast_build: is not needed: a plan takes one launch.

        Raises:
            NotImplementedError: the step needs attention that is not causal.
        """
        common = common_attn_metadata
        for name, given in (
            ("causal", common.causal is not True),
            ("mm_req_doc_ranges", common.mm_req_doc_ranges is not None),
            ("rswa_prefix_lens", common.rswa_prefix_lens is not None),
        ):
            if given:
                raise NotImplementedError(
                    f"tileattn's backend of vLLM runs causal attention only, got {name}={getattr(common, name)!r}"
                )
        # One query per request; requests that pad the batch have no keys.
        single = common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs
        step = Step(
            common.seq_lens,
            common.block_table_tensor,
            None if single else common.query_start_loc,
            common.max_query_len,
            self.splits,
        )
        return Metadata(common.num_actual_tokens, common.slot_mapping, step)


class Impl:
    """AttentionImpl: the attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Checks what the layer computes.

        Args:
            num_heads: heads of the queries.
            head_size: elements per head of queries and keys.
            scale: factor of the scores.
            num_kv_heads: heads of keys and values; None for num_heads.
            alibi_slopes: ALiBi's slope of each head.
            sliding_window: the number of keys that a query sees, its own included.
            kv_cache_dtype: "auto", "float16" or "bfloat16".
            logits_soft_cap: scores become ``cap * tanh(score / cap)``; None or 0 for no cap.
            attn_type: "decoder".
            kv_sharing_target_layer_name: the layer whose cache this one reads; it writes nothing then.
            sinks: one logit per head (num_heads,).

        Raises:
            NotImplementedError: caches in fp8 or other quantised formats, or attention other than a decoder's.
        """
        if kv_cache_dtype not in CACHE_DTYPES:
            raise NotImplementedError(
                f"tileattn's backend of vLLM takes kv_cache_dtype {', '.join(CACHE_DTYPES)}; not yet {kv_cache_dtype!r}"
            )
        if getattr(attn_type, "value", attn_type) != "decoder":
            raise NotImplementedError(
                f"tileattn's backend of vLLM takes attn_type 'decoder'; not yet {attn_type!r} (encoders and cross "
                "attention)"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # vLLM makes layers under a default device, so that the slopes are where the layer is.
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        left = None if sliding_window is None else sliding_window - 1
        self.options = LayerOptions(self.scale, left, logits_soft_cap or None, slopes, sinks)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the step's keys and values, and attends.

        Args:
            layer: vLLM's layer; not needed.
            query: (rows, num_heads, head_size).
            key: (rows, num_kv_heads, head_size); None if the cache has the keys already, as value.
            value: (rows, num_kv_heads, head_size_v).
            kv_cache: (blocks, num_kv_heads, block_size, head_size + head_size_v), any order of memory.
            attn_metadata: what the builder made; None while vLLM measures its memory.
            output: (rows, num_heads, head_size_v), where the result is written.
            output_scale: must be None.
            output_block_scale: must be None.

        Returns:
            output. Rows of no request, up to num_actual_tokens, are 0.

        Raises:
            NotImplementedError: the output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tileattn's backend of vLLM does not quantise its output")
        if attn_metadata is None:
            return output.fill_(0)
        pages = kv_cache.transpose(1, 2)
        k_cache, v_cache = pages[..., : self.head_size], pages[..., self.head_size :]
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            attn_metadata.write(key, value, k_cache, v_cache)
        rows = attn_metadata.num_actual_tokens
        attn_metadata.step.attend(query[:rows], k_cache, v_cache, self.options, output[:rows])
        return output


class Backend:
    """AttentionBackend: what vLLM's selector asks before it makes the other two."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """A name of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The class of a layer's attention."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes the metadata."""
        return MetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to 256: multiples of 8 by TileLang's kernels, others by Triton's."""
        return 0 < head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are supported."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Pages before a window are not read."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """By FixedSplit."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From sm_80 on."""
        return bool(capability.major >= 8)
