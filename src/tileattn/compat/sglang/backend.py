"""SGLang's attention backend on tileattn's kernels, without SGLang's base class: :mod:`.engine` adds it.

SGLang keeps the cache slot of each token of each request in a table, `req_to_token`. In a step it calls
``init_forward_metadata``, and then ``forward_decode`` or ``forward_extend`` in every layer. New keys and values are
written by SGLang's own pool. The metadata are tensors made by operations that a CUDA graph can hold, so that they are
made inside of the graph (``init_forward_metadata_in_graph``), and one graph serves all lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine_step import LayerOptions, Step

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Backend:
    """Attention of all layers of a model runner.

    Attributes:
        forward_metadata: the sequences of the step; None for an idle one.
    """

    needs_cpu_seq_lens = False  # lengths are read on the device only

    def __init__(self, model_runner: Any) -> None:
        """Checks that the model and its cache are of a kind that tileattn runs.

        Args:
            model_runner: SGLang's.

        Raises:
            NotImplementedError: latent caches (MLA), caches in fp8, encoder-decoder models, speculative decoding,
                caches in two pools, or sequences spread over devices.
        """
        super().__init__()
        if reason := refusal(model_runner):
            raise NotImplementedError(f"tileattn's backend of SGLang: {reason}")
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size: int = model_runner.page_size or 1
        self.forward_metadata: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of an eager step. Then `forward_decode` or `forward_extend` is called for each layer."""
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The same while a graph is captured: it waits for nothing, and all its work is on the device.

        Args:
            forward_batch: SGLang's description of the step.

        Raises:
            NotImplementedError: a step of speculative decoding, or of a diffusion model.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if mode.is_target_verify() or mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise NotImplementedError(f"tileattn's backend of SGLang does not run steps of mode {mode!r}")
        lengths, table = batch.seq_lens.to(torch.int32), self._pages(batch.req_pool_indices)
        if mode.is_decode():
            self.forward_metadata = Step(lengths, table)
            return
        ends = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        counts = batch.extend_seq_lens_cpu
        longest = batch.input_ids.shape[0] if counts is None else max(counts, default=1)
        self.forward_metadata = Step(lengths, table, ends, longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing is kept between graphs."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a batch: they read the first token of request 0 and nobody reads them."""
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer in a step with one query per request.

        Args:
            q: (tokens, heads * head_dim), or (tokens, heads, head_dim).
            k: (tokens, kv_heads, head_dim), the new keys; None if the cache has them already, as v.
            v: (tokens, kv_heads, v_head_dim).
            layer: SGLang's RadixAttention.
            forward_batch: SGLang's description of the step.
            save_kv_cache: whether k and v are written to the cache.
            kwargs: ``sinks``, one logit per head (heads,), or None. No other is supported.

        Returns:
            o (tokens, heads * v_head_dim).

        Raises:
            NotImplementedError: the layer computes what tileattn does not run.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a layer in a step with any number of queries per request, the arguments as `forward_decode`."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        others: dict[str, Any],
    ) -> Tensor:
        options = options_of(layer, others)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self.forward_metadata is None:  # an idle worker
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        k_cache = self._as_pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id))
        v_cache = self._as_pages(self.token_to_kv_pool.get_value_buffer(layer.layer_id))
        return self.forward_metadata.attend(q, k_cache, v_cache, options).flatten(1)

    def _as_pages(self, buffer: Tensor) -> Tensor:
        """A layer's buffer (slots, kv_heads, head_dim) as (pages, page_size, kv_heads, head_dim)."""
        pages = buffer.shape[0] // self.page_size
        return buffer[: pages * self.page_size].view(pages, self.page_size, *buffer.shape[1:])

    def _pages(self, requests: Tensor) -> Tensor:
        """The page table of these requests, int32 (requests, width): a page's slots follow each other."""
        slots = self.req_to_token[:, :: self.page_size].index_select(0, requests)
        if self.page_size > 1:
            slots.div_(self.page_size, rounding_mode="floor")
        return slots.to(torch.int32)


def refusal(model_runner: Any) -> str | None:
    """The reason why a model runner is not supported, or None."""
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    if model_runner.use_mla_backend:
        return "latent caches (MLA) are not supported yet"
    if model_runner.kv_cache_dtype not in CACHE_DTYPES:
        return (
            f"kv_cache_dtype must be one of {', '.join(map(str, CACHE_DTYPES))}; not yet {model_runner.kv_cache_dtype}"
        )
    if config.is_encoder_decoder:
        return "encoder-decoder models (cross attention) are not supported"
    if not model_runner.spec_algorithm.is_none():
        return "speculative decoding is not supported"
    if hasattr(pool, "translate_loc_from_full_to_swa"):
        return "a pool of its own for layers with windows is not supported: launch with disable_hybrid_swa_memory"
    if getattr(model_runner.kv_index_translator, "is_translating", False):
        return "the unified memory pool is not supported"
    if getattr(model_runner.server_args, "dcp_size", 1) > 1:
        return "decode context parallelism (dcp_size > 1) is not supported"
    return None


def options_of(layer: Any, others: dict[str, Any]) -> LayerOptions:
    """What a RadixAttention computes, with the keyword arguments of its call.

    Raises:
        NotImplementedError: tileattn does not run it.
    """
    unknown = {
        "keyword arguments": sorted(name for name, value in others.items() if name != "sinks" and value is not None),
        "is_cross_attention": layer.is_cross_attention,
        "attn_type": layer.attn_type.value if layer.attn_type.value != "decoder" else None,
        "logit_capping_method": layer.logit_capping_method if layer.logit_capping_method != "tanh" else None,
        "pos_encoding_mode": layer.pos_encoding_mode if layer.pos_encoding_mode != "NONE" else None,
        "xai_temperature_len": layer.xai_temperature_len if layer.xai_temperature_len > 0 else None,
    }
    for name, value in unknown.items():
        if value:
            raise NotImplementedError(f"tileattn's backend of SGLang does not run layers with {name} {value!r}")
    left = layer.sliding_window_size if layer.sliding_window_size >= 0 else None
    return LayerOptions(layer.scaling, left, layer.logit_cap or None, sink=others.get("sinks"))
