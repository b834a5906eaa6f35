"""The command starts without torch; every other process has all of tileattn right after the import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import tileattn
from tests import fresh_process
from tileattn import _is_command
from tileattn.cli.group import Commands

# All help pages in one process, so that the test pays for Python's start once; and what a page takes by itself is asked
# of `bench`, the longest. Time is the processor's, which other processes do not change. `runpy` is what `python -m`
# does; sys.argv and orig_argv are then those of the command.
HELP = """
import json, runpy, sys, time
pages, texts = json.loads(sys.argv[1]), []
sys.orig_argv = ["python", "-m", "tileattn", "bench", "--help"]
for page in pages:
    sys.argv = ["-m"]
    import tileattn
    sys.argv = ["tileattn", *page.split(), "--help"]
    try:
        runpy.run_module("tileattn", run_name="__main__")
    except SystemExit as end:
        assert not end.code, page
    if page == "bench":
        seconds = time.process_time()
slow = {"torch", "numpy", "tilelang", "triton", "matplotlib", "transformers"} & set(sys.modules)
began = time.process_time()
import torch
print(json.dumps({"seconds": seconds, "torch": time.process_time() - began, "slow": sorted(slow)}))
"""


def test_help_needs_no_torch_and_less_than_half_of_its_time() -> None:
    """On a fast machine that is half a second; a quarter of torch's time was measured."""
    pages = ["bench", "", "info", "memory", "ladder", "plot", "warmup", "tune", "demo", "viz"]
    pages += [f"viz {name}" for name in ("tiles", "weights", "softmax", "plan", "lengths", "dashboard")]
    done = subprocess.run([sys.executable, "-c", HELP, json.dumps(pages)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert done.stdout.count("Usage: ") == len(pages)
    assert measured["slow"] == []
    assert measured["seconds"] < measured["torch"] / 2


def test_python_m_is_seen_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tileattn", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Usage: " in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tileattn.cli.app" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("argv", "orig_argv", "command"),
    [
        (["/home/a/.venv/bin/tileattn"], [], True),
        ([r"C:\\venv\\Scripts\\tileattn.exe"], [], True),
        (["-m"], ["python", "-X", "dev", "-m", "tileattn", "bench"], True),
        (["-m"], ["python", "-m", "train", "--attention", "tileattn"], False),
        (["-m"], ["python", "-mtileattn"], False),
        (["train.py", "tileattn"], ["python", "train.py", "tileattn"], False),
        (["tileattn/train.py"], [], False),
        ([""], [], False),
        ([], [], False),
    ],
)
def test_only_the_command_is_the_command(
    argv: list[str], orig_argv: list[str], command: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert _is_command() is command


def test_the_commands_process_has_the_same_names_when_they_are_used() -> None:
    where = "print(json.dumps({n: [v.__module__, v.__qualname__] for n in t.__all__ for v in [getattr(t, n)]}))"
    lazy = (
        "import json, sys; sys.argv = ['tileattn']; import tileattn as t\n"
        "assert 'attention' not in vars(t)\n"
        f"{where}\nassert set(t.__all__) <= set(vars(t)) and t.math.tanh"
    )
    expected = {
        name: [each.__module__, each.__qualname__] for name in tileattn.__all__ for each in [vars(tileattn)[name]]
    }
    assert json.loads(fresh_process.run(lazy)) == expected


def test_pytorch_knows_tileattn_right_after_the_import() -> None:
    """Its name among the implementations of flash attention, and the operators that an exported program asks for."""
    code = (
        "import tileattn\n"
        "from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl\n"
        "import torch; assert torch.ops.tileattn.forward.default\n"
        "activate_flash_attention_impl('tileattn'); print(current_flash_attention_impl())"
    )
    assert fresh_process.run(code).strip() == "tileattn"


def test_an_eager_call_looks_nothing_up() -> None:
    """The names are the package's own attributes: `__getattr__` is asked for none of them."""
    missing = [name for name in tileattn.__all__ if name not in vars(tileattn)]
    assert missing == []
    assert vars(tileattn)["attention"] is tileattn.api.attention.attention
    assert torch.is_tensor(tileattn.attention(*[torch.ones(1, 3, 1, 8)] * 3))


def test_commands_can_be_called_from_code() -> None:
    """Without standalone mode errors are raised, as click's own commands do."""
    with pytest.raises(Exception, match="nothing"):
        Commands(name="tileattn", commands={}).main(["nothing"], standalone_mode=False)
