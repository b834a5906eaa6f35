"""Reads from a model's ``config.json`` what its layers ask of attention, without making the model.

Only what decides a kernel is read: head dims, dtype, whether layers have a window, a cap or sinks, and how many query
heads share a key/value head. Numbers such as a window's size, a cap and ``query_pre_attn_scalar`` are arguments of a
kernel, not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Layers of these types are causal attention; those with a window are also called on texts shorter than it. Layers of
# other types (linear attention, Mamba, chunks, selected blocks) have no kernel that is known from the configuration.
FULL, SLIDING = ("full_attention", "attention"), ("sliding_attention",)
# Models that pass sinks (`s_aux`) to their attention, and in which layers; no entry of a configuration says so.
SINKS = {"gpt_oss": "all", "granite_swa": "all", "granitemoe_swa": "all", "mimo_v2_flash": "sliding"}
CAPS = ("attn_logit_softcapping", "attn_logit_soft_cap")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification", "Model")


@dataclass(frozen=True)
class LayerKind:
    """What the layers of one kind ask of attention.

    Attributes:
        head_dim: elements per head of q and k.
        head_dim_v: elements per head of v.
        group: query heads per key/value head.
        window: whether the layers have a sliding window.
        cap: whether scores have a soft cap.
        sink: whether each head has a sink.
    """

    head_dim: int
    head_dim_v: int
    group: int = 1
    window: bool = False
    cap: bool = False
    sink: bool = False


@dataclass(frozen=True)
class ModelKinds:
    """The kinds of layers of a model, each once.

    Attributes:
        name: the model's type.
        kinds: the kinds of layers.
        dtype: "bf16", "fp16" or "fp32"; None where the configuration does not say.
        left_out: types of layers, and parts of the model, of which no kernel is known.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    dtype: str | None
    left_out: tuple[str, ...] = ()


def read_config(path: Path) -> ModelKinds:
    """The kinds of layers of a decoder, from its ``config.json``.

    Where transformers is installed and knows the model's type, its configuration class fills in what the file leaves
    to defaults. Of a multimodal model the language model (``text_config``) is read.

    Args:
        path: the file, or the folder that has it.

    Raises:
        ValueError: there is no such file, it is not a configuration, or it describes no causal attention. The message
            names the file, what was found and what is needed.
    """
    file = path / "config.json" if path.is_dir() else path
    values = _loaded(file)
    outer, left_out = values, []
    if isinstance(values.get("text_config"), dict):
        values = {"dtype": outer.get("dtype") or outer.get("torch_dtype"), **values["text_config"]}
        left_out += sorted(name for name in outer if name.endswith("_config") and _has_heads(outer[name]))
        left_out = [name for name in left_out if name != "text_config"]
    _check_decoder(file, outer)
    get = _completed(file, values)
    name = str(get("model_type") or outer.get("model_type") or "model")
    kinds, others = _kinds(file, name, get)
    return ModelKinds(name, kinds, _dtype(file, values), (*others, *left_out))


def _loaded(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; needed is a config.json, or the folder that has it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); needed is a model's config.json") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a JSON {type(values).__name__}; needed is the object of a model's config.json")
    return values


def _has_heads(part: Any) -> bool:
    return isinstance(part, dict) and any("num_attention_heads" in name or name == "num_heads" for name in part)


def _check_decoder(file: Path, values: dict[str, Any]) -> None:
    """Raises for a model whose layers are not the causal ones of a decoder."""
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{file}: architectures must be a list of names, got {architectures!r}")
    text = values.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{file}: text_config must be an object, got {text!r}")
    reason = None
    if values.get("is_encoder_decoder"):
        reason = "an encoder-decoder model"
    elif architectures and not any(str(name).endswith(DECODERS) for name in architectures):
        reason = f"{architectures[0]}"
    elif any(part.get("use_bidirectional_attention") in (True, "all") for part in (values, text)):
        reason = "a model with use_bidirectional_attention"
    if reason is not None:
        raise ValueError(
            f"{file} is of {reason}; only causal decoders are read, for others give --head-dim and --variant full"
        )


def _completed(file: Path, values: dict[str, Any]) -> Callable[[str], Any]:
    """Looks up an entry: of transformers' configuration class where that knows the model's type, else of the file."""
    kind = values.get("model_type")
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return values.get
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return values.get
    given = {name: value for name, value in values.items() if name != "model_type"}
    try:
        config = CONFIG_MAPPING[kind](**given)
    except Exception as error:  # each class has checks of its own
        reason = " ".join(str(error).split())  # of several lines
        raise ValueError(f"{file} is refused by transformers' {CONFIG_MAPPING[kind].__name__}: {reason}") from error
    return lambda name: getattr(config, name, None)


def _kinds(file: Path, name: str, get: Callable[[str], Any]) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    """The kinds of layers, and the types of those of which no kernel is known."""
    types = _layer_types(get)
    kinds: dict[LayerKind, None] = {}
    for each in types:
        if each in FULL + SLIDING:
            kinds[_kind(file, name, get, each in SLIDING)] = None
    others = tuple(dict.fromkeys(each for each in types if each not in FULL + SLIDING))
    if not kinds:
        raise ValueError(
            f"{file} has layers of the types {', '.join(others)}, and none of {', '.join(FULL + SLIDING)}, which are "
            f"those that are known"
        )
    return tuple(kinds), others


def _layer_types(get: Callable[[str], Any]) -> list[str]:
    types = get("layer_types")
    if isinstance(types, (list, tuple)) and types:
        return [str(each) for each in types]
    if get("sliding_window") is None or get("use_sliding_window") is False:
        return [FULL[0]]
    # Which of the layers have the window is not said. Those that have it also run the kernels of the others.
    return [SLIDING[0]]


def _kind(file: Path, name: str, get: Callable[[str], Any], sliding: bool) -> LayerKind:
    heads = _count(file, get, "num_attention_heads")
    kv_heads = _count(file, get, "num_key_value_heads") if get("num_key_value_heads") is not None else heads
    if heads is None or kv_heads is None:
        raise ValueError(
            f"{file} has no num_attention_heads, and so no attention; needed is a model's config.json with "
            f"num_attention_heads and either head_dim or hidden_size"
        )
    if heads % kv_heads:
        raise ValueError(f"{file}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    nope, rope = _count(file, get, "qk_nope_head_dim"), _count(file, get, "qk_rope_head_dim")
    if nope is not None and rope is not None:  # latent attention: `head_dim` is of the rotary part alone
        head_dim: int | None = nope + rope
    else:
        own = None if sliding else _count(file, get, "global_head_dim")
        head_dim = own or _count(file, get, "head_dim")
    if head_dim is None:
        hidden = _count(file, get, "hidden_size")
        if hidden is None or hidden % heads:
            raise ValueError(f"{file} has neither head_dim nor a hidden_size that its {heads} heads divide")
        head_dim = hidden // heads
    sinks = SINKS.get(name)
    return LayerKind(
        head_dim=head_dim,
        head_dim_v=_count(file, get, "v_head_dim") or head_dim,
        group=heads // kv_heads,
        window=sliding,
        cap=any(_has_cap(file, get, cap) for cap in CAPS),
        sink=sinks == "all" or (sinks == "sliding" and sliding),
    )


def _has_cap(file: Path, get: Callable[[str], Any], name: str) -> bool:
    value = get(name)
    if value is None or (isinstance(value, (int, float)) and value >= 0):  # 0 and false are none; NaN is refused
        return bool(value)
    raise ValueError(f"{file}: {name} must be a positive number or null, got {value!r}")


def _count(file: Path, get: Callable[[str], Any], name: str) -> int | None:
    value = get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{file}: {name} must be a positive integer, got {value!r}")


def _dtype(file: Path, values: dict[str, Any]) -> str | None:
    given = values.get("dtype") or values.get("torch_dtype")
    if given is None:
        return None
    text = str(given).removeprefix("torch.")
    if text not in DTYPES:
        raise ValueError(f"{file}: the dtype {text!r} has no kernels; give --dtype bf16 or fp16")
    return DTYPES[text]
