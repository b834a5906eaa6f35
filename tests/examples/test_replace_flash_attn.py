"""The example that replaces flash-attn trains, in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.tools import ROOT
from tileattn.compat import flash_attn as compat

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's modules, and a flash_attn that something else has imported, are not there before; nor after."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}
    yield
    compat.uninstall()
    sys.modules.pop("encoder", None)
    sys.modules.update(others)


def run(*arguments: str) -> tuple[float, float]:
    """The first and the last loss."""
    import replace_flash_attn as example  # type: ignore[import-not-found]

    app = typer.Typer()
    app.command()(example.main)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    assert "flash_attn was tileattn.compat.flash_attn, standing in for 2.8" in result.output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.output)]
    return losses[0], losses[-1]


def test_it_learns() -> None:
    first, last = run("--steps", "100", "--sequences", "24")
    assert last < first - 0.15


@pytest.mark.gpu
def test_it_learns_on_a_gpu() -> None:
    first, last = run("--device", "cuda", "--steps", "100")
    assert last < first - 0.15


def test_the_existing_code_computes_attention_within_sequences() -> None:
    """The encoder beside one in padded batches, by PyTorch's attention."""
    compat.install()
    import encoder  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = encoder.Encoder(12, 2)
    tokens, mask = torch.randint(12, (3, 9)), torch.arange(9) < torch.tensor([[9], [4], [7]])
    x = model.embed(tokens)
    for layer in model.layers:
        q, k, v = layer.qkv(layer.norm(x)).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        x = x + layer.out(o.transpose(1, 2).flatten(-2))
        x = x + layer.mlp(x)
    torch.testing.assert_close(model(tokens, mask)[mask], model.head(x)[mask])


def test_the_pages_python_runs() -> None:
    page = (EXAMPLES.parent / "docs" / "compat.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, {})
