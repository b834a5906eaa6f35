"""The serving example: continuous batching in its three ways, every request compared with computing it alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import tileattn
from tests.tools import ROOT
from tests.tools.engines import like_sglang, like_vllm

EXAMPLES = ROOT / "examples"
SMALL = ("--requests", "12", "--slots", "4", "--prompt", "60", "--shared", "33", "--new", "12", "--chunk", "30")
TINY = ("--dim", "64", "--heads", "4", "--kv-heads", "2", "--page-size", "16", "--seed", "5")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import serve_tiny  # type: ignore[import-not-found]

    return serve_tiny  # type: ignore[no-any-return]


def run(example: ModuleType, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, [*SMALL, *TINY, *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def numbers(output: str, pattern: str) -> list[int]:
    found = re.search(pattern, output)
    assert found is not None, output
    return [int(each.replace(",", "")) for each in found.groups()]


def check(output: str) -> None:
    """Prompts and single tokens were mixed, prefixes shared, and all tokens are right."""
    assert min(numbers(output, r"steps\D+([\d,]+) with prompts, ([\d,]+) decoding")) > 3
    computed, shared = numbers(output, r"prompt tokens\D+([\d,]+) computed, ([\d,]+) shared")
    assert shared > computed // 10
    (generated,) = numbers(output, r"generated tokens \D+([\d,]+)")
    assert numbers(output, r"([\d,]+) of ([\d,]+) tokens are those")[1] == generated
    assert numbers(output, r"generated tokens/s\D+([\d,]+) over")[0] > 0


@pytest.mark.parametrize("page_size", ["1", "16"])
@pytest.mark.parametrize("through", ["tileattn", "vllm", "sglang"])
def test_every_request_is_as_alone(example: ModuleType, through: str, page_size: str) -> None:
    result = run(example, "--check", "--through", through, "--page-size", page_size)
    assert result.exit_code == 0, result.output
    check(result.output)
    same, of = numbers(result.output, r"([\d,]+) of ([\d,]+) tokens are those")
    assert same == of  # float32


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("through", ["tileattn", "vllm", "sglang"])
def test_every_request_is_as_alone_on_a_gpu(example: ModuleType, through: str, graph: bool) -> None:
    arguments = ("--device", "cuda", "--dim", "256", "--check", "--through", through, *["--graph"] * graph)
    result = run(example, *arguments)
    assert result.exit_code == 0, result.output
    check(result.output)
    assert ("CUDA graph" in result.output) == graph


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels this needs on a GPU, for benchmarks/precompile.py."""

    def rows(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    int32 = functools.partial(torch.empty, dtype=torch.int32, device="meta")
    cos = torch.empty(72, 32, device="meta")
    caches = rows(9, 16, 2, 64), rows(9, 16, 2, 64)
    lengths, table, ends = int32(4), int32(4, 5), int32(5)
    single: dict[str, Any] = {"page_table": table}
    packed = {"page_table": table, "cu_seqlens_q": ends}
    for shape, named in (((4, 1), single), ((7,), packed)):
        q, k, v = rows(*shape, 4, 64), rows(*shape, 2, 64), rows(*shape, 2, 64)
        yield functools.partial(tileattn.append_kv, k, v, *caches, lengths, **named, cos=cos, sin=cos, q=q)
        longest = {"max_seqlen_q": 5} if named is packed else {}
        yield functools.partial(tileattn.decode, q, *caches, lengths, **named, **longest)
    yield functools.partial(tileattn.append_kv, rows(4, 1, 2, 64), rows(4, 1, 2, 64), *caches, lengths, **single)


def test_a_wrong_cache_is_seen(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that shares one page too few: the prefix's last tokens are missing."""
    real = example.tileattn.PagedKVCache.fork

    def shorter(self: Any, source: int, targets: Any, length: int) -> None:
        real(self, source, targets, length - 16)
        self.extend(torch.tensor([16 if i in targets else 0 for i in range(4)], dtype=torch.int32))

    monkeypatch.setattr(example.tileattn.PagedKVCache, "fork", shorter)
    result = run(example, "--check")
    assert result.exit_code == 1
    assert numbers(result.output, r"([\d,]+) are wrong")[0] > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dim", "60", "--heads", "4"), "--dim must be a multiple of twice --heads"),
        (("--chunk", "2"), "--chunk must be at least --slots, got 2 and 4"),
        (("--shared", "60"), "--shared must be less than --prompt, got 60 and 60"),
        (("--graph",), "--graph needs a GPU, got --device cpu"),
        (("--device", "foo"), "--device must be one of this machine, such as cpu or cuda, got foo: "),
    ],
)
def test_errors(example: ModuleType, arguments: tuple[str, ...], message: str) -> None:
    result = run(example, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_the_pages_python_runs() -> None:
    """Its blocks continue each other."""
    page = (ROOT / "docs" / "serving.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 9
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)


def test_the_pages_versions_are_those_of_the_tests() -> None:
    page = " ".join((ROOT / "docs" / "serving.md").read_text().split())
    assert "vLLM 0.33.0 (commit 4ba787ec9) and SGLang 0.5.23" in page
    assert "vLLM's public interface at commit 4ba787ec9 (release 0.33.0)" in " ".join(str(like_vllm.__doc__).split())
    assert "release 0.5.23" in str(like_sglang.__doc__)
