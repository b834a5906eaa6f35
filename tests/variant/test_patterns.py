"""Sparse patterns: what they allow by their definitions, in loops over positions; errors; attention under them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tileattn
from tests import fresh_process
from tests.tools import positions as strategies
from tileattn import Causal, Dilated, GlobalTokens, ImageTextDocuments, Mask, Neighborhood, SlidingWindow, Strided
from tileattn.variant.key import encode

Allowed = Callable[[int, int, int], bool]  # (batch element, query position, key position)

examples = settings(deadline=None, derandomize=True, max_examples=40)


# --- Definitions that share no code with the masks ---


def dilated(left: int | None, right: int | None, dilation: int) -> Allowed:
    def allowed(b: int, q: int, k: int) -> bool:
        before = left is None or q - k <= left
        behind = right is None or k - q <= right
        return before and behind and abs(q - k) % dilation == 0

    return allowed


def strided(stride: int, local: int) -> Allowed:
    return lambda b, q, k: k in {q - j for j in range(local + 1)} or k in range(q, -1, -stride)


def global_tokens(is_global: list[list[bool]]) -> Allowed:
    def allowed(b: int, q: int, k: int) -> bool:
        row = is_global[b % len(is_global)]
        return row[k] or (q >= 0 and row[q])

    return allowed


def neighborhood(shape: tuple[int, ...], window: tuple[int, ...]) -> Allowed:
    """The window of each coordinate, moved back by as much as it leaves the grid."""

    def unravelled(p: int) -> list[int]:
        coordinates = []
        for size in reversed(shape):
            p, coordinate = divmod(p, size)
            coordinates.insert(0, coordinate)
        return coordinates

    def seen(i: int, size: int, w: int) -> range:
        offsets = list(range(i - w // 2, i - w // 2 + w))
        while offsets[0] < 0:
            offsets = [x + 1 for x in offsets]
        while offsets[-1] >= size:
            offsets = [x - 1 for x in offsets]
        return range(offsets[0], offsets[-1] + 1)

    def allowed(b: int, q: int, k: int) -> bool:
        if not (0 <= q < math.prod(shape) and 0 <= k < math.prod(shape)):
            return False
        return all(j in seen(i, n, w) for i, j, n, w in zip(unravelled(q), unravelled(k), shape, window))

    return allowed


def images(documents: list[list[int]], numbers: list[list[int]]) -> Allowed:
    def allowed(b: int, q: int, k: int) -> bool:
        if q < 0 or documents[b][q] != documents[b][k]:
            return False
        return k <= q or (numbers[b][q] >= 0 and numbers[b][q] == numbers[b][k])

    return allowed


def assert_allows(mask: Mask, allowed: Allowed, seqlen_q: int, seqlen_k: int, batch: int = 2) -> None:
    case = strategies.Positions(mask, batch, 1, seqlen_q, seqlen_k)
    expected = [
        [[allowed(b, row + case.first, k) for k in range(seqlen_k)] for row in range(seqlen_q)] for b in range(batch)
    ]
    assert torch.equal(case.allowed[:, 0], torch.tensor(expected))


@examples
@given(strategies.sizes, strategies.sizes, st.integers(1, 5), strategies.lengths, strategies.lengths)
def test_dilated(left: int | None, right: int | None, dilation: int, seqlen_q: int, seqlen_k: int) -> None:
    mask = Dilated(left, right, dilation=dilation)
    assert_allows(mask, dilated(left, right, dilation), seqlen_q, seqlen_k)


@examples
@given(st.integers(1, 5), st.integers(0, 4), strategies.lengths, strategies.lengths)
def test_strided(stride: int, local: int, seqlen_q: int, seqlen_k: int) -> None:
    assert_allows(Strided(stride, local), strided(stride, local), seqlen_q, seqlen_k)


@examples
@given(st.integers(0, 12), strategies.lengths, strategies.lengths)
def test_a_number_of_global_tokens(count: int, seqlen_q: int, seqlen_k: int) -> None:
    assert_allows(GlobalTokens(count), global_tokens([[k < count for k in range(9)]]), seqlen_q, seqlen_k)


@examples
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=2, max_size=2), strategies.lengths)
def test_global_tokens_anywhere(rows: list[list[bool]], seqlen_q: int) -> None:
    assert_allows(GlobalTokens(torch.tensor(rows)), global_tokens(rows), seqlen_q, 7)
    assert_allows(GlobalTokens(torch.tensor(rows[:1])), global_tokens(rows[:1]), seqlen_q, 7)


@pytest.mark.parametrize(
    ("shape", "window"),
    [((9,), (4,)), ((9,), (9,)), ((4, 5), (3, 3)), ((5, 4), (2, 4)), ((3, 2, 4), (2, 1, 3)), ((3, 4, 3), (3, 3, 2))],
)
@pytest.mark.parametrize("beyond", [-3, 0, 4])
def test_neighborhoods(shape: tuple[int, ...], window: tuple[int, ...], beyond: int) -> None:
    seqlen_k = math.prod(shape) + beyond
    for seqlen_q in (seqlen_k, seqlen_k - 3, seqlen_k + 2):
        assert_allows(Neighborhood(shape, window), neighborhood(shape, window), seqlen_q, seqlen_k, batch=1)


def test_every_query_of_a_neighborhood_sees_a_whole_window() -> None:
    case = strategies.Positions(Neighborhood((6, 7), (3, 4)), 1, 1, 42, 42)
    assert (case.allowed.sum(-1) == 12).all()


def test_one_number_for_all_dimensions() -> None:
    assert repr(Neighborhood((4, 5, 6), 3)) == "Neighborhood((4, 5, 6), (3, 3, 3))"
    assert repr(Neighborhood(12, 5)) == "Neighborhood((12,), (5,))"


@examples
@given(st.data(), st.integers(1, 9))
def test_documents_of_images_and_text(data: Any, seqlen_q: int) -> None:
    def rows(low: int, high: int) -> list[list[int]]:
        row = st.lists(st.integers(low, high), min_size=7, max_size=7)
        return data.draw(st.lists(row, min_size=2, max_size=2))

    documents, numbers = rows(-1, 1), rows(-2, 1)
    mask = ImageTextDocuments(torch.tensor(documents), torch.tensor(numbers))
    assert_allows(mask, images(documents, numbers), seqlen_q, 7)


def test_ids_of_64_bits() -> None:
    ids, numbers = [[5, 5, 2**40, 2**40 + 2**32]], [[-(2**40), 2**33, 0, 2**33]]
    assert_allows(ImageTextDocuments(torch.tensor(ids), torch.tensor(numbers)), images(ids, numbers), 4, 4, batch=1)


def test_tiles_of_other_documents_are_skipped() -> None:
    mask = ImageTextDocuments(torch.arange(256) // 64, torch.where(torch.arange(256) % 64 < 40, 0, -1))
    tile = (torch.tensor(64), torch.tensor(95))
    assert [int(x) for x in mask.kv_range(0, 0, *tile, 256)] == [64, 104]
    assert [int(x) for x in mask.q_range(0, 0, *tile, 256)] == [64, 128]


def test_keys_are_read_in_a_process_that_has_made_no_mask() -> None:
    key, operands = encode(Neighborhood((4, 5), 3) | Strided(3), ())
    assert operands.ints[:2] == [4, 5]
    fresh_process.run(f"from tileattn.variant.program import program; program({key!r})")


# --- Errors ---

NOT_BOOL, NUMBERS = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Dilated(-1, dilation=2), ValueError, "Dilated: left must lie in 0 .. 2\\*\\*30 - 1, got -1"),
        (lambda: Dilated(3, 1.5, dilation=2), TypeError, "Dilated: right must be an int or None, got 1.5"),
        (lambda: Dilated(3, dilation=0), ValueError, "Dilated: dilation must lie in 1 .. 2\\*\\*30 - 1, got 0"),
        (lambda: Dilated(3, dilation=None), TypeError, "Dilated: dilation must be an int of at least 1, got None"),
        (lambda: Strided(0), ValueError, "Strided: stride must lie in 1"),
        (lambda: Strided(4, -2), ValueError, "Strided: local must lie in 0"),
        (lambda: Strided("4"), TypeError, "Strided: stride must be an int of at least 1, got '4'"),
        (lambda: GlobalTokens(-1), ValueError, "GlobalTokens: tokens must lie in 0"),
        (lambda: GlobalTokens(None), TypeError, "tokens must be an int of 0 or more, or a bool tensor .*, got None"),
        (lambda: GlobalTokens(NOT_BOOL), TypeError, "or a bool tensor .*, got a tensor of torch.float32"),
        (lambda: GlobalTokens(NOT_BOOL[0] > 0), ValueError, r"or a bool tensor .*, got shape \(4,\)"),
        (lambda: Neighborhood((), 1), ValueError, r"shape must be .* a tuple of one to three, got \(\)"),
        (lambda: Neighborhood((2, 2, 2, 2), 1), ValueError, "shape must be .* a tuple of one to three"),
        (lambda: Neighborhood((4, 0), 1), ValueError, "Neighborhood: shape must lie in 1 .. 2\\*\\*30 - 1, got 0"),
        (lambda: Neighborhood(4, None), TypeError, "Neighborhood: window must be an int of at least 1 or a tuple"),
        (lambda: Neighborhood((4, 4), (3,)), ValueError, r"window must have 2 sizes, one for each .*, got \(3,\)"),
        (lambda: Neighborhood((4, 4), 5), ValueError, r"window must not exceed shape = \(4, 4\), got 5"),
        (lambda: Neighborhood((2**20, 2**20), 5), ValueError, "shape must have at most 2\\*\\*30 - 1 positions"),
        (lambda: ImageTextDocuments(NOT_BOOL, NUMBERS), TypeError, "documents must be an integer tensor .* torch.f"),
        (lambda: ImageTextDocuments(NUMBERS, [1]), TypeError, "images must be an integer tensor .*, got list"),
        (lambda: ImageTextDocuments(NUMBERS[None], NUMBERS), ValueError, r"documents must have .* got \(1, 1, 4\)"),
        (lambda: ImageTextDocuments(NUMBERS, NUMBERS[0]), ValueError, r"images must have the shape of documents"),
    ],
)  # fmt: skip
def test_bad_arguments(make: Callable[[], Mask], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            GlobalTokens(NUMBERS == 0),
            r"tokens must have shape .* = \(1, 5\) or \(1, 5\), got \(1, 4\)",
        ),
        (ImageTextDocuments(NUMBERS, NUMBERS), r"\(batch, seqlen_k\) = \(1, 5\) or \(5,\), got \(1, 4\)"),
    ],
)
def test_tensors_that_do_not_fit_a_call(mask: Mask, text: str) -> None:
    x = torch.zeros(1, 5, 1, 16)
    with pytest.raises(ValueError, match=text):
        tileattn.attention(x, x, x, mask=mask)


# --- Attention ---

IDS = torch.tensor([[0] * 20 + [1] * 29, [3] * 30 + [2] * 19])
NUMBERED = torch.where((torch.arange(49) // 6) % 2 == 0, torch.arange(49) // 12, -1).expand(2, 49)
SPARSE: dict[str, tuple[Mask, Allowed]] = {
    "dilated": (Dilated(20, 10, dilation=3), dilated(20, 10, 3)),
    "strided": (Strided(7, 4), strided(7, 4)),
    "global tokens": (GlobalTokens(3), global_tokens([[k < 3 for k in range(49)]])),
    "local or global": (
        SlidingWindow(5, 5) | GlobalTokens(IDS % 2 == 1),
        lambda b, q, k: abs(q - k) <= 5 or global_tokens((IDS % 2 == 1).tolist())(b, q, k),
    ),
    "neighborhood": (Neighborhood((7, 7), (3, 4)), neighborhood((7, 7), (3, 4))),
    "causal neighborhood": (
        Causal() & Neighborhood((3, 4, 4), (2, 3, 3)),
        lambda b, q, k: k <= q and neighborhood((3, 4, 4), (2, 3, 3))(b, q, k),
    ),
    "images": (ImageTextDocuments(IDS, NUMBERED), images(IDS.tolist(), NUMBERED.tolist())),
}


def expected(q: Tensor, k: Tensor, v: Tensor, allowed: Allowed) -> Tensor:
    """Attention in float64, with a matrix of pairs."""
    first = k.shape[1] - q.shape[1]
    pairs = torch.tensor([
        [[allowed(b, row + first, key) for key in range(k.shape[1])] for row in range(q.shape[1])]
        for b in range(q.shape[0])
    ])  # fmt: skip
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~pairs[:, None], -math.inf)
    weights = torch.where(pairs.any(-1)[:, None, :, None], scores.softmax(-1), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights.nan_to_num(), v)


def tensors(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seqlen_q)
    shapes = [(2, n, 2, 16) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)]
    q, k, v, do = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


@pytest.mark.parametrize("seqlen_q", [49, 17, 60])
@pytest.mark.parametrize("name", SPARSE)
def test_attention_and_gradients(name: str, seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileattn.kernels.torch.visits.FEWEST_SCORES", 0)
    mask, allowed = SPARSE[name]
    q, k, v, do = tensors(seqlen_q, 49)
    o = tileattn.attention(q, k, v, mask=mask, backend="torch")
    right = expected(q, k, v, allowed)
    torch.testing.assert_close(o, right)
    found, wanted = (torch.autograd.grad(x, (q, k, v), do) for x in (o, right))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", SPARSE)
def test_packed_sequences(name: str) -> None:
    mask, allowed = SPARSE[name]
    q, k, v, _ = tensors(60, 49)
    lengths = [(49, 49), (11, 20)]
    cu_q, cu_k = (torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in zip(*lengths))
    packed = [torch.cat([x[i, : n[side]] for i, n in enumerate(lengths)]) for x, side in ((q, 0), (k, 1), (v, 1))]
    o = tileattn.varlen_attention(*packed, cu_q, cu_k, 49, 49, mask=mask, backend="torch")
    for i, (rows, keys) in enumerate(lengths):
        part = [x[i : i + 1, :n] for x, n in ((q, rows), (k, keys), (v, keys))]
        right = expected(*part, lambda b, row, key, number=i: allowed(number, row, key))  # type: ignore[misc]
        torch.testing.assert_close(o[int(cu_q[i]) : int(cu_q[i + 1])], right[0])


ON_TRITON = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("neighborhood", "images"))) for name in SPARSE]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ON_TRITON)
def test_triton_computes_the_same(name: str) -> None:
    pytest.importorskip("triton")
    q, k, v, do = (x.detach().float().requires_grad_() for x in tensors(17, 49))

    def run(backend: str) -> list[Tensor]:
        o = tileattn.attention(q, k, v, mask=SPARSE[name][0], backend=backend)
        return [o, *torch.autograd.grad(o, (q, k, v), do.detach())]

    torch.testing.assert_close(run("triton"), run("torch"))
