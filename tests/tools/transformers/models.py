"""Tiny models of transformers with random weights, and their inputs.

Each is one of transformers' classes, made from a configuration. Together they use every feature of attention that
transformers' models need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tileattn.compat.transformers import step
from tileattn.runtime import shared_calls

VOCABULARY = 61
WINDOW = 12


@dataclass(frozen=True)
class Size:
    """The size of a model, with two query heads to a key/value head."""

    head_dim: int
    heads: int = 4
    kv_heads: int = 2

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


CPU, GPU = Size(16), Size(64)


@dataclass(frozen=True)
class Model:
    """A class, the arguments of its configuration, and what is particular about it."""

    cls: str
    config: str
    arguments: Callable[[Size], dict[str, Any]]
    attentions: int = 2
    """How many times a forward pass calls its attention."""
    decodes: bool = True
    """Whether it generates."""
    encoder_decoder: bool = False
    sdpa: bool = True
    """Whether PyTorch's own attention knows all that it needs: not caps and sinks."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, size: Size, **more: Any) -> nn.Module:
        """A model with random weights, equal for equal arguments; its attn_implementation is "eager"."""
        arguments = {**self.arguments(size), **self.settings, **more}
        config = getattr(transformers, self.config)(vocab_size=VOCABULARY, pad_token_id=0, **arguments)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the only one in float64
        torch.manual_seed(0)
        return getattr(transformers, self.cls)(config).eval()


def decoder(size: Size) -> dict[str, Any]:
    """Names that most decoders share."""
    return {
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
    }


def encoder(size: Size) -> dict[str, Any]:
    """Names that most encoders share; they have no grouped heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    return {name: decoder(size)[name] for name in names}


def t5(size: Size) -> dict[str, Any]:
    return {
        "d_model": size.hidden,
        "d_kv": size.head_dim,
        "d_ff": 2 * size.hidden,
        "num_layers": 1,
        "num_heads": size.heads,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
    }


BOTH = ["sliding_attention", "full_attention"]
# A token goes to all experts: which it would be sent to depends on roundings.
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}

MODELS = {
    "llama": Model("LlamaForCausalLM", "LlamaConfig", decoder),
    "mistral": Model("MistralForCausalLM", "MistralConfig", decoder, settings={"sliding_window": WINDOW}),
    "gemma2": Model(
        "Gemma2ForCausalLM", "Gemma2Config", decoder, sdpa=False,
        settings={"sliding_window": WINDOW, "layer_types": BOTH, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": Model(
        "Gemma3ForCausalLM", "Gemma3TextConfig", decoder, settings={"sliding_window": WINDOW, "layer_types": BOTH}
    ),
    "qwen3": Model("Qwen3ForCausalLM", "Qwen3Config", decoder),
    "gpt-oss": Model(
        "GptOssForCausalLM", "GptOssConfig", decoder, sdpa=False,
        settings={"sliding_window": WINDOW, "layer_types": BOTH, **EXPERTS},
    ),
    "llama4": Model(
        "Llama4ForCausalLM", "Llama4TextConfig", decoder,
        settings={"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"], **EXPERTS,
                  "intermediate_size_mlp": 64, "attn_temperature_tuning": False},
    ),
    "bert": Model("BertForMaskedLM", "BertConfig", encoder, decodes=False),
    "modernbert": Model(
        "ModernBertForMaskedLM", "ModernBertConfig", encoder, decodes=False,
        settings={"local_attention": WINDOW, "layer_types": BOTH, "cls_token_id": 1, "sep_token_id": 2,
                  "bos_token_id": 1, "eos_token_id": 2},
    ),
    "t5": Model("T5ForConditionalGeneration", "T5Config", t5, attentions=3, encoder_decoder=True),
}  # fmt: skip


def with_attention(model: nn.Module, implementation: str) -> nn.Module:
    """A copy of a model, in all its parts with another attention."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation
    return copied


class InFloat64(TorchFunctionMode):
    """Inside, what a model wants computed in float32, such as norms and softmaxes, is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


# --- Inputs ---


def tokens(batch: int, seqlen: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def padding(kind: str, batch: int, seqlen: int, device: str) -> Tensor | None:
    """A padding mask (batch, seqlen) of 0 and 1, with a sequence without padding last; None for "none"."""
    if kind == "none":
        return None
    missing = torch.tensor([5 * (batch - 1 - i) for i in range(batch)])[:, None]
    place = torch.arange(seqlen)
    seen = place >= missing if kind == "left" else place < seqlen - missing
    return seen.long().to(device)


@contextmanager
def recorded_steps() -> Iterator[list[Tensor]]:
    """The lengths of the eager calls of `decode` on static caches, and of those that layers share instead."""
    lengths: list[Tensor] = []
    decode, shared_decode = step.decode, shared_calls.shared_decode

    def recorded(q: Tensor, k: Tensor, v: Tensor, seqlens_k: Tensor, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            lengths.append(seqlens_k)
        return decode(q, k, v, seqlens_k, **options)

    def recorded_shared(*arguments: Any) -> Any:
        call = shared_decode(*arguments)
        return lambda *tensors: (lengths.append(arguments[4]), call(*tensors))[1]

    with (
        mock.patch.object(step, "decode", recorded),
        mock.patch.object(shared_calls, "shared_decode", recorded_shared),
    ):
        yield lengths
