"""`tileattn warmup --model` compiles the kernels that a model asks for through compat.transformers, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")
pytest.importorskip("tilelang")

import transformers

from tests.tools import ROOT
from tests.tools.transformers import calls as recorder
from tests.tools.transformers.batching import BLOCK, generate_batch
from tests.tools.transformers.models import GPU, MODELS, VOCABULARY, Model, decoder, with_attention
from tileattn.bench.model_config import LayerKind, read_config
from tileattn.cli import choices
from tileattn.kernels.tilelang.backward.library import BackwardJob
from tileattn.kernels.tilelang.build.batch import AnyJob
from tileattn.kernels.tilelang.decode.library import DecodeJob
from tileattn.kernels.tilelang.forward.library import Job

ARCH, SHORT, MANY = "sm_90a", 29, 530  # tokens: more than the models' window; and enough for decode kernels
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 32, "q_lora_rank": None}
DEEPSEEK = {"first_k_dense_replace": 2, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}  # fmt: skip
KINDS = {name: MODELS[name] for name in ("llama", "gemma2", "gpt-oss")} | {
    "deepseek": Model("DeepseekV3ForCausalLM", "DeepseekV3Config", decoder, settings={**LATENT, **DEEPSEEK}),
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    transformers.AttentionInterface._global_mapping.pop("tileattn", None)
    transformers.AttentionMaskInterface._global_mapping.pop("tileattn", None)


def built(name: str, folder: Path) -> nn.Module:
    """A tiny model, whose configuration lies in the folder."""
    model = KINDS[name].build(GPU).to(torch.bfloat16)
    model.config.save_pretrained(folder)
    return with_attention(model, "tileattn")


def asked(make: Callable[[], Any]) -> dict[str, AnyJob]:
    """The kernels that a GPU would be asked for, by key."""
    import precompile  # type: ignore[import-not-found]

    with recorder.recording() as recorded:
        make()
    assert recorded
    return {job.key: job for job in precompile.jobs_of(recorded, ARCH)}


def warmed(folder: Path, direction: str = "fwd", **options: Any) -> dict[str, AnyJob]:
    given = choices.WarmupOptions(model=folder, direction=direction, arch=ARCH, dtype="bf16", **options)
    return {job.key: job for job in choices.choose_kernels(given)[0]}


def config(folder: Path, **entries: Any) -> Path:
    """A file of a model that transformers may not know."""
    file = folder / "config.json"
    file.write_text(json.dumps(entries))
    return file


def batches(tokens: int, padded: tuple[bool, ...] = (False, True)) -> Iterator[dict[str, Any]]:
    """Inputs of one and of two sequences, with and without padding."""
    for batch in (1, 2):
        ids = torch.arange(batch * tokens).reshape(batch, tokens) % (VOCABULARY - 3) + 3
        mask = torch.ones_like(ids)
        if False in padded:
            yield {"input_ids": ids, "attention_mask": mask}
        if True in padded:
            mask = mask.clone()
            mask[0, :5] = 0
            yield {"input_ids": ids, "attention_mask": mask}


def forward_facts(jobs: dict[str, AnyJob]) -> set[Any]:
    """The calls of the forward kernels, without what no kernel depends on."""
    found = set()
    for job in jobs.values():
        if isinstance(job, Job):
            call = job.call
            found.add(
                (call.dtype, call.head_dim, call.head_dim_v, call.variant, call.sink, call.return_lse, call.packed)
            )
    return found


def missing(wanted: dict[str, AnyJob], warm: dict[str, AnyJob]) -> list[str]:
    return [str(job) for key, job in wanted.items() if key not in warm]


@pytest.mark.parametrize("name", list(KINDS))
def test_prefill_asks_for_no_other_kernel(name: str, tmp_path: Path) -> None:
    model = built(name, tmp_path)

    @torch.no_grad()
    def run() -> None:
        for tokens in (7, SHORT):  # within the window, and beyond it
            for inputs in batches(tokens):
                model(**inputs, use_cache=False)

    wanted, warm = asked(run), warmed(tmp_path)
    assert missing(wanted, warm) == []
    assert forward_facts(wanted) == forward_facts(warm)


@pytest.mark.parametrize("name", list(KINDS))
def test_training_asks_for_no_other_kernel(name: str, tmp_path: Path) -> None:
    model = built(name, tmp_path)

    def run() -> None:
        for tokens in (7, SHORT):
            for inputs in batches(tokens):
                model(**inputs, use_cache=False).logits.sum().backward()

    wanted, warm = asked(run), warmed(tmp_path, "fwdbwd")
    assert missing(wanted, warm) == []
    assert forward_facts(wanted) == forward_facts(warm)
    of_main = [
        {job.call.forward.variant for job in jobs.values() if isinstance(job, BackwardJob) and job.kernel == "main"}
        for jobs in (wanted, warm)
    ]
    assert of_main[0] == of_main[1] - {""}  # "": of keys that all queries see, for longer texts


@pytest.mark.parametrize("inputs", ["packed", "documents"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_texts_ask_for_no_other_kernel(name: str, inputs: str, tmp_path: Path) -> None:
    model = built(name, tmp_path)

    def run() -> None:
        for lengths in ((3, 4), (17, 12)):
            for batch in (1, 2) if inputs == "documents" else (1,):
                places = torch.cat([torch.arange(length) for length in lengths]).expand(batch, -1)
                given: dict[str, Any] = {"input_ids": places % 50 + 3, "position_ids": places}
                if inputs == "packed":
                    ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
                    given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
                    given |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
                model(**given, use_cache=False).logits.sum().backward()

    wanted, warm = asked(run), warmed(tmp_path, "fwdbwd", inputs=inputs)
    assert missing(wanted, warm) == []
    assert forward_facts(wanted) == forward_facts(warm)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", list(KINDS))
def test_generation_asks_for_no_other_kernel(name: str, cache: str, tmp_path: Path) -> None:
    model = built(name, tmp_path)
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}

    def run() -> None:
        for tokens in (7, SHORT, MANY):
            for inputs in batches(tokens):
                model.generate(**inputs, **options)

    wanted, warm = asked(run), warmed(tmp_path, "decode")
    assert missing(wanted, warmed(tmp_path) | warm) == []
    steps = {job.call for job in wanted.values() if isinstance(job, DecodeJob)}
    assert steps
    assert steps <= {job.call for job in warm.values() if isinstance(job, DecodeJob)}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continuous_batching_asks_for_no_other_kernel(name: str, tmp_path: Path) -> None:
    kind = MODELS[name]
    model = kind.build(GPU).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    wanted = asked(lambda: generate_batch(model, "paged|tileattn"))
    assert missing(wanted, warmed(tmp_path, "decode", page_size=str(BLOCK))) == []
    assert any(isinstance(job, DecodeJob) for job in wanted.values()) == (name == "llama")


def test_heads_that_share_more_than_a_tile_have_no_decode_kernels(tmp_path: Path) -> None:
    many = config(tmp_path, num_attention_heads=71, num_key_value_heads=1, head_dim=64)
    jobs = warmed(many, "decode")
    assert jobs
    assert all(isinstance(job, Job) for job in jobs.values())


# --- What is read ---


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("entries", "kinds"),
    [
        (HEADS, [LayerKind(128, 128, 4)]),
        ({**HEADS, "head_dim": 64}, [LayerKind(64, 64, 4)]),
        ({**HEADS, "num_key_value_heads": None}, [LayerKind(128, 128, 1)]),
        ({**HEADS, "sliding_window": 4096}, [LayerKind(128, 128, 4, window=True)]),
        ({**HEADS, "sliding_window": 4096, "use_sliding_window": False}, [LayerKind(128, 128, 4)]),
        ({**HEADS, "attn_logit_softcapping": 50.0}, [LayerKind(128, 128, 4, cap=True)]),
        ({**HEADS, "attn_logit_soft_cap": 30.0}, [LayerKind(128, 128, 4, cap=True)]),
        ({**HEADS, "query_pre_attn_scalar": 256}, [LayerKind(128, 128, 4)]),
        (
            {**HEADS, "layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            [LayerKind(128, 128, 4, window=True), LayerKind(128, 128, 4)],
        ),
        ({**HEADS, **LATENT, "head_dim": 64}, [LayerKind(192, 128, 4)]),
        ({"text_config": HEADS, "vision_config": HEADS}, [LayerKind(128, 128, 4)]),
    ],
)
def test_what_is_read_of_a_file(entries: dict[str, Any], kinds: list[LayerKind], tmp_path: Path) -> None:
    """Of models that transformers does not know: the file alone decides."""
    given = {"model_type": "of_nobody", **entries}
    assert list(read_config(config(tmp_path, **given)).kinds) == kinds
    assert list(read_config(tmp_path).kinds) == kinds


def test_transformers_fills_in_what_a_file_leaves_out(tmp_path: Path) -> None:
    model = read_config(config(tmp_path, model_type="gemma2", torch_dtype="bfloat16"))
    assert set(model.kinds) == {LayerKind(256, 256, 2, True, True), LayerKind(256, 256, 2, False, True)}
    assert (model.name, model.dtype) == ("gemma2", "bf16")


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    layers = {**HEADS, "layer_types": ["linear_attention", "full_attention"]}
    model = read_config(config(tmp_path, text_config=layers, vision_config=HEADS, dtype="float16"))
    assert model.left_out == ("linear_attention", "vision_config")
    assert model.dtype == "fp16"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": 64}, "has no num_attention_heads, and so no attention"),
        ({"num_attention_heads": 3, "hidden_size": 64}, "neither head_dim nor a hidden_size that its 3 heads divide"),
        ({**HEADS, "num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({**HEADS, "head_dim": "64"}, "head_dim must be a positive integer, got '64'"),
        ({**HEADS, "dtype": "int8"}, "the dtype 'int8' has no kernels; give --dtype bf16 or fp16"),
        ({**HEADS, "is_encoder_decoder": True}, "is of an encoder-decoder model; only causal decoders are read"),
        ({**HEADS, "architectures": ["BertForMaskedLM"]}, "is of BertForMaskedLM; only causal decoders are read"),
        ({**HEADS, "layer_types": ["mamba"]}, "has layers of the types mamba, and none of full_attention"),
        ({"model_type": "llama", **HEADS, "rms_norm_eps": "x"}, "is refused by transformers' LlamaConfig"),
        (
            {**HEADS, "architectures": "LlamaForCausalLM"},
            "architectures must be a list of names, got 'LlamaForCausalLM'",
        ),
        ({"text_config": [1]}, "text_config must be an object, got [1]"),
        ({**HEADS, "use_bidirectional_attention": "all"}, "is of a model with use_bidirectional_attention"),
        ({**HEADS, "attn_logit_softcapping": float("nan")}, "attn_logit_softcapping must be a positive number or null"),
        ({**HEADS, "attn_logit_soft_cap": "x"}, "attn_logit_soft_cap must be a positive number or null, got 'x'"),
        ({**HEADS, "num_key_value_heads": [4, 8]}, "num_key_value_heads must be a positive integer, got [4, 8]"),
        ({**HEADS, "num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
        ({**HEADS, "head_dim": float("nan")}, "head_dim must be a positive integer, got nan"),
    ],
)
def test_a_bad_configuration_is_one_error(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        read_config(config(tmp_path, **entries))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bad_file_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"does not exist; needed is a config\.json"):
        read_config(tmp_path)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ("", "is not JSON"),
        ("[" * 99999, "is not JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(file)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        read_config(file)
