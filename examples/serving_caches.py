"""Three ways to the same kernels for `serve_tiny.py`: tileattn's functions, and its backends of vLLM and SGLang.

Each has a fixed number of slots, one for a request. A step begins with `begin`, which makes sequences longer, and then
calls the object once per layer. vLLM and SGLang are not needed: their backends are called as those engines call them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tiny_llama import TinyLlama
from torch import Tensor

import tileattn
from tileattn.compat.sglang.backend import Backend
from tileattn.compat.vllm.backend import Impl, MetadataBuilder


@dataclass(frozen=True)
class Sizes:
    """The sizes of a cache: slots, tokens of a request at most, tokens of a page."""

    slots: int
    longest: int
    page_size: int


@dataclass(frozen=True)
class Packing:
    """Where the new tokens of a step are, if slots have different numbers of them.

    Attributes:
        cu_seqlens: int32 (slots + 1,): the tokens of slot b are rows cu_seqlens[b] : cu_seqlens[b + 1].
        slot: (rows,): the slot of each row.
        counts: the numbers of tokens; the host knows them.
    """

    cu_seqlens: Tensor
    slot: Tensor
    counts: list[int]


class Cache:
    """What the three have in common: pages, and the lengths of the sequences.

    Attributes:
        pages: the page table and the lengths. Only :class:`Tileattn` keeps keys and values in it.
        positions: (rows,): the position of each new token of the step, once it has begun.
    """

    def __init__(self, model: TinyLlama, sizes: Sizes, kv_heads: int = 1, head_dim: int = 1, layers: int = 1) -> None:
        self.model, self.sizes = model, sizes
        weight = model.head.weight
        self.pages = tileattn.PagedKVCache(
            sizes.slots, sizes.longest, kv_heads, head_dim, page_size=sizes.page_size, layers=layers,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        self.positions = torch.empty(0)

    def begin(self, tokens: Tensor, packing: Packing | None) -> None:
        """Makes the sequences longer by int32 (slots,) tokens; without `packing` there is one row for each slot."""
        self.pages.extend(tokens)
        lengths = self.pages.seqlens
        if packing is None:
            self.positions = (lengths - 1).clamp(min=0).long()
        else:
            first = lengths - packing.cu_seqlens.diff() - packing.cu_seqlens[:-1]
            self.positions = torch.arange(packing.slot.shape[0], device=lengths.device) + first[packing.slot]
        self.prepare(packing)

    def prepare(self, packing: Packing | None) -> None:
        """Makes what all layers of the step share."""
        raise NotImplementedError

    def shareable(self, length: int) -> int:
        """How many of so many equal tokens in front another sequence can share: engines share whole pages."""
        return length // self.sizes.page_size * self.sizes.page_size

    def new_slots(self, packing: Packing | None) -> Tensor:
        """Where the new tokens go, page * page_size + place; -1 for a row of an empty slot."""
        table, size = self.pages.page_table, self.sizes.page_size
        row = torch.arange(self.sizes.slots, device=table.device) if packing is None else packing.slot
        page = table[row, self.positions // size].long()
        return torch.where(page >= 0, page * size + self.positions % size, -1)


class Tileattn(Cache):
    """By `append_kv`, which also rotates queries and keys, and `decode` with one plan for all layers."""

    def __init__(self, model: TinyLlama, sizes: Sizes) -> None:
        layer = model.layers[0]
        super().__init__(model, sizes, layer.kv_heads, layer.head_dim, len(model.layers))

    def shareable(self, length: int) -> int:
        """All: `fork` copies a page that is not full."""
        return length

    def prepare(self, packing: Packing | None) -> None:
        self.plan: Any = None
        self.packed: dict[str, Any] = {}
        if packing is not None:
            self.packed = {"cu_seqlens_q": packing.cu_seqlens, "max_seqlen_q": max(packing.counts)}

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.packed:  # (slots, 1, heads, head_dim)
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        rotary = {"cos": self.model.cos, "sin": self.model.sin}
        rotated = self.pages.append(k, v, layer=index, cu_seqlens_q=self.packed.get("cu_seqlens_q"), **rotary, q=q)
        assert rotated is not None
        call = (rotated, *self.pages.layer(index), self.pages.seqlens)
        named = {"page_table": self.pages.page_table, **self.packed}
        if self.plan is None:
            self.plan = tileattn.decode_plan(*call, **named)
        o = tileattn.decode(*call, **named, plan=self.plan)
        return o if self.packed else o.squeeze(1)


class Vllm(Cache):
    """By the classes that vLLM gets: `build` once per step, then `forward` in each layer."""

    def __init__(self, model: TinyLlama, sizes: Sizes) -> None:
        super().__init__(model, sizes)
        layer, weight = model.layers[0], model.head.weight
        self.builder = MetadataBuilder(None, [], None, weight.device)
        self.impls = [Impl(layer.heads, layer.head_dim, layer.head_dim**-0.5, layer.kv_heads) for _ in model.layers]
        shape = (self.pages.pages, layer.kv_heads, sizes.page_size, 2 * layer.head_dim)
        self.caches = [weight.new_empty(shape) for _ in model.layers]

    def prepare(self, packing: Packing | None) -> None:
        # As vLLM's CommonAttentionMetadata.
        slots, device = self.sizes.slots, self.pages.device
        one_each = torch.arange(slots + 1, dtype=torch.int32, device=device)
        common = SimpleNamespace(
            query_start_loc=one_each if packing is None else packing.cu_seqlens, seq_lens=self.pages.seqlens,
            num_reqs=slots, num_actual_tokens=self.positions.shape[0],
            max_query_len=1 if packing is None else max(packing.counts), max_seq_len=self.sizes.longest,
            block_table_tensor=self.pages.page_table, slot_mapping=self.new_slots(packing), causal=True,
            mm_req_doc_ranges=None, rswa_prefix_lens=None,
        )  # fmt: skip
        self.metadata = self.builder.build(0, common)

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.model.rotated(q, self.positions), self.model.rotated(k, self.positions)
        output = torch.empty_like(q)
        return self.impls[index].forward(None, q, k, v, self.caches[index], self.metadata, output)


class Sglang(Cache):
    """By the backend that SGLang gets: `init_forward_metadata` once per step, then `forward_decode` or `_extend`."""

    def __init__(self, model: TinyLlama, sizes: Sizes) -> None:
        super().__init__(model, sizes)
        layer, weight, table = model.layers[0], model.head.weight, self.pages.page_table
        shape = (self.pages.pages * sizes.page_size + sizes.page_size, layer.kv_heads, layer.head_dim)
        self.buffers = [(weight.new_empty(shape), weight.new_empty(shape)) for _ in model.layers]
        self.tokens = torch.zeros(sizes.slots, table.shape[1] * sizes.page_size, dtype=torch.int32, device=table.device)
        # As far as a backend looks at SGLang's ModelRunner.
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.tokens), token_to_kv_pool=self,
            page_size=sizes.page_size, kv_cache_dtype=weight.dtype, use_mla_backend=False,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            model_config=SimpleNamespace(is_encoder_decoder=False), kv_index_translator=None, server_args=None,
        )  # fmt: skip
        self.backend = Backend(runner)
        self.layers = [
            SimpleNamespace(
                tp_q_head_num=layer.heads, qk_head_dim=layer.head_dim, v_head_dim=layer.head_dim,
                scaling=layer.head_dim**-0.5, layer_id=index, logit_cap=0.0, sliding_window_size=-1,
                is_cross_attention=False, attn_type=SimpleNamespace(value="decoder"), logit_capping_method="tanh",
                pos_encoding_mode="NONE", xai_temperature_len=-1,
            )
            for index in range(len(model.layers))
        ]  # fmt: skip

    # SGLang's pool of keys and values. What belongs to no sequence is written behind the last page.

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id][0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id][1]

    def set_kv_buffer(self, layer: Any, loc_info: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        for buffer, new in zip(self.buffers[layer.layer_id], (cache_k, cache_v)):
            buffer[loc_info] = new

    def prepare(self, packing: Packing | None) -> None:
        table, size = self.pages.page_table, self.sizes.page_size
        places = torch.arange(size, dtype=torch.int32, device=table.device)
        self.tokens.copy_((table[:, :, None] * size + places).flatten(1))
        slots = self.new_slots(packing)
        decoding = packing is None
        mode = SimpleNamespace(
            is_idle=lambda: False, is_decode=lambda: decoding, is_target_verify=lambda: False,
            is_draft_extend_v2=lambda: False, is_dllm_extend=lambda: False,
        )  # fmt: skip
        # As SGLang's ForwardBatch.
        self.batch = SimpleNamespace(
            forward_mode=mode, seq_lens=self.pages.seqlens.long(),
            req_pool_indices=torch.arange(self.sizes.slots, device=table.device),
            out_cache_loc=torch.where(slots < 0, self.pages.pages * size, slots),
            extend_seq_lens=None if packing is None else packing.cu_seqlens.diff(),
            extend_seq_lens_cpu=None if packing is None else packing.counts,
        )  # fmt: skip
        self.backend.init_forward_metadata(self.batch)
        self.forward = self.backend.forward_decode if decoding else self.backend.forward_extend

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.model.rotated(q, self.positions), self.model.rotated(k, self.positions)
        return self.forward(q, k, v, self.layers[index], self.batch).view_as(q)
