"""`import flash_attn` after `tileattn.compat.flash_attn.install()`, and after `uninstall()`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from tileattn.compat import flash_attn as compat

MODULES = (
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers",
    "flash_attn.layers.rotary",
    "flash_attn.modules",
    "flash_attn.modules.mha",
    "flash_attn.ops",
    "flash_attn.ops.triton",
    "flash_attn.ops.triton.rotary",
)


def imported() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] == "flash_attn")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Another flash_attn, which a GPU machine may have, is out of the way meanwhile."""
    others = {name: sys.modules.pop(name) for name in imported()}
    yield
    compat.uninstall()
    for name in imported():
        del sys.modules[name]
    sys.modules.update(others)


@pytest.fixture
def installed() -> None:
    compat.install()


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A flash-attn that is installed, but not imported: package and metadata."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text('__version__ = "2.7.0"\n')
    (tmp_path / "flash_attn" / "cute.py").write_text("")
    metadata = tmp_path / "flash_attn-2.7.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.7.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_imports_give_tileattns() -> None:
    import flash_attn
    import flash_attn.bert_padding
    import flash_attn.flash_attn_interface
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn is compat
    assert flash_attn_func is compat.flash_attn_func
    assert flash_attn_varlen_func is compat.flash_attn_varlen_func
    assert (pad_input, unpad_input) == (compat.bert_padding.pad_input, compat.bert_padding.unpad_input)
    assert flash_attn.bert_padding is sys.modules["flash_attn.bert_padding"] is compat.bert_padding
    assert all(callable(getattr(flash_attn, name)) for name in compat.__all__ if name.startswith("flash_attn"))


@pytest.mark.usefixtures("installed")
def test_whoever_asks_whether_it_is_there_is_answered() -> None:
    """Packages ask in three ways."""
    assert all(importlib.util.find_spec(name) is not None for name in MODULES)
    assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == compat.__version__
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert Version("2.8") <= Version(compat.__version__) < Version("2.9")
    assert re.fullmatch(r"\d+\.\d+\.\d+", compat.__version__)


@pytest.mark.usefixtures("installed")
def test_other_packages_metadata_is_as_it_was() -> None:
    assert importlib.metadata.version("pytest") == pytest.__version__
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn_4_that_is_not_there")
    assert "pytest" in importlib.metadata.packages_distributions()
    importlib.metadata.entry_points(group="console_scripts")


def test_a_second_call_does_nothing() -> None:
    before = list(sys.meta_path)
    compat.install()
    once = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == once
    assert len(once) == len(before) + 1
    assert imported() == sorted(MODULES)


def test_uninstalling_undoes_it() -> None:
    before = list(sys.meta_path), imported()
    compat.install()
    importlib.import_module("flash_attn")
    compat.uninstall()
    assert (list(sys.meta_path), imported()) == before
    compat.uninstall()
    assert (list(sys.meta_path), imported()) == before


def test_one_that_is_imported_is_refused(on_disk: Path) -> None:
    other = importlib.import_module("flash_attn")
    with pytest.raises(RuntimeError, match=re.escape(f"already imported, from {on_disk}")):
        compat.install()
    assert sys.modules["flash_attn"] is other
    assert importlib.metadata.version("flash_attn") == "2.7.0"
    compat.uninstall()
    assert sys.modules["flash_attn"] is other


def test_one_on_disk_is_hidden_meanwhile(on_disk: Path) -> None:
    compat.install()
    assert importlib.import_module("flash_attn") is compat
    assert importlib.metadata.version("flash_attn") == compat.__version__
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.cute")
    compat.uninstall()
    assert importlib.import_module("flash_attn").__version__ == "2.7.0"
    assert importlib.metadata.version("flash_attn") == "2.7.0"
    assert importlib.import_module("flash_attn.cute").__file__ == str(on_disk / "flash_attn" / "cute.py")


IN_TRANSFORMERS = """
import tileattn.compat.flash_attn as compat
compat.install()
import torch, transformers
from transformers.utils import import_utils

# As on a machine with a GPU.
import_utils.is_torch_cuda_available = lambda: True
transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *arguments, **options: True
assert import_utils.is_flash_attn_2_available()

calls, attend = [], compat.flash_attn_interface.attend
compat.flash_attn_interface.attend = lambda *arguments: calls.append(len(arguments)) or attend(*arguments)
sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
config = transformers.MistralConfig(**sizes, num_hidden_layers=2, head_dim=20, sliding_window=10)
torch.manual_seed(0)
model = transformers.MistralForCausalLM(config).bfloat16()
ids, mask = torch.randint(50, (2, 40)), torch.ones(2, 40, dtype=torch.long)
mask[0, :13] = 0
logits = []
for name in ("eager", "flash_attention_2"):
    model.set_attn_implementation(name)
    logits.append(model(ids, attention_mask=mask).logits[mask.bool()])
torch.testing.assert_close(*logits, rtol=0.02, atol=0.02)
assert calls == [5, 5], calls  # packed, in each layer
"""


@pytest.mark.slow
def test_transformers_flash_attention_2_runs_on_it() -> None:
    """Runs in a new process, because transformers asks once, when it is imported."""
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", IN_TRANSFORMERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
