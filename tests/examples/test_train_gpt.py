"""The example trains: a tiny model, in this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from tests.tools import ROOT
from tileattn.bench import environment
from tileattn.nn.factory import CLASSES
from tileattn.testing import assert_accurate

EXAMPLES = ROOT / "examples"
TINY = ("--layers", "1", "--heads", "2", "--dim", "32", "--seqlen", "32", "--batch", "4", "--steps", "30")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_gpt  # type: ignore[import-not-found]

    return train_gpt  # type: ignore[no-any-return]


def run(example: ModuleType, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, [*TINY, *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_it_learns_as_with_pytorchs_attention(example: ModuleType, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    kept = tmp_path / "losses.json"
    result = run(example, "--compare", "--out", str(picture), "--losses", str(kept))
    assert result.exit_code == 0, result.output
    losses = re.findall(r"(tileattn|sdpa): loss ([\d.]+) -> ([\d.]+), on held-out text ([\d.]+)", result.output)
    assert [name for name, *_ in losses] == ["tileattn", "sdpa"]
    for _, first, last, held_out in losses:
        assert float(last) < float(first) - 0.5
        assert float(held_out) < float(first) - 0.5
    apart = re.search(r"losses differ by at most ([\d.e+-]+)", result.output)
    assert apart is not None
    assert float(apart[1]) < 1e-3  # float32, and 30 steps over which roundings grow
    assert example.PROMPT in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    curves = [example.Losses(**row) for row in json.loads(kept.read_text())["rows"]]
    assert [(each.attention, len(each.losses)) for each in curves] == [("tileattn", 30), ("sdpa", 30)]
    kept_figures = [[f"{x:.3f}" for x in (*each.losses[::29], each.held_out)] for each in curves]
    assert kept_figures == [figures for _, *figures in losses]


def test_every_backend_of_this_machine_computes_the_same_loss(example: ModuleType) -> None:
    text = example.Text(example.TEXT.read_text())
    settings = example.Settings(seqlen=48, batch=2, layers=1, heads=2, dim=32)
    tokens, targets = text.batch(settings, torch.Generator().manual_seed(0))
    losses = []
    for backend in ("tileattn", "torch", "sdpa"):
        training = example.Training(len(text.characters), settings, example.Backend(backend))
        losses.append(training.loss(training.model, tokens, targets).item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_position_sees_nothing_after_it(example: ModuleType) -> None:
    text = example.Text(example.TEXT.read_text())
    settings = example.Settings(seqlen=48, layers=2, heads=2, dim=32)
    model = example.Training(len(text.characters), settings, example.Backend.tileattn).model
    tokens = text.train[None, :48]
    changed = torch.cat((tokens[:, :30], text.train[None, 100:118]), dim=1)
    logits, other = model(tokens), model(changed)
    torch.testing.assert_close(logits[:, :30], other[:, :30])
    assert not torch.allclose(logits[:, 30:], other[:, 30:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_over_a_cache_equal_the_whole(example: ModuleType, dtype: torch.dtype) -> None:
    """A prompt, then tokens one by one, which are rotated by their positions."""
    check_cached(example, dtype, "cpu")


@pytest.mark.gpu
def test_steps_over_a_cache_on_a_gpu(example: ModuleType) -> None:
    check_cached(example, torch.bfloat16, "cuda")


def check_cached(example: ModuleType, dtype: torch.dtype, device: str) -> None:
    """By the rule; the same model that computes with PyTorch's attention is eager, and in float64 the oracle."""
    text = example.Text(example.TEXT.read_text())
    settings = example.Settings(seqlen=48, layers=3, heads=2, dim=64)
    model, plain = (
        example.Training(len(text.characters), settings, example.Backend(name)).model.to(device, dtype)
        for name in ("tileattn", "sdpa")
    )
    tokens = torch.stack((text.train[:31], text.train[100:131])).to(device)
    cache = model.new_cache(2, 31)
    logits = torch.cat([model.step(part, cache) for part in tokens.split([19, *[1] * 9, 3], dim=1)], dim=1)
    with torch.no_grad():
        eager = plain(tokens)
        oracle = plain.double()(tokens)
    assert_accurate("logits", logits, oracle, [eager])


def test_generation_goes_beyond_the_trained_length(example: ModuleType) -> None:
    """Each token sees as many as in training, so the first one of a long text changes nothing far behind it."""
    text = example.Text(example.TEXT.read_text())
    settings = example.Settings(seqlen=8, layers=1, heads=2, dim=32)
    model = example.Training(len(text.characters), settings, example.Backend.tileattn).model
    tokens = text.train[None, :5].repeat(2, 1)
    written = model.continued(tokens, 20, torch.Generator().manual_seed(0))
    assert written.shape == (2, 25)
    assert torch.equal(written[:, :5], tokens)
    assert torch.equal(model.continued(tokens, 20, torch.Generator().manual_seed(0)), written)
    changed = written[:1].clone()
    changed[0, 0] = (changed[0, 0] + 1) % len(text.characters)
    logits, other = (model.step(each, model.new_cache(1, 25)) for each in (written[:1], changed))
    assert not torch.allclose(logits[:, 7], other[:, 7])
    torch.testing.assert_close(logits[:, 8:], other[:, 8:])


@pytest.mark.parametrize("name", ["loss", "loss.svg"])
def test_the_picture_is_where_it_says(example: ModuleType, tmp_path: Path, name: str) -> None:
    result = run(example, "--steps", "2", "--out", str(tmp_path / name))
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.iterdir()
    assert written.name == name + ".png" * (name == "loss")
    assert f"The losses are drawn in {written}." in result.output.replace("\n", "")


def test_speed_is_shown_beside_pytorchs(example: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    result = run(example, "--benchmark", "--dtype", "bfloat16", "--json", str(out), "--commit", "abc")
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["gpu"] == environment.device_name(torch.device("cpu"))
    assert written["versions"] == environment.versions()
    assert written["commit"] == "abc"
    assert written["settings"]["seqlen"] == 32
    assert [row["attention"] for row in written["rows"]] == ["tileattn", "sdpa"]
    for row in written["rows"]:
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["ms_per_step"] * 1e3)
        assert f"{row['tokens_per_s']:,.0f}" in result.output
    speeds = dict(re.findall(r"(tileattn|sdpa)\D+[\d.]+\D+([\d,]+)", result.output.partition("tokens/s")[2]))
    assert speeds.keys() == {"tileattn", "sdpa"}
    assert "1.00x" in result.output


GPU = ("--device", "cuda", "--dim", "128")


@pytest.mark.gpu
def test_on_a_gpu(example: ModuleType, tmp_path: Path) -> None:
    result = run(example, *GPU, "--backend", "tilelang", "--compare", "--out", str(tmp_path / "loss.png"))
    assert result.exit_code == 0, result.output
    apart = re.search(r"losses differ by at most ([\d.e+-]+)", result.output)
    assert apart is not None
    assert float(apart[1]) < 0.05  # bfloat16


@pytest.mark.gpu
def test_speed_on_a_gpu(example: ModuleType) -> None:
    result = run(example, *GPU, "--benchmark")
    assert result.exit_code == 0, result.output
    assert re.findall(r"(tileattn|fa2|cudnn)\D+[\d.]+\D+[\d,]+", result.output.partition("tokens/s")[2]) == [
        "tileattn",
        "fa2",
        "cudnn",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dim", "30"), "--dim must be a multiple of twice --heads, got 30 and 2"),
        (("--seqlen", "10000"), "--seqlen must be less than 9556, got 10000"),
        (("--compare", "--backend", "sdpa"), "--compare needs another --backend than sdpa"),
        (("--out", "loss.jpg"), "--out must end in .png, .svg, .pdf, got loss.jpg"),
        (("--json", "speed.json"), "--json is for the speeds of --benchmark"),
        (("--benchmark", "--json", __file__), f"--json {__file__} exists"),
        (("--losses", __file__), f"--losses {__file__} exists"),
        (("--benchmark", "--losses", "losses.json"), "--losses is for training"),
        (("--benchmark", "--device", "cuda", "--dtype", "float32"), "needs --dtype bfloat16"),
        (("--benchmark", "--compare"), "--compare trains and --benchmark only measures: give one of the two"),
        (("--rate", "nan"), "--rate must be a positive number, got nan"),
        (("--device", "foo"), "--device must be one of this machine, such as cpu or cuda, got foo: "),
        (("--device", "cuda:99"), "--device must be one of this machine, such as cpu or cuda, got cuda:99: "),
        (("--backend", "tilelang"), "--backend tilelang does not run here: "),
        (("--out", f"{__file__}/loss.png"), "loss.png: its folder cannot be made: "),
        (("--benchmark", "--json", f"{__file__}/speed.json"), "speed.json: its folder cannot be made: "),
    ],
)
def test_errors(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(example, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_nothing_trains_for_a_picture_that_cannot_be_drawn(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(example)
    assert result.exit_code == 2
    assert "the picture needs matplotlib" in result.output


def test_what_it_writes_is_shown_before_the_picture_is_drawn(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(example, "draw", None)  # fails where it is called
    result = run(example, "--steps", "1", "--out", str(tmp_path / "new" / "loss.png"))
    assert isinstance(result.exception, TypeError)
    assert example.PROMPT in " ".join(result.output.split())  # which may be wrapped
    assert (tmp_path / "new").is_dir()


def test_the_text_is_what_its_page_says(example: ModuleType) -> None:
    characters = example.TEXT.read_text()
    page = (EXAMPLES / "data" / "README.md").read_text()
    assert f"{len(characters):,}\ncharacters, {len(set(characters))} different ones" in page
    headings = re.findall(r"^([IVXLC]+)$", characters, re.M)
    assert len(headings) == len(set(headings)) == 154
    lines = [len(part.strip().splitlines()) for part in re.split(r"^[IVXLC]+$", characters, flags=re.M)[1:]]
    assert [(i + 1, count) for i, count in enumerate(lines) if count != 14] == [(99, 15), (126, 12)]


def test_the_pages_python_runs() -> None:
    page = (EXAMPLES.parent / "docs" / "training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_pages_modules_are_those_there_are() -> None:
    page = (EXAMPLES.parent / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.M)
    named = {name: cls for cls, names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {name: cls.__name__ for name, cls in CLASSES.items()}
    for cls, names, own in rows:
        (parameters,) = {frozenset(signature(CLASSES[name]).parameters) for name in re.findall(r"`(\w+)`", names)}
        assert set(re.findall(r"`(\w+)`", own)) <= parameters, cls


# --- Several ranks ---


@pytest.mark.slow  # three processes import everything
@pytest.mark.parametrize("option", [(), ("--fsdp",)], ids=["replicated", "fsdp"])
def test_two_ranks_learn_as_one(option: tuple[str, ...], tmp_path: Path) -> None:
    """An odd length, so that shards differ."""
    kept = tmp_path / "losses.json"
    script = (str(EXAMPLES / "train_gpt.py"), "--context-parallel", "2", "--compare", *TINY, "--seqlen", "33", *option)
    files = ("--out", str(tmp_path / "loss.png"), "--losses", str(kept))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *script, *files], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    several, alone = json.loads(kept.read_text())["rows"]
    assert [each["attention"] for each in (several, alone)] == ["tileattn on 2 ranks", "tileattn"]
    assert len(several["losses"]) == 30
    assert several["losses"][-1] < several["losses"][0] - 0.5
    assert max(abs(a - b) for a, b in zip(several["losses"], alone["losses"])) < 1e-4
    assert abs(several["held_out"] - alone["held_out"]) < 1e-4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--context-parallel", "2"), "--context-parallel 2 needs 2 processes, got 1: torchrun --nproc-per-node 2"),
        (("--fsdp",), "--fsdp shards over the ranks of --context-parallel: give it 2 or more"),
        (("--context-parallel", "2", "--backend", "sdpa"), "--context-parallel goes with tileattn's backends"),
        (("--context-parallel", "2", "--compile"), "without --benchmark and --compile"),
        (
            ("--context-parallel", "2", "--device", "cuda:1"),
            "--context-parallel goes with --device cpu or cuda, got cuda",
        ),
    ],
)
def test_wrong_options_of_several_ranks(
    example: ModuleType, tmp_path: Path, options: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = run(example, *options, "--out", str(tmp_path / "x.png"))
    assert result.exit_code == 2
    assert text in re.sub(r"[│\s]+", " ", result.output)
