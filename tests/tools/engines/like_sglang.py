"""A small engine that calls an attention backend as SGLang 0.5.23 does, and modules that stand in for SGLang's.

Names, and the order of arguments and fields, are facts of SGLang's public interface in release 0.5.23.
"""

from __future__ import annotations

import importlib
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.tools.engines.served_requests import Layer, Request, Requests

SIGNATURES = {
    "__init__": "model_runner",
    "init_forward_metadata": "forward_batch",
    "init_forward_metadata_in_graph": "forward_batch",
    "init_cuda_graph_state": "max_bs max_num_tokens",
    "get_cuda_graph_seq_len_fill_value": "",
    "forward_decode": "q k v layer forward_batch save_kv_cache=True **kwargs",
    "forward_extend": "q k v layer forward_batch save_kv_cache=True **kwargs",
}
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.layers", "sglang.srt.layers.attention")
CHOICES, BACKENDS = f"{PACKAGES[2]}.choices", PACKAGES[4]


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self == ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self == ForwardMode.DRAFT_EXTEND_V2

    def is_dllm_extend(self) -> bool:
        return self == ForwardMode.DLLM_EXTEND


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend:
    needs_cpu_seq_lens = True
    kv_index_translator = None
    forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass

    def forward_decode(self, *arguments: Any, **named: Any) -> Tensor:
        raise NotImplementedError

    def forward_extend(self, *arguments: Any, **named: Any) -> Tensor:
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


def modules() -> dict[str, ModuleType]:
    """What `import` is to find in place of SGLang."""
    files = (CHOICES, f"{BACKENDS}.attention_registry", f"{BACKENDS}.base_attn_backend")
    found = {name: ModuleType(name) for name in (*PACKAGES, *files)}
    for name in PACKAGES:
        found[name].__path__ = []
    choices: list[str] = ["triton"]
    registered: dict[str, Any] = {}

    def register_attention_backend(name: str) -> Any:
        return lambda function: registered.setdefault(name, function)

    vars(found[files[0]]).update(ATTENTION_BACKEND_CHOICES=choices, add_attention_backend_choices=choices.extend)
    vars(found[files[1]]).update(ATTENTION_BACKENDS=registered, register_attention_backend=register_attention_backend)
    vars(found[files[2]]).update(AttentionBackend=AttentionBackend)
    return found


def registry() -> tuple[list[str], dict[str, Any]]:
    """The names that the command line takes, and the functions that make backends."""
    choices, backends = (importlib.import_module(name) for name in (CHOICES, f"{BACKENDS}.attention_registry"))
    return choices.ATTENTION_BACKEND_CHOICES, backends.ATTENTION_BACKENDS


class Pool:
    """MHATokenToKVPool: buffers (size + page_size, heads, dim) of each layer; the first page is for padding."""

    def __init__(self, requests: Requests, pages: int) -> None:
        def buffer(heads: int, dim: int) -> Tensor:
            shape = (pages * requests.page_size, heads, dim)
            return torch.full(shape, torch.nan, dtype=requests.dtype, device=requests.device)

        self.k_buffer = [buffer(x.kv_heads, x.head_dim) for x in requests.layers]
        self.v_buffer = [buffer(x.kv_heads, x.head_dim_v) for x in requests.layers]
        for buffers in (self.k_buffer, self.v_buffer):
            for x in buffers:
                x[: requests.page_size] = 0

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer: Any, loc_info: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        self.k_buffer[layer.layer_id][loc_info] = cache_k
        self.v_buffer[layer.layer_id][loc_info] = cache_v


def runner(requests: Requests, pages: int, width: int, **changes: Any) -> SimpleNamespace:
    """A model runner, as far as a backend looks at it."""
    table = torch.full((9, width * requests.page_size), 2**31 - 1, dtype=torch.int32, device=requests.device)
    table[0] = 0
    fields: dict[str, Any] = {
        "req_to_token_pool": SimpleNamespace(req_to_token=table, size=8),
        "token_to_kv_pool": Pool(requests, pages),
        "page_size": requests.page_size,
        "kv_cache_dtype": requests.dtype,
        "use_mla_backend": False,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "server_args": SimpleNamespace(dcp_size=1),
    }
    return SimpleNamespace(**(fields | changes))


def radix_attention(layer: Layer, index: int, **changes: Any) -> SimpleNamespace:
    """The fields of a RadixAttention layer."""
    fields = {
        "tp_q_head_num": layer.heads, "tp_k_head_num": layer.kv_heads, "tp_v_head_num": layer.kv_heads,
        "head_dim": layer.head_dim, "qk_head_dim": layer.head_dim, "v_head_dim": layer.head_dim_v,
        "scaling": layer.scale, "layer_id": index, "logit_cap": layer.soft_cap, "is_cross_attention": False,
        "sliding_window_size": -1 if layer.window is None else layer.window - 1, "attn_type": AttentionType.DECODER,
        "pos_encoding_mode": "NONE", "logit_capping_method": "tanh", "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


class Engine:
    """SGLang's steps: init_forward_metadata, then RadixAttention's call of `forward` in each layer."""

    def __init__(self, requests: Requests, pages: int, width: int) -> None:
        self.requests, self.runner = requests, runner(requests, pages, width)
        self.backend = registry()[1]["tileattn"](self.runner)
        assert not self.backend.needs_cpu_seq_lens
        self.layers = [radix_attention(layer, i) for i, layer in enumerate(requests.layers)]

    def batch(self, step: list[tuple[Request, int]], padding: int = 0) -> SimpleNamespace:
        """A ForwardBatch. Single tokens are a decoding step, which may be padded by requests in slot 0."""
        device, counts = self.requests.device, [count for _, count in step]
        slots = [slot for request, count in step for slot in self.requests.advance(request, count)]
        table, at = self.runner.req_to_token_pool.req_to_token, 0
        for request, count in step:  # a request that shares a prefix: its slots are in the table as well
            size, pages = self.requests.page_size, torch.tensor(request.pages)
            all_slots = (pages[:, None] * size + torch.arange(size)).flatten()[: request.length].to(torch.int32)
            assert all_slots[-count:].tolist() == slots[at : at + count]
            table[request.slot, : request.length], at = all_slots.to(device), at + count
        decoding = max(counts) == 1
        padding = padding if decoding else 0
        lengths = [request.length for request, _ in step]
        lengths += [self.backend.get_cuda_graph_seq_len_fill_value()] * padding
        mode = ForwardMode.DECODE if decoding else ForwardMode.MIXED if min(counts) == 1 else ForwardMode.EXTEND
        return SimpleNamespace(
            forward_mode=mode, batch_size=len(step) + padding,
            input_ids=torch.zeros(len(slots) + padding, dtype=torch.int64, device=device),
            req_pool_indices=torch.tensor([r.slot for r, _ in step] + [0] * padding, device=device),
            seq_lens=torch.tensor(lengths, device=device),
            out_cache_loc=torch.tensor(slots + [0] * padding, device=device),
            extend_seq_lens=None if decoding else torch.tensor(counts, dtype=torch.int32, device=device),
            extend_seq_lens_cpu=None if decoding else counts,
        )  # fmt: skip

    def step(self, step: list[tuple[Request, int]], padding: int = 0) -> None:
        """Computes the next tokens of requests in all layers, and checks them."""
        batch = self.batch(step, padding)
        self.backend.init_forward_metadata(batch)
        for i, (layer, given) in enumerate(zip(self.layers, self.requests.layers)):
            q, k, v = self.requests.new(step, i)
            extra = batch.out_cache_loc.shape[0] - q.shape[0]
            q, k, v = (torch.cat((x, x.new_zeros(extra, *x.shape[1:]))) for x in (q, k, v))
            sinks = {"sinks": torch.tensor(given.sinks, device=q.device)} if given.sinks else {}
            o = self.backend.forward(q.flatten(1), k, v, layer, batch, True, **sinks)
            assert o.shape == (q.shape[0], given.heads * given.head_dim_v)
            self.requests.check(step, i, o[: q.shape[0] - extra].unflatten(1, (given.heads, -1)))
