"""The modules of tileattn.nn: outputs and gradients equal those of textbook attention with the same parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
import tileattn.reference.tiled as tiled
from tileattn import Causal, Documents, PrefixLM, SlidingWindow
from tileattn.call.dropout import draw_seed, keep_mask
from tileattn.measure.memory import peak_bytes
from tileattn.nn import (
    FlashAttentionV1,
    FlashAttentionV2,
    GroupedQueryAttention,
    MaskedAttention,
    MultiQueryAttention,
    NaiveAttention,
    SelfAttention,
    SlidingWindowAttention,
    get_attention,
)
from tileattn.nn.projections import split
from tileattn.reference import standard_attention
from tileattn.testing import assert_accurate
from tileattn.variant.key import normalize

CPU = torch.device("cpu")
EMBED, HEADS = 32, 4

# Without one autograd runs through the torch backend's forward pass, and keeps all of its tiles.
needs_backward = pytest.mark.skipif(
    not hasattr(torch.ops.tileattn, "backward"), reason="attention() has no backward pass of its own yet"
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def run(module: SelfAttention, x: Tensor, *masks: Any) -> dict[str, Tensor]:
    """The output, and the gradients of x and of every parameter, of one loss."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    output, _ = module(x, *masks)
    (output * random(*output.shape, seed=9).to(output)).sum().backward()
    assert x.grad is not None
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    split(grads, "")  # modules of equal heads have one projection or three
    return {"output": output.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


# --- Against the textbook's ---


@dataclass(frozen=True)
class Case:
    """A module by name, and the mask under which the textbook's attention computes the same."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = HEADS
    mask: Any = None
    causal: bool = False

    def __str__(self) -> str:
        options = [f"{key}={getattr(value, '__name__', value)}" for key, value in self.options.items()]
        return "-".join([self.name, *options, "causal" if self.causal else "full"])

    def module(self, embed: int = EMBED, **options: Any) -> SelfAttention:
        return get_attention(self.name, embed, HEADS, causal=self.causal, **self.options, **options)

    def naive(self, embed: int = EMBED, **options: Any) -> NaiveAttention:
        return NaiveAttention(embed, HEADS, num_kv_heads=self.kv_heads, mask=self.mask, causal=self.causal, **options)


def far(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A user's mask, under which the first positions of odd heads see nothing."""
    return (k < q - 3) | (h % 2 == 0)


CASES = [
    Case(name, options, kv_heads, mask, causal)
    for causal in (False, True)
    for name, options, kv_heads, mask in [
        ("flash_v1", {"block_size": 16}, HEADS, None),
        ("flash_v1", {"num_kv_heads": 2}, 2, None),
        ("flash_v2", {"block_size": 16}, HEADS, None),
        ("flash_v2", {"num_kv_heads": 2}, 2, None),
        ("sliding_window", {"window_size": 5}, HEADS, SlidingWindow(4, 4)),
        ("sliding_window", {"window_size": 20, "num_kv_heads": 2}, 2, SlidingWindow(19, 19)),
        ("gqa", {"num_kv_heads": 2}, 2, None),
        ("grouped_query", {"num_kv_heads": HEADS}, HEADS, None),
        ("mqa", {}, 1, None),
        ("multi_query", {}, 1, None),
        ("masked", {}, HEADS, None),
        ("masked", {"mask": PrefixLM(7)}, HEADS, PrefixLM(7)),
        ("masked", {"mask": far, "num_kv_heads": 1}, 1, far),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_module_equals_the_textbook(case: Case) -> None:
    naive, module = case.naive(dtype=torch.float64), case.module(dtype=torch.float64)
    module.load_state_dict(naive.state_dict())
    x = random(2, 37, EMBED)
    got, expected = run(module, x), run(naive, x)
    assert got.keys() == expected.keys()
    for name in expected:
        close(got[name], expected[name])
    assert module(x)[1] is None


@pytest.mark.parametrize("case", [case for case in CASES if case.causal], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    """Beside float64, by the rule; the textbook's in the same dtype is eager."""
    eager, module, naive = case.naive(dtype=dtype), case.module(dtype=dtype), case.naive(dtype=torch.float64)
    for other in (module, naive):
        other.load_state_dict(eager.state_dict())
    x = random(2, 37, EMBED, dtype=dtype)
    got, expected, by_eager = run(module, x), run(naive, x.double()), run(eager, x)
    # What is added to all keys changes all scores of a row alike, and no probability: there is only noise.
    assert expected.pop("k_proj.bias").norm() < 1e-12
    for name, oracle in expected.items():
        assert got[name].dtype == dtype
        assert_accurate(name, got[name], oracle, [by_eager[name]], gradient=name != "output")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case: Case) -> None:
    """With 16 bits and a head dim of 32, attention() runs its kernels."""
    dtype, embed = torch.bfloat16, 32 * HEADS
    eager, module = (make(embed, dtype=dtype, device="cuda") for make in (case.naive, case.module))
    naive = case.naive(embed, dtype=torch.float64, device="cuda")
    for other in (module, naive):
        other.load_state_dict(eager.state_dict())
    x = random(2, 137, embed, dtype=dtype).cuda()
    got, expected, by_eager = run(module, x), run(naive, x.double()), run(eager, x)
    expected.pop("k_proj.bias")  # noise, as above
    for name, oracle in expected.items():
        assert_accurate(name, got[name], oracle, [by_eager[name]], gradient=name != "output")


def test_naive_is_attention_by_hand() -> None:
    naive = NaiveAttention(EMBED, HEADS, num_kv_heads=2, causal=True, dtype=torch.float64)
    x = random(2, 11, EMBED)
    output, weights = naive(x)
    q, k, v = naive.q_proj(x).unflatten(2, (4, 8)), naive.k_proj(x).unflatten(2, (2, 8)), naive.v_proj(x)
    k, v = k.repeat_interleave(2, dim=2), v.unflatten(2, (2, 8)).repeat_interleave(2, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    expected = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf).softmax(-1)
    close(weights, expected)
    close(output, naive.out_proj(torch.einsum("bhij,bjhd->bihd", expected, v).flatten(2)))


def test_weights_of_a_position_that_sees_nothing() -> None:
    naive = NaiveAttention(EMBED, HEADS, mask=lambda b, h, q, k: k < q, dtype=torch.float64)
    output, weights = naive(random(1, 5, EMBED))
    assert torch.equal(weights[:, :, 0], torch.zeros_like(weights[:, :, 0]))
    close(output[:, 0], naive.out_proj.bias[None])
    assert all(grad.isfinite().all() for grad in run(naive, random(1, 5, EMBED)).values())


@pytest.mark.parametrize("cls", [MaskedAttention, NaiveAttention])
def test_masks_given_to_constructor_and_forward_both_hold(cls: type[MaskedAttention]) -> None:
    ids = torch.tensor([[0] * 9 + [1] * 12, [0] * 15 + [1] * 6])
    module = cls(EMBED, HEADS, mask=SlidingWindow(6, 6), causal=True, dtype=torch.float64)
    expected = NaiveAttention(EMBED, HEADS, mask=SlidingWindow(6, 6) & Causal() & Documents(ids), dtype=torch.float64)
    expected.load_state_dict(module.state_dict())
    x = random(2, 21, EMBED)
    close(run(module, x, Documents(ids)), run(expected, x))
    in_forward_only = cls(EMBED, HEADS, dtype=torch.float64)
    in_forward_only.load_state_dict(module.state_dict())
    close(in_forward_only(x, SlidingWindow(6, 0) & Documents(ids))[0], expected(x)[0])


def test_a_window_of_one_is_the_position_itself() -> None:
    module = SlidingWindowAttention(EMBED, HEADS, 1, dtype=torch.float64)
    x = random(2, 7, EMBED)
    close(module(x)[0], module.out_proj(module.qkv_proj(x)[..., -EMBED:]))


@pytest.mark.slow_except("full-flash_v1", "causal-flash_v2", reason="1.3 s each")
@pytest.mark.parametrize("name", ["flash_v1", "flash_v2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_by_differences(name: str, causal: bool) -> None:
    module = get_attention(name, 4, 2, block_size=2, num_kv_heads=1, causal=causal, dtype=torch.float64)
    x = random(2, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: module(x)[0], (x, *module.parameters()))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.causal], ids=str)
def test_few_positions_or_none(case: Case, shape: tuple[int, int]) -> None:
    module = case.module()
    x = torch.ones(*shape, EMBED, requires_grad=True)
    output, _ = module(x)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_autocast() -> None:
    for case in CASES:
        module, naive = case.module(), case.naive()
        module.load_state_dict(naive.state_dict())
        x = random(2, 37, EMBED, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = module(x)
            expected, _ = naive(x)
        assert output.dtype == torch.bfloat16
        assert (output - expected).float().norm() < 0.02 * expected.float().norm(), str(case)
        output.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


# --- Memory ---


def growth(module: SelfAttention, seqlen: int) -> float:
    """How the peak memory of forward and backward grows when the sequence becomes four times as long."""

    def peak(seqlen: int) -> int:
        x = random(1, seqlen, EMBED, dtype=torch.float32).requires_grad_()

        def step() -> None:
            module(x)[0].sum().backward()

        step()
        return peak_bytes(step, CPU)

    return peak(4 * seqlen) / peak(seqlen)


def test_memory_of_the_textbooks_is_quadratic() -> None:
    """Otherwise the tests below would check nothing."""
    assert growth(NaiveAttention(EMBED, HEADS), 256) > 12


@pytest.mark.slow_cases("flash_v2-0.1", reason="4 s")
@pytest.mark.parametrize(("name", "dropout"), [("flash_v1", 0.0), ("flash_v2", 0.0), ("flash_v2", 0.1)])
def test_memory_of_the_loops_is_linear(name: str, dropout: float) -> None:
    assert growth(get_attention(name, EMBED, HEADS, block_size=128, dropout=dropout), 256) < 4.2


@pytest.mark.slow_cases(
    "sliding_window-window_size=20-num_kv_heads=2-causal",
    "grouped_query-num_kv_heads=4-causal",
    "multi_query-causal",
    "masked-causal",
    "masked-mask=PrefixLM(prefix=7)-causal",
    reason="0.5 to 1 s each",
)
@needs_backward
@pytest.mark.parametrize("case", [case for case in CASES if case.causal and not case.name.startswith("flash")], ids=str)
def test_memory_of_the_others_is_linear(case: Case) -> None:
    assert growth(case.module(), 1024) < 5


# --- Dropout ---


def test_dropout_of_the_textbook_is_on_weights() -> None:
    naive = NaiveAttention(EMBED, HEADS, dropout=0.25, dtype=torch.float64)
    x = random(2, 41, EMBED)
    torch.manual_seed(0)
    _, dropped = naive(x)
    _, weights = naive.eval()(x)
    kept = dropped != 0
    close(dropped[kept], weights[kept] / 0.75)
    assert 0.7 < kept.double().mean() < 0.8


@pytest.mark.parametrize("name", ["flash_v1", "masked"])
def test_dropout_of_the_textbook_is_that_of_the_others(name: str) -> None:
    naive, other = (get_attention(each, EMBED, HEADS, dropout=0.3, dtype=torch.float64) for each in ("naive", name))
    other.load_state_dict(naive.state_dict())
    results = []
    for module in (naive, other):
        torch.manual_seed(0)
        results.append(run(module, random(2, 21, EMBED)))
    close(*results)


@pytest.mark.parametrize("name", ["flash_v1", "flash_v2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dropout_of_the_loops_is_the_pattern_of_the_seed(name: str, causal: bool) -> None:
    module = get_attention(
        name, EMBED, HEADS, num_kv_heads=2, block_size=24, causal=causal, dropout=0.25, dtype=torch.float64
    )
    x = random(2, 61, EMBED)
    torch.manual_seed(0)
    got = run(module, x)
    torch.manual_seed(0)
    z = keep_mask(draw_seed("cpu"), 0.25, 2, HEADS, slice(0, 61), slice(0, 61)).double() / 0.75

    def by_definition(x: Tensor) -> tuple[Tensor, None]:
        q, k, v = module._heads(x)
        o, _ = standard_attention(q, k, v, Causal() if causal else None, dropout=z)
        return module.out_proj(o.flatten(2)), None

    module.forward = by_definition  # type: ignore[assignment, method-assign]
    close(got, run(module, x))


def test_no_dropout_outside_training() -> None:
    for case in CASES:
        module, plain = case.module(dropout=0.5).eval(), case.module()
        plain.load_state_dict(module.state_dict())
        x = random(2, 19, EMBED, dtype=torch.float32)
        assert torch.equal(module(x)[0], plain(x)[0])


@pytest.mark.parametrize("case", [case for case in CASES if not case.name.startswith("flash")], ids=str)
def test_dropout_of_attention_is_that_of_the_loops(case: Case) -> None:
    """The same seed drops the same weights; what the mask hides has none."""
    module = case.module(dropout=0.25, dtype=torch.float64)
    flash = FlashAttentionV2(EMBED, HEADS, num_kv_heads=case.kv_heads, dropout=0.25, dtype=torch.float64)
    flash.load_state_dict(module.state_dict())
    flash.forward = lambda x: flash._forward(x, normalize(case.mask, None, case.causal)[0])  # type: ignore[method-assign]
    results = []
    for each in (module, flash):
        torch.manual_seed(0)
        results.append(run(each, random(2, 37, EMBED)))
    close(*results)


# --- State dicts ---


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_state_dicts_of_equal_heads_are_exchanged(kv_heads: int, bias: bool) -> None:
    options: dict[str, dict[str, Any]] = {
        "naive": {"num_kv_heads": kv_heads},
        "flash_v1": {"num_kv_heads": kv_heads},
        "flash_v2": {"num_kv_heads": kv_heads},
        "sliding_window": {"num_kv_heads": kv_heads, "window_size": 64},
        "gqa": {"num_kv_heads": kv_heads},
        "masked": {"num_kv_heads": kv_heads},
        **({"mqa": {}} if kv_heads == 1 else {}),
    }
    modules = [get_attention(name, EMBED, HEADS, bias=bias, **given) for name, given in options.items()]
    x = random(2, 19, EMBED, dtype=torch.float32)
    for giver in modules:
        fused = kv_heads == HEADS and not isinstance(giver, GroupedQueryAttention)
        projections = ["qkv_proj", "out_proj"] if fused else ["q_proj", "k_proj", "v_proj", "out_proj"]
        kinds = ["weight", "bias"] if bias else ["weight"]
        assert giver.state_dict().keys() == {f"{name}.{kind}" for name in projections for kind in kinds}
        for taker in modules:
            taker.load_state_dict(giver.state_dict())
            torch.testing.assert_close(taker(x)[0], giver(x)[0])


def test_copies_and_pickles() -> None:
    for case in CASES:
        module = case.module()
        x = random(2, 19, EMBED, dtype=torch.float32)
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(copied) is type(module)
            assert torch.equal(copied(x)[0], module(x)[0])


# --- What they say of themselves ---


def test_causal_efficiency_counts_the_tiles_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FlashAttentionV2(EMBED, HEADS, block_size=16, causal=True)
    visited = 0
    scores = tiled.tile_scores

    def counted(q: Tensor, k: Tensor, rows: slice, keys: slice, *arguments: Any) -> Tensor:
        nonlocal visited
        visited += keys.stop > keys.start  # a row's state before any tile is that of a tile without keys
        return scores(q, k, rows, keys, *arguments)

    monkeypatch.setattr(tiled, "tile_scores", counted)
    for seqlen in (1, 16, 17, 100):
        visited = 0
        with torch.no_grad():
            module(torch.zeros(1, seqlen, EMBED))
        efficiency = module.get_causal_efficiency(seqlen)
        assert efficiency.visited == visited
        assert efficiency.saving == 1 - visited / efficiency.total
    assert module.get_causal_efficiency(1).saving == 0
    assert module.get_causal_efficiency(64).saving == 0.375
    visited = 0
    FlashAttentionV1(EMBED, HEADS, block_size=16, causal=True)(torch.zeros(1, 100, EMBED))
    assert visited == module.get_causal_efficiency(100).total


def test_size_of_the_cache() -> None:
    gqa = GroupedQueryAttention(EMBED, HEADS, 2)
    usage = gqa.get_memory_usage(3, 100, torch.bfloat16).kv_cache
    k, v = (proj(torch.zeros(3, 100, EMBED)).bfloat16() for proj in (gqa.k_proj, gqa.v_proj))
    assert usage.bytes == k.nbytes + v.nbytes
    assert usage.multi_head_bytes == 2 * 3 * 100 * EMBED * 2
    assert usage.reduction == 2
    assert gqa.get_memory_usage(3, 100).kv_cache.bytes == 2 * usage.bytes
    assert MultiQueryAttention(EMBED, HEADS).get_memory_usage(1, 8).kv_cache.reduction == HEADS


def test_representations() -> None:
    for module, shown in [
        (NaiveAttention(EMBED, HEADS), "32, 4"),
        (FlashAttentionV1(EMBED, HEADS, dropout=0.5, causal=True), "32, 4, dropout=0.5, causal=True, block_size=64"),
        (SlidingWindowAttention(EMBED, HEADS, 7), "32, 4, window_size=7"),
        (GroupedQueryAttention(EMBED, HEADS, 2), "32, 4, num_kv_heads=2"),
        (MaskedAttention(EMBED, HEADS, mask=PrefixLM(3)), "32, 4, mask=PrefixLM(prefix=3)"),
    ]:
        assert module.extra_repr() == shown
        assert repr(module).startswith(f"{type(module).__name__}(\n  {shown}\n")


@needs_backward
def test_compiled() -> None:
    torch._dynamo.reset()
    module = GroupedQueryAttention(EMBED, HEADS, 2, causal=True, dtype=torch.float64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = random(2, 19, EMBED)
    got = {name.removeprefix("_orig_mod."): tensor for name, tensor in run(compiled, x).items()}
    close(got, run(module, x))
    torch._dynamo.reset()


@pytest.mark.slow  # Dynamo traces a loop in Python, tile by tile
@pytest.mark.parametrize("name", ["flash_v1", "flash_v2"])
def test_causal_loops_are_one_graph(name: str) -> None:
    module = get_attention(name, EMBED, HEADS, causal=True, block_size=16, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = random(1, 20, EMBED)
    output, expected = compiled(x)[0], module(x)[0]
    close(output, expected)
    weights, parameters = random(*output.shape, seed=9), list(module.parameters())
    got, wanted = (torch.autograd.grad((each * weights).sum(), parameters) for each in (output, expected))
    close(got, wanted)


def test_nn_is_there_without_being_imported() -> None:
    assert tileattn.nn.get_attention is get_attention
    with pytest.raises(AttributeError, match="no attribute 'mm'"):
        tileattn.mm  # noqa: B018


# --- Errors ---


def test_dtypes_of_x_under_autocast() -> None:
    module = MultiQueryAttention(EMBED, HEADS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.zeros(1, 8, EMBED).half())[0].dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"x must be .*, got torch.float64"):
            module(torch.zeros(1, 8, EMBED).double())


def test_multi_query_attention_may_be_told_that_it_has_one_head() -> None:
    assert get_attention("mqa", EMBED, HEADS, num_kv_heads=1).num_kv_heads == 1


@pytest.mark.parametrize("cls", [MaskedAttention, NaiveAttention])
def test_a_users_mask_is_checked(cls: type[MaskedAttention]) -> None:
    x = random(1, 5, EMBED, dtype=torch.float32)
    module = cls(EMBED, HEADS)
    torch.testing.assert_close(module(x, lambda b, h, q, k: True)[0], module(x)[0])
    wrong: list[tuple[Any, str]] = [
        (lambda b, h, q, k: q - k, "a mask must return a condition"),
        (lambda b, h, q, k: (q >= k) and (k > 0), "cannot branch on its arguments"),
        (lambda q, k: q >= k, r"mask must be a function mask\(b, h, q, k\), got <lambda>\(q, k\): too many"),
    ]
    for mask, text in wrong:
        with pytest.raises(TypeError, match=text):
            module(x, mask)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: NaiveAttention(30, 4), ValueError, "embed_dim must be a multiple of num_heads, got 30 and 4"),
        (lambda: NaiveAttention(0, 4), ValueError, "embed_dim must be a positive int, got 0"),
        (lambda: NaiveAttention(32, 4.0), TypeError, "num_heads must be a positive int, got 4.0"),
        (lambda: NaiveAttention(32, True), TypeError, "num_heads must be a positive int, got True"),
        (lambda: GroupedQueryAttention(32, 4, 3), ValueError, "a multiple of num_kv_heads, got 4 and 3"),
        (lambda: GroupedQueryAttention(32, 4, None), TypeError, "num_kv_heads must be a positive int, got None"),
        (lambda: GroupedQueryAttention(32, 4, 8), ValueError, "num_heads must be a multiple of num_kv_heads, got"),
        (lambda: SlidingWindowAttention(32, 4, 0), ValueError, "window_size must be a positive int, got 0"),
        (lambda: SlidingWindowAttention(32, 4, None), TypeError, "window_size must be a positive int, got None"),
        (lambda: FlashAttentionV2(32, 4, block_size=-1), ValueError, "block_size must be a positive int, got -1"),
        (lambda: NaiveAttention(32, 4, dropout=1.0), ValueError, "dropout must be at least 0 and less than 1, got 1.0"),
        (lambda: NaiveAttention(32, 4, dropout=-0.1), ValueError, "dropout must be at least 0 .*, got -0.1"),
        (lambda: NaiveAttention(32, 4, dropout="0"), TypeError, "dropout must be a number .*, got '0'"),
        (lambda: MaskedAttention(32, 4, mask=3), TypeError, "mask must be a tileattn mask or a function"),
        (lambda: MaskedAttention(32, 4)(torch.zeros(1, 8, 32), torch.ones(8, 8)), TypeError, "mask must be a tileattn"),
        (lambda: NaiveAttention(32, 4)(torch.zeros(1, 8, 32), Documents(torch.arange(9))), ValueError, "ids must have"),
        (lambda: NaiveAttention(32, 4)(torch.zeros(8, 32)), ValueError, r"x must have .*embed_dim=32\), got \(8, 32\)"),
        (lambda: NaiveAttention(32, 4)(torch.zeros(1, 8, 31)), ValueError, r"x must have shape .*, got \(1, 8, 31\)"),
        (lambda: FlashAttentionV2(32, 4).get_causal_efficiency(0), ValueError, "seqlen must be a positive int, got 0"),
        (lambda: MultiQueryAttention(32, 4).get_memory_usage(0, 1), ValueError, "batch must be a positive int, got 0"),
        (
            lambda: get_attention("flash_v3", 32, 4),
            ValueError,
            "Unknown attention type: name must be one of naive, flash_v1, flash_v2, sliding_window, gqa, grouped_query,"
            " mqa, multi_query, masked, triton, triton_flash, got 'flash_v3'",
        ),
        (lambda: get_attention("mqa", 32, 4, num_kv_heads=2), ValueError, "must be 1 or None for 'mqa', got 2"),
        (lambda: get_attention("mqa", 32, 4, num_kv_heads="1"), TypeError, "num_kv_heads must be a positive.*'1'"),
        (lambda: get_attention(["naive"], 32, 4), TypeError, r"name must be one of naive, .*, got \['naive'\]"),
        (lambda: NaiveAttention(32, 4, causal="no"), TypeError, "causal must be True or False, got 'no'"),
        (lambda: NaiveAttention(32, 4, bias="no"), TypeError, "bias must be True or False, got 'no'"),
        (lambda: NaiveAttention(32, 4, dtype=torch.int32), TypeError, "dtype must be .*, got torch.int32"),
        (lambda: NaiveAttention(32, 4, dtype="float32"), TypeError, "dtype must be torch.float16, .*, got 'float32'"),
        (lambda: NaiveAttention(32, 4)([1]), TypeError, "x must be a torch.Tensor, got list"),
        (lambda: MaskedAttention(32, 4)(torch.zeros(1, 8, 32).half()), TypeError, "x must be .*, got torch.float16"),
        (lambda: MultiQueryAttention(32, 4)(torch.zeros(1, 8, 32).long()), TypeError, "x must be .*, got torch.int64"),
        (lambda: MultiQueryAttention(32, 4).get_memory_usage(2, 9, "half"), TypeError, "dtype must be .*, got 'half'"),
        (lambda: get_attention("masked", 32, 4, block_size=2), TypeError, "'masked' takes no block_size, got 2"),
    ],
)  # fmt: skip
def test_errors(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
