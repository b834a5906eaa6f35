"""A small engine that calls an attention backend as vLLM 0.33.0 does, and modules that stand in for vLLM's.

Names, and the order of arguments and fields, are facts of vLLM's public interface at commit 4ba787ec9 (release 0.33.0).
Abstract methods are those of its base classes: a backend that lacks one cannot be made.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import make_dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.tools.engines.served_requests import Layer, Request, Requests

# What vLLM calls with these arguments; "=" are defaults.
SIGNATURES = {
    "get_name": "",
    "get_impl_cls": "",
    "get_builder_cls": "",
    "MetadataBuilder.__init__": "kv_cache_spec layer_names vllm_config device",
    "MetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build=False",
    "Impl.__init__": "num_heads head_size scale num_kv_heads=None alibi_slopes=None sliding_window=None "
    "kv_cache_dtype='auto' logits_soft_cap=None attn_type='decoder' kv_sharing_target_layer_name=None",
    "Impl.forward": "layer query key value kv_cache attn_metadata output output_scale=None output_block_scale=None",
}
COMMON = """
    query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len
    block_table_tensor slot_mapping
"""
COMMON_OPTIONAL = """
    causal=True logits_indices_padded num_logits_indices max_logits_per_req encoder_seq_lens encoder_seq_lens_cpu
    dcp_local_seq_lens dcp_local_seq_lens_cpu_upper_bound positions is_prefilling seq_lens_cpu_upper_bound req_idx
    mm_req_doc_ranges rswa_prefix_lens replayssm_decode_base_cpu
"""
CommonAttentionMetadata = make_dataclass(
    "CommonAttentionMetadata",
    [
        *COMMON.split(),
        *((name.partition("=")[0], Any, True if "=" in name else None) for name in COMMON_OPTIONAL.split()),
    ],
)


class DeviceCapability(NamedTuple):
    major: int
    minor: int


NAMES = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None: ...

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC):
    supports_quant_query_input = False

    def __new__(cls, *args: Any, **named: Any) -> Any:
        self = super().__new__(cls)
        self.dcp_world_size, self.need_to_return_lse_for_decode = 1, False
        return self

    @abstractmethod
    def __init__(self, num_heads: int, head_size: int, scale: float) -> None: ...

    @abstractmethod
    def forward(self, *arguments: Any, **named: Any) -> Tensor: ...


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self) -> str:
        return PATHS.get(self, self.value)

    def is_overridden(self) -> bool:
        return self in PATHS

    def get_class(self) -> Any:
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)


PATHS: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str | None = None, is_mamba: bool = False) -> Any:
    assert class_path is not None
    assert not is_mamba
    PATHS[backend] = class_path
    return lambda x: x


def modules(batch_invariant: bool = False) -> dict[str, ModuleType]:
    """What `import` is to find in place of vLLM."""
    PATHS.clear()
    found = {name: ModuleType(name) for name in (*NAMES, "vllm.envs", f"{NAMES[2]}.backend", f"{NAMES[3]}.registry")}
    found["vllm.envs"].VLLM_BATCH_INVARIANT = batch_invariant  # type: ignore[attr-defined]
    for each in (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType,
        CommonAttentionMetadata,
    ):  # fmt: skip
        setattr(found[f"{NAMES[2]}.backend"], each.__name__, each)
    for function in (AttentionBackendEnum, register_backend):
        setattr(found[f"{NAMES[3]}.registry"], function.__name__, function)
    for name in (*NAMES[:-1], NAMES[3]):
        found[name].__path__ = []
    found["vllm"].envs = found["vllm.envs"]  # type: ignore[attr-defined]
    return found


def select(layers: Sequence[Layer], dtype: torch.dtype) -> Any:
    """The backend class of CUSTOM, asked as vLLM's selector asks."""
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    reasons = [] if dtype in backend.supported_dtypes else ["dtype"]
    for layer in layers:
        reasons += [] if backend.supports_head_size(layer.head_dim) else ["head_size"]
        reasons += ["sink"] if layer.sinks and not backend.supports_sink() else []
        reasons += ["window"] if layer.window and not backend.supports_sliding_window() else []
    reasons += ["MLA"] if backend.is_mla() else []
    reasons += [] if backend.supports_compute_capability(DeviceCapability(9, 0)) else ["compute capability"]
    assert reasons == []
    return backend


class Engine:
    """vLLM's steps: builder.build once, then impl.forward in each layer."""

    def __init__(self, requests: Requests, pages: int, width: int, heads_first: bool = False) -> None:
        self.requests, self.width = requests, width
        layers, size, device = requests.layers, requests.page_size, requests.device
        backend = select(layers, requests.dtype)
        spec = SimpleNamespace(block_size=size, num_kv_heads=layers[0].kv_heads, head_size=layers[0].head_dim)
        names = [f"model.layers.{i}.attn" for i in range(len(layers))]
        self.builder = backend.get_builder_cls()(spec, names, SimpleNamespace(), torch.device(device))
        assert type(self.builder)._cudagraph_support is AttentionCGSupport.ALWAYS
        with torch.device(device):
            self.impls = [self.impl(backend, layer) for layer in layers]
        self.caches = []
        for layer in layers:
            content = layer.head_dim + layer.head_dim_v
            shape = (pages, layer.kv_heads, size, content) if heads_first else (pages, size, layer.kv_heads, content)
            cache = torch.full(shape, torch.nan, dtype=requests.dtype, device=device)
            self.caches.append(cache if heads_first else cache.transpose(1, 2))

    @staticmethod
    def impl(backend: Any, layer: Layer) -> Any:
        """As vLLM's Attention layer makes it: ten arguments by place, the model's own by name."""
        slopes, sinks = list(layer.slopes) or None, torch.tensor(layer.sinks) if layer.sinks else None
        return backend.get_impl_cls()(
            layer.heads, layer.head_dim, layer.scale, layer.kv_heads, slopes, layer.window, "auto",
            layer.soft_cap or None, AttentionType.DECODER, None, **({} if sinks is None else {"sinks": sinks}),
        )  # fmt: skip

    def common(self, step: list[tuple[Request, int]], padding: int = 0) -> Any:
        """The description of a step, padded by tokens of no request, and by requests without tokens.

        There are as many requests as tokens, also in a step in which a request has two.
        """
        device, counts = self.requests.device, [count for _, count in step]
        slots = [slot for request, count in step for slot in self.requests.advance(request, count)]
        table = torch.full((len(step), self.width), 2**31 - 1, dtype=torch.int32)
        for row, (request, _) in zip(table, step):
            row[: len(request.pages)] = torch.tensor(request.pages)
        more = len(slots) + padding - len(step)
        counts, lengths = counts + [0] * more, [request.length for request, _ in step] + [0] * more
        table = torch.cat((table, table.new_zeros(more, self.width)))
        ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return CommonAttentionMetadata(
            ends.to(device), ends, torch.tensor(lengths, dtype=torch.int32, device=device), len(lengths),
            len(slots) + padding, max(counts), max(lengths), table.to(device),
            torch.tensor(slots + [-1] * padding, device=device),
        )  # fmt: skip

    def step(self, step: list[tuple[Request, int]], padding: int = 0) -> None:
        """Computes the next tokens of requests in all layers, and checks them."""
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=self.common(step, padding))
        for i, (impl, cache) in enumerate(zip(self.impls, self.caches)):
            q, k, v = (
                torch.cat((x, x.new_full((padding, *x.shape[1:]), torch.nan))) for x in self.requests.new(step, i)
            )
            output = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
            layer = SimpleNamespace(layer_name=f"model.layers.{i}.attn")
            impl.forward(layer, q, k, v, cache, metadata, output=output, output_scale=None, output_block_scale=None)
            self.requests.check(step, i, output)
