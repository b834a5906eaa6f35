"""tileattn.compat.transformers without a model: the parts of a mask, the attention function, refusals."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

import transformers
from transformers import masking_utils as theirs

import tileattn
import tileattn.compat.transformers as adapter
from tests.package.test_import import inside, modules_after
from tests.tools.positions import Positions
from tests.variant.test_mask_ranges import assert_sound, assert_tight
from tileattn import Causal, Documents, SlidingWindow, SoftCap
from tileattn.compat.transformers.attention import attend
from tileattn.compat.transformers.mask import MaskParts, make_mask
from tileattn.compat.transformers.patterns import DenseMask, ShiftedWindow
from tileattn.compat.transformers.symbols import Pattern, understood
from tileattn.installation import pip_install
from tileattn.variant.masks import KeyPadding

BATCH = 2
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
PLACES_IN = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])  # in its sequence


# --- Mask functions ---


def same_sequence(b: Any, h: Any, q: Any, k: Any) -> Any:
    return SEQUENCES[b, q] == SEQUENCES[b, k]


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A window as a user may write it."""
    return (k < q + 1) & (q - k < 4)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Pattern | None]] = {
    "causal": (theirs.causal_mask_function, Pattern(None, 0)),
    "everything": (theirs.bidirectional_mask_function, Pattern()),
    "window": (theirs.sliding_window_causal_mask_function(4), Pattern(3, 0)),
    "window on both sides": (theirs.sliding_window_bidirectional_mask_function(4), Pattern(4, 4)),
    "packed": (
        theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(SEQUENCES)),
        Pattern(None, 0, SEQUENCES),
    ),
    "packed, window": (
        theirs.and_masks(theirs.sliding_window_causal_mask_function(3), same_sequence), Pattern(2, 0, SEQUENCES)
    ),
    "packed, numbered": (lambda b, h, q, k: same_sequence(b, h, q, k) & (PLACES_IN[b, k] <= PLACES_IN[b, q]),
                         Pattern(None, 0, SEQUENCES)),  # as transformers 5.23 has it
    "numbered": (lambda b, h, q, k: PLACES_IN[b, k] <= PLACES_IN[b, q], None),
    "a user's window": (near, Pattern(3, 0)),
    "chunks": (theirs.chunked_causal_mask_function(4, torch.tensor([0, 1])), None),
    "blocks": (theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(SEQUENCES - 1)), None),
    "blocks alone": (theirs.and_masks(theirs.causal_mask_function, theirs.blockwise_overlay(SEQUENCES - 1)), None),
    "two kinds of sequences": (
        theirs.and_masks(same_sequence, theirs.packed_sequence_mask_function(SEQUENCES // 2)), None
    ),
    "a number of each key": (lambda b, h, q, k: SEQUENCES[b, k] == 1, None),
    "other keys": (lambda b, h, q, k: q != k, None),
    "a product": (lambda b, h, q, k: q * k < 9, None),
    "no key before": (lambda b, h, q, k: k <= q - 1, None),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_are_understood_or_not(name: str) -> None:
    function, pattern = FUNCTIONS[name]
    window = understood(function)
    assert (window is None) == (pattern is None)
    if window is not None and pattern is not None:
        assert (window.left, window.right) == (pattern.left, pattern.right)
        assert window.sequences is pattern.sequences


PLACES: dict[str, tuple[int, int, int | Tensor, int]] = {  # q_length, kv_length, q_offset, kv_offset
    "aligned": (11, 11, 0, 0),
    "cache": (4, 11, 7, 0),  # queries behind earlier keys
    "slots": (4, 11, 3, 0),  # ... and before unused ones
    "slots on the device": (4, 11, torch.tensor(3), 0),
    "one of slots": (1, 11, 5, 0),
    "sliding cache": (2, 6, 9, 5),  # keys that do not begin at 0
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_parts_say_what_the_mask_of_transformers_says(name: str) -> None:
    function, pattern = FUNCTIONS[name]
    for place, (q_length, kv_length, q_offset, kv_offset) in PLACES.items():
        for padding in ("none", "left", "right", "holes", "shorter", "longer"):
            arguments = (BATCH, q_length, kv_length, q_offset, kv_offset, function)
            seen = _padding(padding, kv_offset + kv_length)
            parts = make_mask(*arguments, attention_mask=seen, allow_is_causal_skip=True)
            expected = theirs.sdpa_mask(*arguments, attention_mask=seen, allow_is_causal_skip=False)
            assert parts.shape == expected.shape
            assert torch.equal(parts.tensor(), expected), (place, padding)
            told = pattern is not None and (pattern.sequences is None or "slots" not in place)
            assert (parts.dense is None) == told, (place, padding)


def _padding(kind: str, total: int) -> Tensor | None:
    place = torch.arange(total)
    rows = {
        "left": [place >= 2, place >= 0],
        "right": [place < total - 3, place >= 0],
        "holes": [(place % 4 != 1), place < 3],
        "shorter": [place[: total - 2] >= 1] * 2,  # the rest is padding: slots of a cache
        "longer": [torch.arange(total + 3) >= 1] * 2,
    }
    return torch.stack(rows[kind]) if kind != "none" else None


def test_known_masks_are_no_tensors() -> None:
    """Which parts they have; with nothing to hide there are none, so that the call is a plain one."""
    made = functools.partial(make_mask, BATCH, 11, 11)
    assert [type(part) for part in made().parts] == [Causal]
    assert made(mask_function=theirs.bidirectional_mask_function).parts == ()
    window = theirs.sliding_window_causal_mask_function
    assert [type(part) for part in made(mask_function=window(4)).parts] == [SlidingWindow]
    assert [type(part) for part in made(mask_function=window(11)).parts] == [Causal]  # it hides nothing
    seen = torch.ones(BATCH, 11, dtype=torch.bool)
    assert [type(part) for part in made(attention_mask=seen).parts] == [Causal]  # it hides nothing either
    shorter = [make_mask(BATCH, 1, 11, torch.tensor(n), attention_mask=seen[:, :7]) for n in (6, 7)]
    assert [parts.padding is None for parts in shorter] == [True, False]  # slot 7 is hidden
    seen[0, 0] = False
    assert [type(part) for part in made(attention_mask=seen).parts] == [Causal, KeyPadding]
    packed = made(mask_function=FUNCTIONS["packed"][0])
    assert [type(part) for part in packed.parts] == [Causal, Documents]
    assert make_mask(BATCH, 1, 11, q_offset=10).parts == ()  # one query behind all keys
    prefill = make_mask(BATCH, 4, 11)  # into an empty static cache
    assert (prefill.keys, [type(part) for part in prefill.parts]) == (4, [Causal])
    step = make_mask(BATCH, 1, 11, q_offset=torch.tensor(4))
    assert [type(part) for part in step.parts] == [ShiftedWindow]


def test_a_users_function_is_not_interpreted() -> None:
    """The function may do anything. transformers runs it under vmap, where it gets tensors only."""
    parts = make_mask(BATCH, 11, 11, mask_function=theirs.causal_mask_function, use_vmap=True)
    assert [type(part) for part in parts.parts] == [DenseMask]
    assert torch.equal(parts.tensor(), make_mask(BATCH, 11, 11).tensor())


def test_nothing_waits_for_the_device() -> None:
    """Fake tensors have no values to wait for."""
    with FakeTensorMode():
        sequences, seen = torch.zeros(BATCH, 11, dtype=torch.int64), torch.ones(BATCH, 11, dtype=torch.bool)
        packed = theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(sequences))
        for function in (theirs.causal_mask_function, theirs.sliding_window_causal_mask_function(4), packed):
            for q_offset in (7, torch.tensor(7)):
                for attention_mask in (None, seen):
                    make_mask(BATCH, 4, 11, q_offset, 0, function, attention_mask)


def test_a_mask_that_was_made_ahead_stays() -> None:
    parts = make_mask(BATCH, 4, 11)
    assert make_mask(BATCH, 4, 4, attention_mask=parts) is parts
    config = transformers.LlamaConfig()
    config._attn_implementation = adapter.NAME
    adapter.register()
    embeds = torch.empty(BATCH, 4, 0)
    assert theirs.create_causal_mask(config, embeds, parts, None) is parts


def test_a_mask_moves_to_another_device() -> None:
    parts = make_mask(BATCH, 11, 11, attention_mask=_padding("left", 11), mask_function=FUNCTIONS["packed"][0])
    moved = parts.to("meta")
    assert moved.device == torch.device("meta")
    assert [type(part) for part in moved.parts] == [Causal, Documents, KeyPadding]
    assert moved.padding.keep.device.type == moved.sequences.ids.device.type == "meta"
    assert torch.equal(parts.to("cpu").tensor(), parts.tensor())


# --- Ranges of the masks that are made here ---


@st.composite
def shifted(draw: st.DrawFn, tensor: bool) -> Positions:
    seqlen_q, seqlen_k = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    bound = st.one_of(st.none(), st.integers(0, 10))
    left, right = draw(bound), draw(bound)
    shift: Any = draw(st.integers(-9, 4))
    mask = ShiftedWindow(left, right, torch.tensor([shift], dtype=torch.int32) if tensor else shift)
    return Positions(mask, BATCH, 1, seqlen_q, seqlen_k)


@pytest.mark.slow_except("tensor-keys", "number-queries", reason="0.8 s each")
@pytest.mark.parametrize("side", ["keys", "queries"])
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_ranges_of_shifted_windows(tensor: bool, side: str) -> None:
    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(case=shifted(tensor))
    def check(case: Positions) -> None:
        assert_sound(case, getattr(case, side))
        assert_tight(case, getattr(case, side))

    check()


# --- The attention function ---


def layer(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


def tensors(q_length: int = 5, kv_length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as layers have them, (batch, heads, seqlen, head_dim)."""
    torch.manual_seed(0)
    return torch.randn(2, 4, q_length, 8), torch.randn(2, 2, kv_length, 8), torch.randn(2, 2, kv_length, 6)


def own(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The same by tileattn's own function."""
    return tileattn.attention(q, k, v, layout="bhsd", **options).transpose(1, 2)


def test_arguments_arrive() -> None:
    q, k, v = tensors()
    sinks = torch.randn(4)
    options = {"scaling": 0.3, "softcap": 2.0, "s_aux": sinks.view(1, 4, 1, 1)}
    o, weights = attend(layer(), q, k, v, make_mask(2, 5, 5), **options)
    assert weights is None
    assert o.shape == (2, 5, 4, 6)
    assert torch.equal(o, own(q, k, v, causal=True, scale=0.3, score_mod=SoftCap(2.0), sink=sinks))


def test_numbers_may_be_numpys_or_tensors() -> None:
    q, k, v = tensors()
    expected = own(q, k, v, causal=True, scale=0.5)
    for scaling in (np.float32(0.5), torch.tensor(0.5)):
        assert torch.equal(attend(layer(), q, k, v, make_mask(2, 5, 5), scaling=scaling)[0], expected)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": np.int64(5),
        "max_length_k": np.int32(5),
    }
    torch.testing.assert_close(attend(layer(is_causal=True), q, k, v, None, scaling=0.5, **packed)[0], expected)


def test_dropout_and_determinism_arrive() -> None:
    q, k, v = tensors()
    torch.manual_seed(1)
    o, _ = attend(layer(), q, k, v, make_mask(2, 5, 5), dropout=0.4, deterministic=True)
    torch.manual_seed(1)
    assert torch.equal(o, own(q, k, v, causal=True, dropout_p=0.4, deterministic=True))
    assert not torch.equal(o, own(q, k, v, causal=True))


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_a_mask_is_causal_counts(is_causal: bool) -> None:
    q, k, v = tensors()
    expected = own(q, k, v, causal=is_causal)
    assert torch.equal(attend(layer(is_causal=is_causal), q, k, v, None)[0], expected)
    assert torch.equal(attend(layer(is_causal=not is_causal), q, k, v, None, is_causal=is_causal)[0], expected)


def test_without_a_mask_a_window_counts() -> None:
    q, k, v = tensors()
    o, _ = attend(layer(is_causal=True), q, k, v, None, sliding_window=3)
    assert torch.equal(o, own(q, k, v, mask=SlidingWindow(2, 0)))


def test_a_users_own_mask() -> None:
    q, k, v = tensors(3)
    seen = torch.rand(2, 1, 3, 5) < 0.6
    added = torch.randn(2, 1, 3, 5)
    expected = torch.nn.functional.scaled_dot_product_attention
    for mask in (seen, added, torch.where(seen, 0.0, -torch.inf)):
        o, _ = attend(layer(), q, k, v, mask)
        assert torch.allclose(o.transpose(1, 2), expected(q, k, v, attn_mask=mask, enable_gqa=True).nan_to_num(0.0))


def test_any_strides() -> None:
    q, k, v = tensors()
    strange = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert strange.stride(-1) != 1
    assert torch.equal(attend(layer(), strange, k, v, make_mask(2, 5, 5))[0], own(q, k, v, causal=True))


# --- Refusals ---

STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)
SHIFTED = make_mask(2, 5, 5, q_offset=torch.tensor(0))
CHUNKS = make_mask(2, 5, 5, mask_function=lambda b, h, q, k: (k <= q) & (q // 3 == k // 3))
PADDED = make_mask(2, 5, 5, attention_mask=_padding("left", 5))

REFUSALS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "output_attentions": (NotImplementedError, 'attn_implementation="eager"', {"output_attentions": True}),
    "head_mask": (NotImplementedError, "head_mask", {"head_mask": torch.ones(4)}),
    "sparse": (NotImplementedError, "selected keys", {"indices": torch.zeros(1)}),
    "unknown": (TypeError, r"register\(ignore=\('novelty',\)\)", {"novelty": 3}),
    "contradiction": (ValueError, r"config\.is_causal = False", {"is_causal": False}),
    "neither": (ValueError, "neither a mask nor is_causal", {"attention_mask": None, "module": layer()}),
    "where": (ValueError, "where the queries stand", {"attention_mask": None, "query": tensors(3)[0]}),
    "window": (ValueError, "to its right", {"attention_mask": None, "is_causal": False, "sliding_window": 3}),
    "2-D": (ValueError, "attention_mask must have shape", {"attention_mask": torch.ones(2, 5)}),
    "integers": (TypeError, "attention_mask must be bool.*got torch.int64",
                 {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.int64)}),
    "no mask": (TypeError, "got dict", {"attention_mask": {"full_attention": None}}),
    "lengths": (ValueError, "made for 4 queries and 5 keys", {"attention_mask": make_mask(2, 4, 5, q_offset=1)}),
    "keys alone": (ValueError, "got no cu_seq_lens_q", {"cu_seq_lens_k": STARTS}),
    "packed and padded": (NotImplementedError, "padding mask.* leave attention_mask out",
                          {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "attention_mask": PADDED}),
    "packed chunks": (NotImplementedError, "chunks of Llama 4.* cannot be packed by cu_seq_lens; use position_ids",
                      {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "attention_mask": CHUNKS}),
    "packed, own mask": (NotImplementedError, "a mask of your own: leave attention_mask out",
                         {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "attention_mask": torch.ones(2, 1, 5, 5)}),
    "packed, static cache": (NotImplementedError, "cannot go with a static cache",
                             {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "attention_mask": SHIFTED}),
    "packed and biased": (NotImplementedError, "position_bias",
                          {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "position_bias": torch.zeros(1, 4, 5, 5)}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSALS))
def test_what_is_not_understood_is_one_clear_error(name: str) -> None:
    error, says, changes = REFUSALS[name]
    q, k, v = tensors()
    arguments = {
        "module": layer(is_causal=True),
        "query": q,
        "key": k,
        "value": v,
        "attention_mask": make_mask(2, 5, 5),
    }
    with pytest.raises(error, match=says):
        attend(**{**arguments, **changes})


def test_what_does_not_concern_attention_may_pass() -> None:
    q, k, v = tensors()
    harmless = {"position_ids": torch.arange(5), "use_cache": True, "num_items_in_batch": 3, "output_attentions": False}
    o, _ = attend(layer(), q, k, v, make_mask(2, 5, 5), **harmless, novelty=3, ignored=frozenset({"novelty"}))
    assert torch.equal(o, own(q, k, v, causal=True))


def test_a_padding_mask_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(batch, keys\).*got \(2, 5, 5\)"):
        make_mask(2, 5, 5, attention_mask=torch.ones(2, 5, 5))


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: torch.zeros(2, 1, 5, 5) + mask,
        lambda mask: torch.where(mask, 0.0, -torch.inf),
        lambda mask: mask[:, :, :, :3],
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.masked_fill(mask, 0.0),
    ],
)
def test_a_model_that_computes_with_its_mask_is_told(compute: Callable[[MaskParts], Any]) -> None:
    with pytest.raises((NotImplementedError, AttributeError), match="this model computes with its attention mask"):
        compute(make_mask(2, 5, 5))


# --- Registration ---


def test_importing_it_imports_no_transformers() -> None:
    """Users who do not register it need not wait for the import of transformers."""
    (loaded,) = modules_after("import tileattn.compat.transformers")
    assert inside(loaded, "transformers") == set()


@pytest.fixture
def registered() -> Iterator[None]:
    yield
    transformers.AttentionInterface._global_mapping.pop(adapter.NAME, None)
    transformers.AttentionMaskInterface._global_mapping.pop(adapter.NAME, None)


class Layer(nn.Module):
    is_causal = True


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"backend": "nope"}, ValueError, "backend must be one of 'tilelang', .*got 'nope'"),
        ({"ignore": "novelty"}, TypeError, "ignore must be names in a list.*got 'novelty'"),
        ({"ignore": None}, TypeError, "ignore must be names in a list.*got None"),
        ({"ignore": [3]}, TypeError, r"ignore must be names in a list.*got \[3\]"),
    ],
)
def test_register_refuses_at_once(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        adapter.register(**arguments)


@pytest.mark.usefixtures("registered")
def test_register_registers_both() -> None:
    adapter.register(backend="mma", ignore=["novelty"])
    q, k, v = tensors()
    call = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(adapter.NAME, None)
    with pytest.raises(NotImplementedError, match="backend='mma'"):
        call(Layer(), q, k, v, None, novelty=3)
    assert theirs.ALL_MASK_ATTENTION_FUNCTIONS[adapter.NAME] is make_mask
    adapter.register()
    call = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(adapter.NAME, None)
    assert torch.equal(call(Layer(), q, k, v, None)[0], own(q, k, v, causal=True))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=re.escape(pip_install("transformers"))):
        adapter.register()


def test_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__version__ = "5.2.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match=r"5\.17 or newer, got 5\.2\.0"):
        adapter.register()
