"""The backends of vLLM and SGLang, driven as these engines drive them, beside a plain reference.

Neither engine is installed. Modules of the tests stand in for theirs: base classes and registries with the names and
arguments of their public interfaces (tests/tools/engines).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileattn
from tests.tools import ROOT
from tests.tools.engines import like_sglang, like_vllm
from tests.tools.engines.served_requests import Layer, Requests
from tileattn.compat.engine_step import Step
from tileattn.compat.sglang import backend as sglang
from tileattn.compat.vllm import backend as vllm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
MODULES = {"vllm": like_vllm.modules, "sglang": like_sglang.modules}
LIKE: dict[str, Any] = {"vllm": like_vllm, "sglang": like_sglang}
PAGES, WIDTH = 40, 15


def register(name: str) -> None:
    """What the engine does at its start: it calls the function of the entry point that the package declares."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (path,) = groups[GROUPS[name]].values()
    module, _, function = path.partition(":")
    getattr(importlib.import_module(module), function)()


@pytest.fixture(params=GROUPS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An engine of which modules stand in and where tileattn is registered."""
    for module, stand_in in MODULES[request.param]().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    register(request.param)
    yield request.param
    # It has the base classes of the stand-ins.
    sys.modules.pop(f"tileattn.compat.{request.param}.engine", None)


LAYERS = {
    "plain": [Layer(), Layer()],
    "windows": [Layer(window=19), Layer(), Layer(window=1)],
    "caps and sinks": [Layer(soft_cap=5.0, sinks=(0.5, -1.0, 2.0, 0.0)), Layer(4, 1, sinks=(0.0, 1.0, -3.0, 0.5))],
    "smaller values": [Layer(3, 3, 24, 16)],
}


def serve(engine: Any, requests: Requests) -> None:
    """Prefill in chunks, decoding steps, drafts, mixtures of them, prefixes that are shared, pages that end."""
    a, b = requests.draw(120), requests.draw(90)
    engine.step([(a, 37), (b, 1)], padding=2)
    engine.step([(b, 1), (a, 1)], padding=3)
    c = requests.fork(a, 110, 38)
    engine.step([(a, 1), (b, 20), (c, 63)], padding=1)
    engine.step([(c, 1), (a, 1), (b, 1)])
    d = requests.fork(c, 70, 50)
    engine.step([(a, 4), (d, 2), (c, 1)])
    engine.step([(b, 2), (d, 1)])
    engine.step([(b, 1)], padding=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layers", LAYERS)
def test_steps_of_an_engine(name: str, layers: str, page_size: int, device: str) -> None:
    pages = PAGES if page_size > 1 else 330
    requests = Requests(LAYERS[layers], pages, page_size, torch.bfloat16, device)
    serve(LIKE[name].Engine(requests, pages, WIDTH if page_size > 1 else 130), requests)
    tileattn.check_caches()


@pytest.mark.parametrize("name", ["vllm"], indirect=True)
@pytest.mark.parametrize("heads_first", [False, True])
def test_vllms_layouts_and_alibi(name: str, heads_first: bool) -> None:
    layers = [Layer(slopes=(0.5, 0.25, 0.125, 0.06), soft_cap=9.0), Layer(8, 2, 32, 32, slopes=(0.1,) * 8)]
    requests = Requests(layers, PAGES, 16, torch.float16, "cpu")
    serve(like_vllm.Engine(requests, PAGES, WIDTH, heads_first), requests)


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels this needs on a GPU, for benchmarks/precompile.py."""
    for layer, page_size in product({layer for layers in LAYERS.values() for layer in layers}, (1, 16)):
        with torch.device("meta"):
            impl = like_vllm.Engine.impl(vllm.Backend, layer)

        def rows(heads: int, dim: int, count: int = 3) -> torch.Tensor:
            return torch.empty(count, heads, dim, dtype=torch.bfloat16, device="meta")

        width = layer.head_dim + layer.head_dim_v
        cache = rows(layer.kv_heads, width, PAGES * page_size).view(PAGES, page_size, layer.kv_heads, width)
        caches = cache[..., : layer.head_dim], cache[..., layer.head_dim :]
        int32 = functools.partial(torch.empty, dtype=torch.int32, device="meta")
        metadata = vllm.Metadata(3, torch.empty(3, dtype=torch.int64, device="meta"), Step(int32(3), int32(3, WIDTH)))
        new = rows(layer.kv_heads, layer.head_dim), rows(layer.kv_heads, layer.head_dim_v)
        yield functools.partial(metadata.write, *new, *caches)
        for step in (metadata.step, Step(int32(2), int32(2, WIDTH), int32(3), 2)):
            yield functools.partial(step.attend, rows(layer.heads, layer.head_dim), *caches, impl.options)


# --- What the layers of a step share ---


def test_layers_of_a_kind_share_a_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tileattn.api import shared_plans
    from tileattn.compat import engine_step

    calls = {"decode": 0, "decode_plan": 0}
    places: dict[str, Any] = {"decode": engine_step, "decode_plan": shared_plans}

    def counted(function: str) -> Any:
        real = getattr(places[function], function)

        def call(*arguments: Any, **named: Any) -> Any:
            calls[function] += 1
            assert function != "decode" or named["plan"] is not None
            return real(*arguments, **named)

        return call

    for function in calls:
        monkeypatch.setattr(places[function], function, counted(function))
    requests = Requests(
        [Layer(), Layer(window=9), Layer(), Layer(window=9), Layer(window=5)], PAGES, 16, torch.bfloat16, "cpu"
    )
    engine = LIKE[name].Engine(requests, PAGES, WIDTH)
    request = requests.draw(50)
    engine.step([(request, 20)])
    assert calls == {"decode": 5, "decode_plan": 3}
    engine.step([(request, 1)])
    assert calls == {"decode": 10, "decode_plan": 6}


@pytest.mark.parametrize("name", ["vllm"], indirect=True)
def test_vllm_reads_a_shared_cache_and_profiles(name: str) -> None:
    """A layer that reads another's cache writes nothing, nor does one without keys; no metadata, no work."""
    requests = Requests([Layer()], PAGES, 16, torch.bfloat16, "cpu")
    engine = like_vllm.Engine(requests, PAGES, WIDTH)
    impl, cache, request = engine.impls[0], engine.caches[0], requests.draw(40)
    engine.step([(request, 30)])
    metadata = engine.builder.build_for_cudagraph_capture(engine.common([(request, 1)]))
    q, k, v = requests.new([(request, 1)], 0)
    impl.forward(None, q, k, v, cache, metadata, output=torch.empty_like(q))
    before = cache.clone()
    shares = vllm.Impl(4, 16, 0.3, 2, kv_sharing_target_layer_name="model.layers.0.attn")
    for reader, new in ((shares, (k + 1, v + 1)), (impl, (None, None))):
        output = torch.full_like(q, torch.nan)
        assert reader.forward(None, q, *new, cache, metadata, output=output) is output
        requests.check([(request, 1)], 0, output)
        assert torch.equal(before.nan_to_num(7), cache.nan_to_num(7))
    output = torch.full_like(q, torch.nan)
    assert (impl.forward(None, q, k, v, torch.empty(0), None, output=output) == 0).all()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_vllms_batch_invariant_mode(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, stand_in in like_vllm.modules(batch_invariant).items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    register("vllm")
    requests = Requests([Layer()], PAGES, 16, torch.bfloat16, "cpu")
    engine = like_vllm.Engine(requests, PAGES, WIDTH)
    sys.modules.pop("tileattn.compat.vllm.engine")
    a, b = requests.draw(50), requests.draw(50)
    metadata = engine.builder.build(0, engine.common([(a, 9), (b, 1)]))
    assert metadata.step.splits == (tileattn.FixedSplit(1024) if batch_invariant else None)


# --- The interfaces ---


def parameters(function: Any) -> str:
    given = [str(each.replace(annotation=each.empty)) for each in inspect.signature(function).parameters.values()]
    return " ".join(each for each in given if each != "self")


@pytest.mark.parametrize("name", GROUPS, indirect=True)
def test_methods_take_what_the_engine_gives(name: str) -> None:
    for path, expected in LIKE[name].SIGNATURES.items():
        value: Any = vllm if name == "vllm" and "." in path else vllm.Backend if name == "vllm" else sglang.Backend
        for part in path.split("."):
            value = getattr(value, part)
        found = parameters(value)
        # A model's own arguments, such as sinks, follow.
        assert found == expected or (path == "Impl.__init__" and found == f"{expected} sinks=None"), path


def test_registering_again_changes_nothing(name: str) -> None:
    register(name)
    if name == "sglang":
        assert like_sglang.registry()[0] == ["triton", "tileattn"]
    else:
        assert like_vllm.AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"


@pytest.mark.parametrize("name", ["vllm"], indirect=True)
def test_another_plugin_keeps_vllms_custom_backend(name: str, caplog: pytest.LogCaptureFixture) -> None:
    like_vllm.register_backend(like_vllm.AttentionBackendEnum.CUSTOM, "other.Backend")
    register("vllm")
    assert like_vllm.AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    assert "is other.Backend, which another plug-in has registered" in caplog.text


@pytest.mark.parametrize("engine", GROUPS)
def test_without_the_engine_registering_says_what_is_missing(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(
        ImportError, match=rf"tileattn.compat.{engine} needs v?\w+ with the interface of version 0\.\d+"
    ):
        importlib.import_module(f"tileattn.compat.{engine}").register()


def test_an_older_vllm_starts_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    modules = like_vllm.modules()
    for module, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backend")
    register("vllm")
    assert "is not registered: tileattn.compat.vllm needs vLLM with the interface of version 0.33" in caplog.text
    assert not like_vllm.PATHS


# --- Refusals ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype auto, float16, bfloat16; not yet 'fp8_e4m3'"),
        ({"attn_type": like_vllm.AttentionType.ENCODER_DECODER}, "attn_type 'decoder'; not yet .*cross attention"),
    ],
)
def test_vllm_refusals(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        vllm.Impl(4, 16, 0.3, **arguments)


def test_vllm_refuses_steps_and_outputs_it_does_not_run() -> None:
    builder = vllm.MetadataBuilder(None, [], None, torch.device("cpu"))
    step = SimpleNamespace(causal=False, mm_req_doc_ranges=None, rswa_prefix_lens=None)
    with pytest.raises(NotImplementedError, match="causal attention only, got causal=False"):
        builder.build(0, step)
    x = torch.zeros(1, 4, 16)
    with pytest.raises(NotImplementedError, match="does not quantise its output"):
        vllm.Impl(4, 16, 0.3).forward(None, x, x, x, x, None, x, output_scale=x)
    assert not vllm.Backend.supports_head_size(512)
    assert not vllm.Backend.supports_compute_capability(like_vllm.DeviceCapability(7, 5))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_cache_dtype must be one of .*; not yet torch.float8_e4m3fn"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "cross attention"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
        ({"token_to_kv_pool": SimpleNamespace(translate_loc_from_full_to_swa=None)}, "disable_hybrid_swa_memory"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified memory pool"),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "dcp_size > 1"),
    ],
)
def test_sglang_refusals(changes: dict[str, Any], says: str) -> None:
    requests = Requests([Layer()], 3, 1, torch.bfloat16, "cpu")
    with pytest.raises(NotImplementedError, match=says):
        sglang.Backend(like_sglang.runner(requests, 3, 3, **changes))


@pytest.mark.parametrize(
    ("changes", "named", "says"),
    [
        ({"is_cross_attention": True}, {}, "is_cross_attention True"),
        ({"attn_type": like_sglang.AttentionType.ENCODER_ONLY}, {}, "attn_type 'encoder_only'"),
        ({"logit_capping_method": "sigmoid"}, {}, "logit_capping_method 'sigmoid'"),
        ({"xai_temperature_len": 512}, {}, "xai_temperature_len 512"),
        ({}, {"k_rope": torch.zeros(1), "sinks": None, "idx_q": None}, r"keyword arguments \['k_rope'\]"),
    ],
)
def test_sglang_refuses_layers_it_does_not_run(changes: dict[str, Any], named: dict[str, Any], says: str) -> None:
    layer = like_sglang.radix_attention(Layer(), 0, **changes)
    with pytest.raises(NotImplementedError, match=says):
        sglang.options_of(layer, named)


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND"])
def test_sglang_refuses_steps_it_does_not_run(mode: str) -> None:
    requests = Requests([Layer()], 3, 1, torch.bfloat16, "cpu")
    backend = sglang.Backend(like_sglang.runner(requests, 3, 3))
    with pytest.raises(NotImplementedError, match=mode):
        backend.init_forward_metadata(SimpleNamespace(forward_mode=like_sglang.ForwardMode[mode]))


@pytest.mark.parametrize("name", ["sglang"], indirect=True)
def test_an_idle_step(name: str) -> None:
    requests = Requests([Layer()], 3, 1, torch.bfloat16, "cpu")
    backend = like_sglang.registry()[1]["tileattn"](like_sglang.runner(requests, 3, 3))
    idle = SimpleNamespace(forward_mode=like_sglang.ForwardMode.IDLE)
    backend.init_forward_metadata(idle)
    empty = torch.empty(0, 64)
    assert backend.forward(empty, None, None, like_sglang.radix_attention(Layer(), 0), idle).shape == (0, 64)
