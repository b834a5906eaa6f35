"""The modules of tileattn.nn over a PagedKVCache: prompts, then steps, equal to one call on the whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tileattn.api.shared_plans as shared_plans
from tests.nn.test_modules import CASES, EMBED, HEADS, Case, random
from tileattn import LayerCache, PagedKVCache, PrefixLM, SlidingWindow
from tileattn.nn import MaskedAttention, SelfAttention, SlidingWindowAttention, get_attention
from tileattn.testing import assert_accurate

PAGE, MOST = 3, 40
# Masks that hide later tokens without `causal` are taken as they are.
CACHED = [case for case in CASES if case.causal and not case.name.startswith("flash")]
CACHED.append(Case("masked", {"mask": SlidingWindow(6, 0), "num_kv_heads": 2}, 2, SlidingWindow(6, 0)))
DTYPES = [torch.float32, torch.bfloat16]


def cache_of(module: SelfAttention, batch: int, layers: int = 1, **options: Any) -> PagedKVCache:
    """A cache in which everything is poisoned that is not written."""
    parameter = module.out_proj.weight
    cache = PagedKVCache(
        batch, MOST, module.num_kv_heads, module.head_dim,
        **({"page_size": PAGE, "layers": layers, "dtype": parameter.dtype, "device": parameter.device} | options),
    )  # fmt: skip
    for layer in range(layers):
        for pages in cache.layer(layer):
            pages.fill_(torch.nan)
    return cache


@torch.no_grad()
def in_steps(
    layers: Sequence[SelfAttention], x: Tensor, lengths: list[int], chunk: int = 0
) -> tuple[Tensor, list[int]]:
    """Ragged prompts of these lengths, packed; then single tokens, until one sequence has all tokens of x.

    chunk: the last prompt comes in two parts, of which this is the first one's length: while it gets the second, the
    other sequences get a token each.

    Returns:
        The outputs (batch, seqlen, embed), and how many each sequence has; the others are NaN.
    """
    batch, seqlen, _ = x.shape
    cache, output = cache_of(layers[0], batch, len(layers)), torch.full_like(x, torch.nan)
    done = [0] * batch
    first = [*lengths[:-1], chunk or lengths[-1]]
    steps = [first, [1] * (batch - 1) + [lengths[-1] - chunk]] if chunk else [first]
    for counts in steps:
        rows = [slice(begin, begin + count) for begin, count in zip(done, counts)]
        hidden = torch.cat([x[b, row] for b, row in enumerate(rows)])
        ends = torch.tensor([0, *counts], device=x.device).cumsum(0).int()
        step = cache.step(cu_seqlens_q=ends, max_seqlen_q=max(counts))
        for index, layer in enumerate(layers):
            hidden, weights = layer(hidden, cache=step.layer(index))
            assert weights is None
        for b, part in enumerate(hidden.split(counts)):
            output[b, rows[b]] = part
        done = [row.stop for row in rows]
    while max(done) < seqlen:
        hidden = torch.stack([x[b, at : at + 1] for b, at in enumerate(done)])
        step = cache.step(1)
        for index, layer in enumerate(layers):
            hidden, _ = layer(hidden, cache=step.layer(index))
        for b, at in enumerate(done):
            output[b, at] = hidden[b, 0]
        done = [at + 1 for at in done]
    assert cache.seqlens.tolist() == done
    return output, done


def whole(module: SelfAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_prompts_and_steps_equal_the_whole(case: Case, dtype: torch.dtype) -> None:
    """Beside float64, by the rule; the textbook's in the same dtype is eager."""
    compare(case, dtype, "cpu", EMBED)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_prompts_and_steps_on_a_gpu(case: Case) -> None:
    compare(case, torch.bfloat16, "cuda", 32 * HEADS)


def compare(case: Case, dtype: torch.dtype, device: str, embed: int) -> None:
    eager, module = case.naive(embed, dtype=dtype), case.module(embed, dtype=dtype)
    naive = case.naive(embed, dtype=torch.float64)
    for other in (module, naive):
        other.load_state_dict(eager.state_dict())
        other.to(device)
    eager.to(device)
    x = random(3, 17, embed, dtype=dtype).to(device)
    got, done = in_steps([module], x, [7, 1, 11], chunk=4)
    oracle, by_eager = whole(naive, x.double()), whole(eager, x)
    for b, end in enumerate(done):
        assert_accurate("output", got[b, :end], oracle[b, :end], [by_eager[b, :end]])


@pytest.mark.parametrize("name", ["naive", "flash_v1", "flash_v2"])
def test_modules_that_take_no_cache_say_so(name: str) -> None:
    module = get_attention(name, EMBED, HEADS, causal=True)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=f"{type(module).__name__} takes no cache; Masked"):
        module(torch.zeros(2, 3, EMBED), cache=cache_of(module, 2).step(3).layer(0))


@pytest.mark.slow  # in Triton's interpreter
def test_the_module_of_tritons_kernels_runs_them() -> None:
    pytest.importorskip("triton")
    module = get_attention("triton", EMBED, HEADS, num_kv_heads=2, causal=True)
    masked = get_attention("masked", EMBED, HEADS, num_kv_heads=2, causal=True)
    masked.load_state_dict(module.state_dict())
    x = random(2, 9, EMBED, dtype=torch.float32)
    got, _ = in_steps([module], x, [5, 3])
    expected, _ = in_steps([masked], x, [5, 3])
    torch.testing.assert_close(got, expected, equal_nan=True)


# --- Layers ---


def plans_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    decode_plan = shared_plans.decode_plan

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(decode_plan(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(shared_plans, "decode_plan", counted)
    return made


def test_a_plan_belongs_to_a_stream_and_to_no_graph() -> None:
    """Another stream would not wait for the plan, and a replay would not make one from outside of its graph again."""
    x = mock.Mock(is_cuda=True, shape=(1, 1, 8, 64), dtype=torch.float16)
    x.data_ptr.return_value, x.stride.return_value = 0, (512, 512, 64, 1)
    plans = shared_plans.SharedPlans()
    made = mock.Mock(side_effect=lambda *_, **__: object())
    got = []
    for stream, capturing in ((1, False), (1, False), (2, False), (2, True), (2, True), (1, False)):
        with (
            mock.patch.object(shared_plans, "decode_plan", made),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=stream, create=True),
        ):
            got.append(plans.plan("kind", x, x, x, torch.zeros(1), {}))
    assert made.call_count == 3
    assert got[0] is got[1] is got[5]
    assert got[3] is got[4]


def test_layers_share_one_plan_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each kind of layer: the window's reaches other keys. Values of a window count, not the mask's object."""
    plain = [MaskedAttention(EMBED, HEADS, causal=True, num_kv_heads=2) for _ in range(3)]
    windows = [SlidingWindowAttention(EMBED, HEADS, size, causal=True, num_kv_heads=2) for size in (4, 5, 4)]
    layers: list[SelfAttention] = [*plain, *windows]
    cache, made = cache_of(plain[0], 2, len(layers)), plans_of(monkeypatch)
    for number, tokens in enumerate((6, 1, 1), start=1):
        step = cache.step(tokens)
        x = random(2, tokens, EMBED, dtype=torch.float32)
        with torch.no_grad():
            for index, layer in enumerate(layers):
                x, _ = layer(x, cache=step.layer(index))
        assert len(made) == 3 * number
    assert not x.isnan().any()


def test_layers_of_a_model_equal_the_whole() -> None:
    layers: list[SelfAttention] = [
        MaskedAttention(EMBED, HEADS, causal=True, num_kv_heads=2, dtype=torch.float64),
        SlidingWindowAttention(EMBED, HEADS, 5, causal=True, num_kv_heads=2, dtype=torch.float64),
    ]
    x = random(2, 13, EMBED)
    got, done = in_steps(layers, x, [8, 2])
    expected = whole(layers[1], whole(layers[0], x))
    for b, end in enumerate(done):
        torch.testing.assert_close(got[b, :end], expected[b, :end], rtol=1e-9, atol=1e-11)


def test_rotary_embeddings() -> None:
    """`attend` rotates queries and keys by their positions, of two tokens in each pair of elements."""
    dim, heads = 8, 2
    q, k, v = (random(2, 9, heads, dim, seed=seed) for seed in range(3))
    angles = torch.arange(9)[:, None] * 0.5 ** torch.arange(dim // 2).double()
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], 2, dim // 2).transpose(-1, -2).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
        return turned.transpose(-1, -2).flatten(-2)

    scores = torch.einsum("bihd,bjhd->bhij", rotated(q), rotated(k)) / dim**0.5
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v)
    cache = PagedKVCache(2, 9, heads, dim, page_size=2, dtype=torch.float64)
    parts = []
    for rows in (slice(0, 6), slice(6, 7), slice(7, 9)):
        layer = cache.step(rows.stop - rows.start).layer(0)
        parts.append(layer.attend(q[:, rows], k[:, rows], v[:, rows], cos=cos, sin=sin))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-11)


def test_under_torch_compile() -> None:
    """A step is one graph, in which the cache is changed in place."""
    module = MaskedAttention(EMBED, HEADS, causal=True, num_kv_heads=2)
    x = random(2, 9, EMBED, dtype=torch.float32)

    def one(x: Tensor, cache: LayerCache) -> Tensor:
        return module(x, cache=cache)[0]

    compiled = torch.compile(one, fullgraph=True, backend="eager")
    cache = cache_of(module, 2)
    with torch.no_grad():
        parts = [
            compiled(x[:, rows], cache.step(rows.stop - rows.start).layer(0)) for rows in (slice(0, 8), slice(8, 9))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole(module, x))


@pytest.mark.gpu
def test_one_graph_serves_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured at the first tokens and replayed; the plan is made in the graph, though one was made before."""
    options: dict[str, Any] = {"causal": True, "num_kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda"}
    layers: list[SelfAttention] = [MaskedAttention(32 * HEADS, HEADS, **options) for _ in range(2)]
    x = random(3, 30, 32 * HEADS, dtype=torch.bfloat16).cuda()
    cache, token, made = cache_of(layers[0], 3, 2), x[:, :1].clone(), plans_of(monkeypatch)

    def run() -> Tensor:
        step, hidden = cache.step(1), token
        for index, layer in enumerate(layers):
            hidden, _ = layer(hidden, cache=step.layer(index))
        return hidden

    with torch.no_grad():
        run()
        cache.reset()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        assert len(made) == 2
        cache.reset()
        got = []
        for at in range(30):
            token.copy_(x[:, at : at + 1])
            graph.replay()
            got.append(output.clone())
    expected = whole(layers[1], whole(layers[0], x))
    again, _ = in_steps(layers, x, [1, 1, 1])
    assert torch.equal(torch.cat(got, 1), again)
    exact = [layer.double() for layer in layers]
    oracle = whole(exact[1], whole(exact[0], x.double()))
    assert_accurate("output", torch.cat(got, 1), oracle, [expected])


# --- Errors ---


def test_what_does_not_fit_a_cache() -> None:
    full = MaskedAttention(EMBED, HEADS)
    window = SlidingWindowAttention(EMBED, HEADS, 3)
    dropping = MaskedAttention(EMBED, HEADS, causal=True, dropout=0.5)
    causal = MaskedAttention(EMBED, HEADS, causal=True)
    few_heads = MaskedAttention(EMBED, HEADS, causal=True, num_kv_heads=2)
    x = torch.zeros(2, 3, EMBED)
    cache = cache_of(full, 2)
    with torch.no_grad():
        for module in (full, window):
            with pytest.raises(ValueError, match="cache needs a module with causal=True"):
                module(x, cache=cache.step(3).layer(0))
        with pytest.raises(ValueError, match=r"without dropout, got 0\.5 in training: call eval\(\)"):
            dropping(x, cache=cache.step(3).layer(0))
        with pytest.raises(ValueError, match="k must have"):
            few_heads(x, cache=cache.step(3).layer(0))
        step = cache.step(3)
        cache.truncate(1)
        with pytest.raises(ValueError, match="lengths have changed since this step began"):
            causal(x, cache=step.layer(0))
        for tokens in (2, 4):  # keys over earlier ones, or none
            with pytest.raises(ValueError, match=rf"q must have the {tokens} new tokens .*step\({tokens}\), got 3"):
                causal(x, cache=cache.step(tokens).layer(0))
        packed = cache.step(cu_seqlens_q=torch.tensor([0, 2, 6]).int(), max_seqlen_q=4)
        with pytest.raises(ValueError, match=r"x must have shape \(total, embed_dim=32\), got \(2, 3, 32\)"):
            causal(x, cache=packed.layer(0))
    with pytest.raises(ValueError, match="k requires grad: use torch"):
        causal(x, cache=cache.step(3).layer(0))
    with pytest.raises(ValueError, match=r"index must lie in 0 \.\. 0, the layers of the cache, got 1"):
        cache.step(0).layer(1)
    for arguments in ({}, {"tokens": 1, "cu_seqlens_q": torch.zeros(3).int(), "max_seqlen_q": 1}, {"max_seqlen_q": 1}):
        with pytest.raises(TypeError, match="step needs either tokens, or cu_seqlens_q and max_seqlen_q"):
            cache.step(**arguments)  # type: ignore[arg-type]


def test_a_prefix_is_seen_as_a_whole_by_its_prompt() -> None:
    """PrefixLM without `causal`: tokens of the prompt see later ones of it, as in the call on the whole."""
    module = MaskedAttention(EMBED, HEADS, mask=PrefixLM(7), dtype=torch.float64)
    x = random(2, 12, EMBED)
    got, done = in_steps([module], x, [7, 9])
    expected = whole(module, x)
    for b, end in enumerate(done):
        torch.testing.assert_close(got[b, :end], expected[b, :end], rtol=1e-9, atol=1e-11)
