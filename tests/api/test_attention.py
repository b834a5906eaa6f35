"""`attention`: its errors, and the shapes, dtypes and layouts of its results. Values: see the conformance
suite."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import ALiBi, Bias, Causal, Documents, FunctionMask, PrefixLM, SlidingWindow, SoftCap, attention
from tileattn.runtime import prepared, tables
from tileattn.runtime.dispatch import BACKENDS

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, KV_HEADS, DIM, DIM_V = 2, 5, 7, 4, 2, 8, 16


def random(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), **options)


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def shape_of(name: str, layout: str = "bshd", **sizes: int) -> tuple[int, ...]:
    """The shape of q, k or v; `sizes` replace batch, seqlen, heads or dim."""
    seqlen, heads = (SEQLEN_Q, HEADS) if name == "q" else (SEQLEN_K, KV_HEADS)
    facts = {"batch": BATCH, "seqlen": seqlen, "heads": heads, "dim": DIM_V if name == "v" else DIM} | sizes
    order = ("batch", "seqlen", "heads", "dim") if layout == "bshd" else ("batch", "heads", "seqlen", "dim")
    return tuple(facts[fact] for fact in order)


def operands(layout: str = "bshd", **options: Any) -> dict[str, Any]:
    return {name: random(*shape_of(name, layout), **options) for name in "qkv"}


def call(**changes: Any) -> Any:
    """Attention of valid arguments, but for the changes."""
    arguments = operands(changes.get("layout", "bshd")) if changes.get("layout") == "bhsd" else operands()
    arguments |= changes
    q, k, v = (arguments.pop(name) for name in "qkv")
    return attention(q, k, v, **arguments)


def message(*parts: object) -> str:
    """A pattern of literal parts with anything between."""
    return ".*".join(re.escape(str(part)) for part in parts)


# --- Refused: q, k and v ---


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [None, [[1.0]], 3.0, "q"], ids=lambda value: type(value).__name__)
def test_not_a_tensor(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=message(name, "must be a torch.Tensor, got", type(value).__name__)):
        call(**{name: value})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("shape", [(), (5, 8), (2, 5, 8), (1, 2, 5, 4, 8)], ids=str)
def test_not_four_dimensions(name: str, layout: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=message(f"{name} must have 4 dimensions", "(batch, seqlen, heads", shape)):
        call(**{name: zeros(*shape), "layout": layout})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_last_dimension_not_contiguous(name: str, layout: str) -> None:
    strided = zeros(*shape_of(name, layout)).transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=message(name, "contiguous last dimension", strided.stride(), ".contiguous()")):
        call(**{name: strided, "layout": layout})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fnuz], ids=str)
def test_dtype_of_all(dtype: torch.dtype) -> None:
    says = message("q must be float16, bfloat16, float32, float64 or float8_e4m3fn, got", dtype)
    with pytest.raises(TypeError, match=says):
        call(**{name: value.to(dtype) for name, value in operands().items()})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_dtypes_that_differ(name: str) -> None:
    with pytest.raises(TypeError, match=message("q, k and v must have one dtype, got", "torch.float16")):
        call(**{name: operands()[name].half()})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_devices_that_differ(name: str) -> None:
    with pytest.raises(ValueError, match=message("q, k and v must be on one device, got", "meta")):
        call(**{name: operands()[name].to("meta")})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_sparse_tensors(name: str) -> None:
    with pytest.raises(TypeError, match=message(name, "must be a dense tensor, got layout torch.sparse_coo")):
        call(**{name: operands()[name].to_sparse()})


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("q", {"batch": 3}, ("q, k and v must have one batch size, got", 3, 2)),
        ("k", {"batch": 1}, ("q, k and v must have one batch size, got", 2, 1)),
        ("v", {"batch": 3}, ("q, k and v must have one batch size, got", 2, 3)),
        ("q", {"dim": 16}, ("q and k must have one head_dim, got 16 and 8",)),
        ("k", {"dim": 4}, ("q and k must have one head_dim, got 8 and 4",)),
        ("v", {"dim": 0}, ("head dims must be at least 1", "0 for v")),
        ("k", {"seqlen": 6}, ("k and v must have one seqlen", "6 and 2 in k, 7 and 2 in v")),
        ("v", {"seqlen": 8}, ("k and v must have one seqlen", "7 and 2 in k, 8 and 2 in v")),
        ("v", {"heads": 4}, ("k and v must have", "number of heads", "7 and 2 in k, 7 and 4 in v")),
        ("q", {"heads": 3}, ("heads of q must be a multiple of the heads of k and v, got 3 and 2",)),
        ("q", {"heads": 1}, ("heads of q must be a multiple of the heads of k and v, got 1 and 2",)),
        ("q", {"heads": 0}, ("heads of q must be a multiple of the heads of k and v, got 0 and 2",)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(layout: str, name: str, sizes: dict[str, int], says: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=message(*says)):
        call(**{name: random(*shape_of(name, layout, **sizes)), "layout": layout})


def test_sizes_of_zero() -> None:
    with pytest.raises(ValueError, match="head dims must be at least 1, got 0 for q and k"):
        call(q=zeros(*shape_of("q", dim=0)), k=zeros(*shape_of("k", dim=0)))
    with pytest.raises(ValueError, match="multiple of the heads of k and v, got 4 and 0"):
        call(k=zeros(*shape_of("k", heads=0)), v=zeros(*shape_of("v", heads=0)))


def test_the_other_layout_is_named_where_heads_do_not_fit() -> None:
    with pytest.raises(ValueError, match=message("got 5 and 7", "layout='bhsd'")):
        attention(*operands("bshd").values(), layout="bhsd")


# --- Refused: options ---


def identities(cases: list[tuple[str, Any, type[Exception], tuple[object, ...]]]) -> list[str]:
    return [f"{option}-{type(value).__name__}" for option, value, *_ in cases]


OPTIONS: list[tuple[str, Any, type[Exception], tuple[object, ...]]] = [
    *[("layout", value, ValueError, ('layout must be "bshd" or "bhsd", got', repr(value)))
      for value in ("sbhd", "", None, 4, ["bshd"])],
    *[("scale", value, ValueError, ("scale must be a finite number or None, got", value))
      for value in (float("nan"), float("inf"), -float("inf"))],
    *[("scale", value, TypeError, ("scale must be a finite number or None, got", repr(value)))
      for value in ("1.0", True, [1.0])],
    *[("dropout_p", value, ValueError, ("dropout_p must be a probability, a number from 0 to 1, got", repr(value)))
      for value in (1.5, -1.0, float("nan"), 2)],
    *[("dropout_p", value, TypeError, ("dropout_p must be a probability, a number from 0 to 1, got", repr(value)))
      for value in ("no", None, True, [0.5])],
    *[("backend", value, ValueError,
       ("backend must be one of 'tilelang', 'triton', 'mma', 'torch' or None, got", repr(value)))
      for value in ("cuda", "", "Torch", 3, ["torch"])],
    *[(flag, value, TypeError, (flag, "must be True or False, got", repr(value)))
      for flag in ("causal", "return_lse", "deterministic") for value in ("no", 1, 3, None, [True])],
    *[("mask", value, TypeError, ("mask must be a tileattn mask or a function mask(b, h, q, k), got", name))
      for value, name in (
          ("causal", "str"), (True, "bool"), (zeros(5, 7).bool(), "Tensor"), ([Causal()], "list"), (3, "int"),
          (Causal, "the class Causal"), (SoftCap(3.0), "SoftCap"),
      )],
    *[("score_mod", value, TypeError, ("score_mod must be a function score_mod(score, b, h, q, k)", "got", name))
      for value, name in (
          ("softcap", "str"), (30.0, "float"), (zeros(5, 7), "Tensor"), ([SoftCap(3.0), 3], "int"),
          (SoftCap, "the class SoftCap"), (Causal(), "Causal"), ([[SoftCap(3.0)]], "list"),
      )],
    *[("sink", value, TypeError, ("sink must be a floating-point tensor, got", name))
      for value, name in ((1.0, "float"), ([0.0] * 4, "list"), (torch.arange(4), "torch.int64"))],
    *[("sink", zeros(*shape), ValueError, ("sink must have shape (heads,) = (4,), got", shape))
      for shape in ((3,), (2,), (1,), (), (4, 1), (2, 4))],
    ("sink", zeros(4, device="meta"), ValueError, ("sink must be on q's device cpu, got meta",)),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("option", "value", "error", "says"), OPTIONS, ids=identities(OPTIONS))
def test_options(layout: str, option: str, value: Any, error: type[Exception], says: tuple[object, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        call(**{"layout": layout, option: value})


@pytest.mark.parametrize("flag", ["causal", "return_lse", "deterministic"])
def test_a_plan_of_true_is_not_that_of_one(flag: str) -> None:
    call(**{flag: True})
    with pytest.raises(TypeError, match=f"{flag} must be True or False, got 1"):
        call(**{flag: 1})
    with pytest.raises(TypeError, match=f"{flag} must be True or False, got 1"):
        call(**{flag: 1, "score_mod": SoftCap(3.0)})


def test_no_keyword_is_swallowed() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        call(is_causal=True)


# --- Refused: tensors of masks and score modifications ---

VARIANTS: list[tuple[str, Any, type[Exception], tuple[object, ...]]] = [
    ("mask", Documents(torch.arange(6)), ValueError,
        ("Documents: ids must have shape (batch, seqlen_k) = (2, 7) or (7,), got", 6)),
    ("mask", Documents(zeros(3, 7).int()), ValueError, ("Documents: ids must have shape", "(2, 7)", "got (3, 7)")),
    ("mask", Causal() & Documents(torch.arange(6)), ValueError, ("Documents: ids must have shape",)),
    ("mask", Documents(torch.arange(6)) | Causal(), ValueError, ("Documents: ids must have shape",)),
    ("mask", Documents(zeros(7, device="meta").int()), ValueError, ("must be on q's device cpu, got", "meta")),
    ("mask", PrefixLM(zeros(3).int()), ValueError, ("PrefixLM: prefix must have shape (2,), got (3,)",)),
    ("mask", PrefixLM(zeros(2, device="meta").int()), ValueError, ("must be on q's device cpu, got", "meta")),
    ("score_mod", ALiBi(zeros(2)), ValueError, ("ALiBi: slopes must have shape (heads,) = (4,)", "got (2,)")),
    ("score_mod", ALiBi(zeros(4, 2)), ValueError, ("ALiBi: slopes must have shape", "(2, 4), got (4, 2)")),
    ("score_mod", ALiBi(torch.arange(4)), TypeError, ("ALiBi: slopes must be a floating-point tensor, got", "int64")),
    ("score_mod", ALiBi([1.0] * 4), TypeError, ("ALiBi: slopes must be a floating-point tensor, got list",)),  # type: ignore[arg-type]
    ("score_mod", ALiBi(zeros(4, device="meta")), ValueError, ("must be on q's device cpu", "(4,) on meta")),
    ("score_mod", Bias(zeros(5, 7)), ValueError, ("Bias: tensor must have shape", "(2, 4, 5, 7), got (5, 7)")),
    ("score_mod", Bias(zeros(1, 1, 5, 6)), ValueError, ("Bias: tensor must have shape", "got (1, 1, 5, 6)")),
    ("score_mod", Bias(zeros(1, 1, 5, 1)), ValueError, ("Bias: tensor must have shape", "got (1, 1, 5, 1)")),
    ("score_mod", Bias(zeros(1, 2, 5, 7)), ValueError, ("Bias: tensor must have shape", "got (1, 2, 5, 7)")),
    ("score_mod", Bias(zeros(1, 4, 5, 7).bool()), TypeError, ("Bias: tensor must be a floating-point tensor", "bool")),
    ("score_mod", [SoftCap(3.0), Bias(zeros(5, 7))], ValueError, ("Bias: tensor must have shape",)),
    ("score_mod", Bias(zeros(1, 1, 5, 7, device="meta")), ValueError, ("must be on q's device cpu", "on meta")),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("option", "value", "error", "says"), VARIANTS, ids=identities(VARIANTS))
def test_variants(layout: str, option: str, value: Any, error: type[Exception], says: tuple[object, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        call(**{"layout": layout, option: value})


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: SlidingWindow(-1, 0), ValueError, ("SlidingWindow: left must lie in 0", "got -1")),
        (lambda: SlidingWindow(0, 2**30), ValueError, ("SlidingWindow: right must lie in 0", 2**30)),
        (lambda: SlidingWindow(1.5, 0), TypeError, ("SlidingWindow: left must be an int or None, got 1.5",)),
        (lambda: SlidingWindow(0, True), TypeError, ("SlidingWindow: right must be an int or None, got True",)),
        (lambda: PrefixLM(-1), ValueError, ("PrefixLM: prefix must lie in 0", "got -1")),
        (lambda: PrefixLM(2.5), TypeError, ("PrefixLM: prefix must be an int or an integer tensor", "got 2.5")),
        (lambda: PrefixLM(zeros(2)), TypeError, ("PrefixLM: prefix must be an integer tensor, got torch.float32",)),
        (lambda: Documents([0, 1]), TypeError, ("Documents: ids must be an integer tensor, got list",)),
        (lambda: Documents(zeros(7)), TypeError, ("Documents: ids must be an integer tensor, got torch.float32",)),
        (lambda: Documents(zeros(1, 2, 7).int()), ValueError, ("Documents: ids must have shape", "got (1, 2, 7)")),
        (lambda: FunctionMask(3), TypeError, ("FunctionMask: fn must be a function", "got 3")),
        (lambda: SoftCap(0), ValueError, ("SoftCap: cap must be a positive finite number, got 0",)),
        (lambda: SoftCap(float("nan")), ValueError, ("SoftCap: cap must be a positive finite number, got nan",)),
        (lambda: SoftCap("30"), TypeError, ("SoftCap: cap must be a positive finite number, got '30'",)),
        (lambda: Causal() & True, TypeError, ("masks combine with masks, got bool",)),
        (lambda: Causal() | (lambda b, h, q, k: k == 0), TypeError, ("got function; wrap a function in FunctionMask",)),
    ],
)
def test_masks_and_modifications_check_their_own_numbers(build: Any, error: Any, says: tuple[object, ...]) -> None:
    with pytest.raises(error, match=message(*says)):
        build()


# --- Refused: by a backend ---


@pytest.mark.parametrize("options", [{}, {"mask": SlidingWindow(2, 0)}, {"layout": "bhsd", "causal": True}], ids=str)
def test_a_named_backend_that_refuses_says_why(options: dict[str, Any]) -> None:
    says = message("backend='tilelang' does not run this call", "float32 d8/16", "device 'cpu' is not one of", "sm_90a")
    for _ in range(2):  # the second time as well, when the choice may be remembered
        with pytest.raises(NotImplementedError, match=says) as raised:
            call(backend="tilelang", **options)
        assert "torch:" not in str(raised.value)


def test_the_error_of_an_unknown_backend_names_all_that_exist() -> None:
    with pytest.raises(ValueError, match=", ".join(repr(backend.name) for backend in BACKENDS)):
        call(backend="flash", mask=Causal())


# --- What comes back ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"mask": SlidingWindow(2, 1)}], ids=["plain", "mask"])
def test_shapes_and_dtypes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    o, lse = call(**operands(dtype=torch.float32) | {n: x.to(dtype) for n, x in operands().items()}, return_lse=True,
                  **options)  # fmt: skip
    assert (o.shape, o.dtype) == ((BATCH, SEQLEN_Q, HEADS, DIM_V), dtype)
    assert lse.shape == (BATCH, HEADS, SEQLEN_Q)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert o.is_contiguous()
    assert lse.is_contiguous()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"score_mod": SoftCap(2.0)}], ids=str)
def test_bhsd_is_a_view_of_the_same_result(options: dict[str, Any]) -> None:
    q, k, v = operands().values()
    o, lse = attention(q, k, v, return_lse=True, **options)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    o_bhsd, lse_bhsd = attention(*heads_first, layout="bhsd", return_lse=True, **options)
    assert o_bhsd.shape == (BATCH, HEADS, SEQLEN_Q, DIM_V)
    assert o_bhsd.transpose(1, 2).is_contiguous()
    assert torch.equal(o_bhsd.transpose(1, 2), o)
    assert torch.equal(lse_bhsd, lse)


def test_lse_comes_only_on_request() -> None:
    assert isinstance(call(), Tensor)
    assert torch.equal(call(), call(return_lse=True)[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": SlidingWindow(2, 0)}, {"sink": random(4)}], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
def test_nothing_to_compute(batch: int, seqlen_q: int, seqlen_k: int, layout: str, options: dict[str, Any]) -> None:
    q = random(*shape_of("q", layout, batch=batch, seqlen=seqlen_q))
    k, v = (random(*shape_of(name, layout, batch=batch, seqlen=seqlen_k)) for name in "kv")
    o, lse = attention(q, k, v, layout=layout, return_lse=True, **options)
    assert o.shape == shape_of("v", layout, batch=batch, seqlen=seqlen_q, heads=HEADS)
    assert torch.equal(o, torch.zeros_like(o))
    expected = options["sink"][None, :, None] if "sink" in options else torch.tensor(-torch.inf)
    assert torch.equal(lse, expected.expand(batch, HEADS, seqlen_q))


def test_causal_is_short_for_a_mask() -> None:
    assert torch.equal(call(causal=True), call(mask=Causal()))
    assert not torch.equal(call(causal=True), call())


def test_causal_and_a_mask_both_hold() -> None:
    for mask in (SlidingWindow(2, 2), lambda b, h, q, k: (q + k) % 2 == 0):
        wrapped = mask if isinstance(mask, tileattn.Mask) else FunctionMask(mask)
        got = call(mask=mask, causal=True)
        assert torch.equal(got, call(mask=Causal() & wrapped))
        assert not torch.equal(got, call(mask=mask))
        assert not torch.equal(got, call(causal=True))


def test_scale_is_by_default_that_of_the_head_dim() -> None:
    assert torch.equal(call(), call(scale=DIM**-0.5))
    assert not torch.equal(call(), call(scale=1.0))
    assert torch.equal(call(scale=1), call(scale=1.0))


def test_a_sequence_of_modifications_is_applied_in_order() -> None:
    cap, alibi = SoftCap(0.5), ALiBi(random(HEADS))
    assert torch.equal(call(score_mod=[cap]), call(score_mod=cap))
    assert torch.equal(call(score_mod=()), call())
    assert not torch.equal(call(score_mod=[cap, alibi]), call(score_mod=(alibi, cap)))


def test_results_do_not_share_memory() -> None:
    first = call()
    kept = first.clone()
    call(q=-operands()["q"])
    assert torch.equal(first, kept)


# --- Prepared calls ---


def changed(tensors: tuple[Tensor, ...]) -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Plain calls that differ from (tensors, {}) in one thing each."""
    q, k, v = tensors

    def each(change: Any) -> tuple[Tensor, ...]:
        return tuple(change(x) for x in tensors)

    return {
        "dtype": (each(torch.Tensor.double), {}),
        "half": (each(torch.Tensor.half), {}),
        "strides": (each(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), {}),
        "offset": (each(lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)), {}),
        "expanded": ((q, *(x[:, :, :1].expand_as(x) for x in (k, v))), {}),
        "seqlen_q": ((q[:, :3], k, v), {}),
        "seqlen_k": ((q, k[:, :3], v[:, :3]), {}),
        "heads": ((q[:, :, :2], k, v), {}),
        "head_dim_v": ((q, k, v[..., :4]), {}),
        "batch": (each(lambda x: x[:1]), {}),
        "grad": ((q.clone().requires_grad_(), k, v), {}),
        "causal": (tensors, {"causal": True}),
        "scale": (tensors, {"scale": 0.1}),
        "scale 1": (tensors, {"scale": 1}),
        "negative scale": (tensors, {"scale": -1.0}),
        "lse": (tensors, {"return_lse": True}),
        "backend": (tensors, {"backend": "torch"}),
        "bhsd": (each(lambda x: x.transpose(1, 2)), {"layout": "bhsd"}),
        "swapped layout": (each(lambda x: x[:, :2, :2]), {"layout": "bhsd"}),
    }


def test_a_changed_call_never_meets_another_calls_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tuple(operands().values())
    calls = {"as it is": (tensors, {}), **changed(tensors)}
    expected = {}
    for name, (arguments, options) in calls.items():
        monkeypatch.setattr(prepared, "FORWARDS", {})
        expected[name] = attention(*arguments, **options)
    monkeypatch.setattr(prepared, "FORWARDS", {})
    for _ in range(2):
        for name, (arguments, options) in calls.items():
            got = attention(*arguments, **options)
            for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, expected[name]))):
                assert torch.equal(x, y), name
                assert x.requires_grad == y.requires_grad, name
                assert x.dtype == y.dtype, name
    assert len(prepared.FORWARDS) == len(calls)


def test_no_grad_and_grad_are_two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FORWARDS", {})
    q = operands()["q"].requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not call(q=q).requires_grad
        assert call(q=q).requires_grad


def test_bad_calls_are_refused_after_good_ones() -> None:
    """A refused call leaves no prepared call behind."""
    call()
    plans = dict(prepared.FORWARDS)
    for bad in ({"scale": float("nan")}, {"layout": "x"}, {"backend": "x"}, {"dropout_p": 1.5}):
        for _ in range(2):
            with pytest.raises((ValueError, NotImplementedError)):
                call(**bad)
    assert plans == prepared.FORWARDS


def test_strides_are_checked_again_where_shapes_are_known() -> None:
    call()
    for name, x in operands().items():
        with pytest.raises(ValueError, match=message(name, "contiguous last dimension")):
            call(**{name: x.transpose(2, 3).contiguous().transpose(2, 3)})


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FORWARDS", {})
    monkeypatch.setattr(tables, "MOST", 8)
    for seqlen in range(1, 30):
        o = call(q=random(*shape_of("q", seqlen=seqlen)))
        assert o.shape[1] == seqlen
        assert len(prepared.FORWARDS) <= 8


# --- Gradients ---


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients(layout: str) -> None:
    """All tensors that carry a gradient have one, rows without keys included (seqlen_q > seqlen_k)."""

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        mods = [Bias(bias), ALiBi(slopes), SoftCap(2.0)]
        return attention(q, k, v, score_mod=mods, sink=sink, causal=True, layout=layout, return_lse=True)  # type: ignore[return-value]

    shapes = [
        shape_of("q", layout, batch=1, seqlen=4, heads=2, dim=3),
        shape_of("k", layout, batch=1, seqlen=3, heads=1, dim=3),
        shape_of("v", layout, batch=1, seqlen=3, heads=1, dim=2),
        (1, 2, 4, 3),
        (2,),
        (2,),
    ]
    leaves = [random(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(run, leaves)


def test_plain_gradients() -> None:
    leaves = [random(1, 3, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, causal=True), leaves)


def test_gradients_through_functorch() -> None:
    q, k, v = operands().values()
    by_functorch = torch.func.grad(lambda q: attention(q, k, v, causal=True).square().sum())(q)
    leaf = q.clone().requires_grad_()
    attention(leaf, k, v, causal=True).square().sum().backward()
    assert torch.equal(by_functorch, leaf.grad)


def test_a_parameter_is_a_tensor() -> None:
    q = torch.nn.Parameter(operands()["q"])
    o = call(q=q)
    assert torch.equal(o.detach(), call(q=q.detach().requires_grad_()).detach())
    o.sum().backward()
    assert q.grad is not None
