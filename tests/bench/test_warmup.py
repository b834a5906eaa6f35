"""`tileattn warmup --direction decode`: after it, no step of a server compiles a kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tileattn
import tileattn.kernels.tilelang.build.library as library
from tests.tools import ROOT
from tileattn import FixedSplit, PagedKVCache, SlidingWindow
from tileattn.bench import problem, warmup
from tileattn.bench.baselines.own import mask_of, score_mods_of
from tileattn.bench.cases import Case
from tileattn.call.decoding import DecodeInputs
from tileattn.kernels.tilelang.append import library as append_library
from tileattn.kernels.tilelang.build import batch
from tileattn.kernels.tilelang.decode import library as decode_library
from tileattn.nn import MaskedAttention, SelfAttention, SlidingWindowAttention
from tileattn.runtime import decoding, few_queries
from tileattn.runtime.decoding import DecodeOptions, make_decode_call, with_variant

DIM, PAGES, BF16 = 64, (16, 64), torch.bfloat16
VARIANTS = ("causal", "window9")  # those of the layers below


def kernels(arch: str) -> list[batch.AnyJob]:
    head_dims = [(DIM, DIM)]
    calls = warmup.decode_calls(head_dims, VARIANTS, ["bf16"], PAGES, arch)
    return warmup.decode_jobs(calls, warmup.append_calls(head_dims, ["bf16"], PAGES, ("none", "halves"), arch))


def modules(heads: int, kv_heads: int, device: str) -> list[SelfAttention]:
    options: dict[str, Any] = {"num_kv_heads": kv_heads, "causal": True, "dtype": BF16, "device": device}
    return [MaskedAttention(DIM * heads, heads, **options), SlidingWindowAttention(DIM * heads, heads, 10, **options)]


def steps(device: str, sizes: Sequence[tuple[int, int, int]]) -> Iterator[Callable[[], Any]]:
    """Parts of a server's day: prompts and tokens, packed or not, of models with and without rotary embeddings.

    sizes: of pages, and heads of queries and of keys.
    """
    for (page, heads, kv_heads), tokens in itertools.product(sizes, (1, 2, 130)):
        new_cache = functools.partial(PagedKVCache, 3, 300, kv_heads, DIM, page_size=page, dtype=BF16, device=device)
        ends = torch.tensor([0, tokens, tokens + 1, tokens + 1], dtype=torch.int32, device=device)
        of_all = torch.ones(3, tokens, DIM * heads, dtype=BF16, device=device)
        together = torch.ones(tokens + 1, DIM * heads, dtype=BF16, device=device)
        for module in modules(heads, kv_heads, device):
            yield functools.partial(module, of_all, cache=new_cache().step(tokens).layer(0))
            packed = new_cache().step(cu_seqlens_q=ends, max_seqlen_q=tokens)
            yield functools.partial(module, together, cache=packed.layer(0))
        # By hand: a model with rotary embeddings, and an engine that merges parts.
        cache = new_cache()
        cache.extend(tokens)
        k = torch.ones(3, tokens, kv_heads, DIM, dtype=BF16, device=device)
        q, table = of_all.unflatten(2, (heads, DIM)), torch.ones(300, DIM // 2, device=device)
        yield functools.partial(cache.append, k, k, q=q, cos=table, sin=table)
        window = {"mask": SlidingWindow(9, 0), "causal": False}
        for options in ({}, window, {"splits": FixedSplit(128)}, {"return_lse": True}, {"splits": 3}):
            given: dict[str, Any] = {"page_table": cache.page_table, **options}
            yield functools.partial(tileattn.decode, q, *cache.layer(0), cache.seqlens, **given)
            if tokens > 1:  # of packed queries
                given |= {"cu_seqlens_q": ends, "max_seqlen_q": tokens}
                of_both = together.unflatten(1, (heads, DIM))
                yield functools.partial(tileattn.decode, of_both, *cache.layer(0), cache.seqlens, **given)


SIZES = ((64, 2, 1), (48, 4, 4), (16, 32, 1))


@pytest.mark.slow_except("sm_90a", reason="0.7 s each")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_steps_ask_for_no_other_kernel(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import precompile  # type: ignore[import-not-found]

    wanted = {job.key: str(job) for job in precompile.jobs_of(steps("meta", SIZES), arch)}
    warm = {job.key for job in kernels(arch)}
    assert len({text.split()[0] for text in wanted.values()}) == 3  # decode, plan, append
    assert len(wanted) > 8
    assert [text for key, text in wanted.items() if key not in warm] == []


@pytest.mark.parametrize(
    "variant", ["full", "causal+window1024", "causal+documents4+bias", "window3+alibi+sink", "bias-b1+userscore"]
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_warmed_kernel_is_the_one_that_a_call_wants(
    variant: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_asks_for_alignment", lambda q: True)  # as on a GPU
    given = problem.build(Case(3, 40, 40, 6, 2, 32, 32, variant, "bf16"), "cpu")
    ends = torch.tensor([0, 40, 80, 120], dtype=torch.int32) if packed else None
    q = given.q.flatten(0, 1)[None] if packed else given.q
    lengths = torch.full((3,), 40, dtype=torch.int32)
    inputs = DecodeInputs(q, given.k, given.v, lengths, cu_seqlens_q=ends, sink=given.sink)
    key, inputs = with_variant(inputs, 40, mask_of(given), score_mods_of(given), False, None)
    real = make_decode_call(inputs, DecodeOptions(key, 1.0, 40, None, True, None))
    assert real in warmup.decode_calls([(32, 32)], [variant], ["bf16"], [0, 16], "cpu")


def test_attention_of_few_queries_runs_kernels_over_contiguous_caches() -> None:
    """Those of `warmup --direction decode --page-size 0 --variant full,causal`, as docs/design/decoding.md says."""
    names = ([(128, 64)], ["full", "causal"], ["bf16"])
    shapes = torch.Size((1, 1, 8, 128)), torch.Size((1, 900, 2, 128))
    wanted = {few_queries.decode_facts(call, *shapes)[0] for call in warmup.calls(*names, "sm_90a")}
    assert len(wanted) == 4
    assert wanted <= set(warmup.decode_calls(*names, [0], "sm_90a"))


def test_the_default_of_decode_has_a_name() -> None:
    """`decode(mask=SlidingWindow(3, 0))` is causal as well: "causal+window3"."""
    given = problem.build(Case(2, 8, 8, 2, 2, 8, 8, "causal+window3", "bf16"), "cpu")
    inputs = DecodeInputs(given.q, given.k, given.v, torch.full((2,), 8, dtype=torch.int32))
    key, _ = with_variant(inputs, 8, SlidingWindow(3, 0), None, True, None)
    assert warmup.decode_variant_key(given, False) == key


@pytest.mark.gpu
def test_a_warmed_server_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty cache folder: the kernels are compiled by warmup, and then there is no compiler."""
    from tileattn.call.facts import device_arch

    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path))
    loaded = (decode_library.decode_function, decode_library.plan_function, append_library.append_function)
    for function in loaded:
        function.cache_clear()
    done = list(batch.compile_all(kernels(device_arch(torch.device("cuda"))), batch.CORES))
    assert [each.error for each in done if each.error] == []
    assert not any(each.was_there for each in done)

    def no_compiler(*arguments: Any) -> None:
        raise AssertionError("a kernel was not warmed")

    monkeypatch.setattr("tileattn.kernels.tilelang.build.compile.build_library", no_compiler)
    with torch.no_grad():
        for step in steps("cuda", SIZES):
            step()
    torch.cuda.synchronize()
    for function in loaded:
        assert function.cache_info().currsize > 0
        function.cache_clear()
    assert library.kernel_cache().folder == tmp_path
