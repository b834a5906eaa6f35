"""The cases of the suite parallel, and the options that choose them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from tileattn.bench.parallel import torch_context_parallel as pytorch
from tileattn.bench.parallel.cases import Case, lognormal, selected, suite, with_a_large_one
from tileattn.bench.parallel.check import tokens_of
from tileattn.cli.app import app


def test_the_cases_of_gpus() -> None:
    cases = {case.name: case for case in suite("cuda")}
    assert list(cases) == [
        "32k 32/8 causal",
        "32k 32/32 causal",
        "128k 32/8 causal",
        "128k 32/32 causal",
        "256k 32/8 causal",
        "256k 32/32 causal",
        "128k 32/8 window 1024",
        "128k 32/8 documents sigma 1",
        "128k 32/8 documents sigma 2",
        "128k 32/8 documents, one of 70%",
        "1M 32/8 causal",
    ]
    assert [case.seqlen for case in cases.values()][::4] == [2**15, 2**18, 2**17]
    for sigma in (1, 2):
        assert len(cases[f"128k 32/8 documents sigma {sigma}"].lengths) == 64
    assert max(cases["128k 32/8 documents, one of 70%"].lengths) == pytest.approx(0.7 * 2**17, rel=1e-3)


@pytest.mark.parametrize("tokens", [256, 512, 2**17])
def test_documents_fill_the_sequence(tokens: int) -> None:
    for ends in (lognormal(tokens, 1), lognormal(tokens, 2), with_a_large_one(tokens)):
        lengths = [stop - start for start, stop in pairwise(ends)]
        assert ends[0] == 0
        assert ends[-1] == tokens
        assert all(length > 0 and length % 16 == 0 for length in lengths)
    assert lognormal(tokens, 1) == lognormal(tokens, 1)


def test_the_area_is_what_the_mask_lets_through() -> None:
    for case in (Case("", 40, 1, 1, 8), Case("", 40, 1, 1, 8, 7), Case("", 40, 1, 1, 8, None, (0, 3, 30, 40))):
        seen = torch.zeros(40, 40, dtype=torch.bool)
        for start, stop in pairwise(case.documents or (0, 40)):
            q, k = torch.arange(stop - start)[:, None], torch.arange(stop - start)
            seen[start:stop, start:stop] = (k <= q) & (k >= q - (40 if case.window is None else case.window))
        assert case.area() == int(seen.sum())
        assert case.flops("fwdbwd") == 3.5 * 4 * case.area() * 8
        assert tokens_of(case)[[0, -1]].tolist() == [0, 39]


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ("1M", ["1M 32/8 causal"]),
        ("32k,128k 32/32", ["32k 32/32 causal", "128k 32/32 causal"]),
        ("documents 1,70%", ["128k 32/8 documents sigma 1", "128k 32/8 documents, one of 70%"]),
        ("2k", []),
    ],
)
def test_rows_are_chosen_by_words(terms: str, names: list[str]) -> None:
    assert [case.name for case in selected(suite("cuda"), terms)] == names


def test_the_long_case_is_only_measured_where_it_is_asked_for() -> None:
    assert not any(case.is_long for case in selected(suite("cuda"), None))
    assert not any(case.is_long for case in selected(suite("cuda"), "causal"))


def test_a_name_that_torch_lacks_is_said() -> None:
    with pytest.raises(pytorch.Unavailable, match=r"not available in torch .*_attention\.gone"):
        pytorch._name(pytorch.CONTEXT_PARALLEL, "gone")
    with pytest.raises(pytorch.Unavailable, match=r"not available in torch .*: torch\.gone\.name"):
        pytorch._name("torch.gone", "name")


def test_names_of_torch_are_there() -> None:
    """Those of torch 2.11 and 2.13."""
    for name in ("context_parallel", "set_rotate_method", "_cp_options", "_create_cp_block_mask", "_ContextParallel"):
        assert pytorch._name(pytorch.CONTEXT_PARALLEL, name)
    for name in ("_HeadTailLoadBalancer", "_PerDocumentHeadTailLoadBalancer", "_PTRRLoadBalancer"):
        assert pytorch._name(pytorch.BALANCERS, name)


def test_shards_are_pytorchs() -> None:
    assert pytorch.ring_tokens(16, 0, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    with pytest.raises(pytorch.Unavailable, match="multiples of 4, got 18"):
        pytorch.ring_tokens(18, 0, 2)
    with pytest.raises(pytorch.Unavailable, match="a document of 6"):
        pytorch.document_balancer([8, 6], 2, torch.device("cpu"))


def test_without_torchrun_one_error_shows_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    ran = CliRunner().invoke(app, ["bench", "--suite", "parallel"], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert "torchrun --nproc-per-node 2 -m tileattn bench --suite parallel" in ran.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--causal"], "the suite parallel does not have it"),
        (["--dtype", "fp32"], "'fp32' is not measured in this suite; accepted: bf16, fp16"),
        (["--direction", "bwd"], "'bwd' is not measured in this suite; accepted: both, fwd, fwdbwd"),
        (["--device", "cpu:1"], "'cpu:1' is not a kind of device here; accepted: auto, cpu"),
        (["--seqlen", "300"], "'300' must be one multiple of 256"),
        (["--seqlen", "256,512"], "must be one multiple of 256"),
        (["--rows", "3k"], "no row has all of '3k'; rows are: 32k 8/2 causal, "),
        (["--baselines", "cudnn,fa9"], "'fa9': not known in this suite; accepted: none, cudnn, fa2, cudnn-allgather"),
        (["--rounds", "0"], "0"),
    ],
)
def test_bad_options_are_one_error_of_the_first_process(
    options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    ran = CliRunner().invoke(app, ["bench", "--suite", "parallel", *options], env={"COLUMNS": "300"})
    assert ran.exit_code == 2
    assert text in ran.output
    monkeypatch.setenv("RANK", "1")
    ran = CliRunner().invoke(app, ["bench", "--suite", "parallel", *options])
    assert ran.exit_code == 2
    assert ran.output == "" or "--causal" in options
