"""The scripts that fine-tune and measure models of transformers, run on tiny models in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from tests.tools import ROOT

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

import transformers

from tileattn.bench import environment
from tileattn.compat import transformers as adapter

TINY = ("--steps", "4", "--batch", "3", "--longest", "60", "--write", "9")
SHAPE = ("--hidden", "32", "--intermediate", "48", "--heads", "4", "--kv-heads", "2", "--layers", "1", "--seqlen", "24")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_packed  # type: ignore[import-not-found]

    return finetune_packed  # type: ignore[no-any-return]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import transformers_llama  # type: ignore[import-not-found]

    return transformers_llama  # type: ignore[no-any-return]


def run(module: ModuleType, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def said(result: Result) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


# --- Fine-tuning ---


def test_packed_trains_as_padded(example: ModuleType, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    result = run(example, *TINY, "--compare", "--out", str(picture))
    assert result.exit_code == 0, result.output
    losses = re.findall(
        r"(packed|padded): loss ([\d.]+) -> ([\d.]+); ([\d,]+) tokens computed for ([\d,]+)", said(result)
    )
    assert [way for way, *_ in losses] == ["packed", "padded"]
    (_, first, last, computed, real), padded = losses
    assert computed == real == padded[4]
    assert int(padded[3].replace(",", "")) > int(real.replace(",", ""))
    assert float(last) < float(first)
    apart = re.search(r"losses differ by at most ([\d.e+-]+)", result.output)
    assert apart is not None
    assert float(apart[1]) < 1e-4  # float32, and 4 steps
    assert example.PROMPT in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_both_ways_have_one_loss(example: ModuleType) -> None:
    """Both ways compute the model's own loss of the same passages."""
    adapter.register()
    text = example.TEXT.read_text()
    model, language = example.tiny(text)
    sequences = example.passages(text, language, example.Settings(longest=50))[:5]
    losses = []
    for collate, attention in example.WAYS.values():
        model.set_attn_implementation(attention)
        losses.append(model(**collate(sequences), use_cache=False).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_passages_are_the_text(example: ModuleType) -> None:
    text = example.TEXT.read_text()
    language = example.Language(lambda s: [ord(c) for c in s], lambda tokens: "".join(map(chr, tokens)))
    passages = [language.decode(tokens) for tokens in example.passages(text, language, example.Settings(longest=10**6))]
    counts = [passage.strip().count("\n") + 1 for passage in passages]
    assert set(counts) <= set(range(1, 16))
    assert len(set(counts)) > 9
    assert "".join("".join(passages).split()) == "".join(re.sub(r"^[IVXLC]+$", "", text, flags=re.M).split())


def test_a_model_from_a_folder(example: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = example.TEXT.read_text()
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(sorted(set(text)))}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    example.tiny(text)[0].save_pretrained(tmp_path / "model")
    result = run(example, *TINY, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "loss.svg"))
    assert result.exit_code == 0, result.output
    assert re.search(r"packed: loss 4\.\d+ -> 4\.\d+", said(result))
    assert example.PROMPT in result.output
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")


@pytest.mark.gpu
def test_fine_tuning_on_a_gpu(example: ModuleType, tmp_path: Path) -> None:
    result = run(example, *TINY, "--device", "cuda", "--compare", "--out", str(tmp_path / "loss.png"))
    assert result.exit_code == 0, result.output
    apart = re.search(r"losses differ by at most ([\d.e+-]+)", result.output)
    assert apart is not None
    assert float(apart[1]) < 0.05  # bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "loss.jpg"), "--out must end in .png, .svg, .pdf, got loss.jpg"),
        (("--model", "/nowhere"), "--model /nowhere is not a folder"),
        (("--rate", "nan"), "--rate must be a positive number, got nan"),
        (("--rate", "0"), "--rate must be a positive number, got 0.0"),
        (("--device", "cuda:99"), "--device must be one of this machine, such as cpu or cuda, got cuda:99: "),
        (("--out", f"{__file__}/loss.png"), "loss.png: its folder cannot be made: "),
    ],
)
def test_errors_of_the_example(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(example, *arguments)
    assert result.exit_code == 2
    assert message in said(result)


def test_what_it_writes_is_shown_before_the_picture_is_drawn(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(example, "draw", None)  # fails where it is called
    result = run(example, *TINY, "--steps", "1", "--out", str(tmp_path / "loss.png"))
    assert isinstance(result.exception, TypeError)
    assert example.PROMPT in result.output


# --- The benchmark ---


def test_layers_are_measured(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "llama.json"
    options = ("--device", "cpu", "--rounds", "1", "--calls", "2", "--attentions", "tileattn,sdpa,eager")
    result = run(script, *SHAPE, *options, "--json", str(out), "--commit", "abc")
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["gpu"] == environment.device_name(torch.device("cpu"))
    assert written["versions"].items() > environment.versions().items()
    assert written["versions"]["transformers"].startswith("5.")
    assert written["commit"] == "abc"
    assert written["settings"]["seqlen"] == 24
    rows = {(row["work"], row["attention"]): row for row in written["rows"]}
    assert list(rows) == [(work, name) for work in ("prefill", "training") for name in ("tileattn", "sdpa", "eager")]
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(24 / row["ms"] * 1e3)
        assert row["difference"] < 0.02  # bfloat16
    assert rows["prefill", "tileattn"]["difference"] == 0.0


def test_each_attention_is_the_one_that_it_says(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = script.Stack(script.Settings(1, 1, 8, 32, 48, 4, 2, device="cpu"))
    enabled = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *arguments, **named: (
            enabled.append(torch.backends.cuda.cudnn_sdp_enabled()) or real(*arguments, **named)
        ),
    )
    for attention, expected in (("tileattn", []), ("sdpa", [True]), ("fa2", [False])):
        enabled.clear()
        with stack.attending(attention):
            stack.prefill()
        assert enabled == expected, attention


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--attentions", "tileattn,fa9"), "'fa9' is not known; accepted: tileattn, fa2, cudnn, sdpa, eager"),
        (("--heads", "3"), "--hidden must be a multiple of twice --heads, and that of --kv-heads, got 32, 3, 2"),
        (("--json", __file__), f"--json {__file__} exists"),
    ],
)
def test_errors_of_the_benchmark(script: ModuleType, arguments: tuple[str, ...], message: str) -> None:
    result = run(script, *SHAPE, *arguments)
    assert result.exit_code == 2
    assert message in said(result)


@pytest.mark.gpu
def test_layers_are_measured_on_a_gpu(script: ModuleType) -> None:
    shape = ("--hidden", "256", "--intermediate", "256", "--heads", "2", "--kv-heads", "1", "--layers", "1")
    result = run(script, *shape, "--seqlen", "256", "--rounds", "1", "--calls", "2")
    assert result.exit_code == 0, result.output
    assert re.findall(r"(prefill|training) +(tileattn|fa2|cudnn)", said(result)) == [
        (work, name) for work in ("prefill", "training") for name in ("tileattn", "fa2", "cudnn")
    ]


def blocks_of_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/transformers.md").read_text(), re.DOTALL)


def test_the_pages_script_of_ranks_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank; tests/compat/transformers/test_shards.py has two."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    scope: dict[str, Any] = {}
    try:
        exec(blocks_of_page()[3], scope)
    finally:
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
            interface._global_mapping.pop(adapter.NAME, None)  # they have the plan
    assert scope["logits"].shape == (1, 100, 1000)


def test_the_pages_python_runs() -> None:
    *blocks, _ = blocks_of_page()
    assert len(blocks) == 3  # they continue each other
    scope: dict[str, Any] = {}
    for block, name in zip(blocks, ("tileattn", "tileattn", "paged|tileattn")):
        exec(block, scope)
        assert scope["model"].config._attn_implementation == name
    assert scope["logits"].isfinite().all()
    assert [len(request.generated_tokens) for request in scope["outputs"].values()] == [5, 5]


@pytest.mark.slow
def test_the_kernels_of_the_tests_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that the models need, with and without gradients."""
    pytest.importorskip("tilelang")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import precompile  # type: ignore[import-not-found]

    jobs = {str(job) for job in precompile.jobs_of(precompile.transformers_attempts(), "sm_90a")}
    for part in ("KeyPadding", "Documents", "ShiftedWindow", "DenseMask", "SlidingWindow", "SoftCap", "Bias", "sink"):
        assert any(part in job for job in jobs), part
    assert any("main of backward" in job and "dt0" in job for job in jobs)  # T5's bias has a gradient
