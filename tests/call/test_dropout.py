"""The pattern of dropout: its generator, its statistics, and its independence of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tileattn.call.dropout import Place, draw_seed, keep_mask, philox2x32, philox4x32, threshold, weight_of_kept
from tileattn.testing import dropout_mask


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64)


def words(text: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


# Random123's tests/kat_vectors: counter, key, output.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000", "00000000", "ff1dae59 6cd10df2"),
        ("ffffffff ffffffff", "ffffffff", "2c3f628b ab4fd7ad"),
        ("243f6a88 85a308d3", "13198a2e", "dd7ce038 f62a4c12"),
    ],
)
def test_philox2x32_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox2x32(words(counter), words(key)[0]) == words(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox4x32_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 12345, 2**63 - 2, -1])
def test_an_element_is_found_by_its_place(seed: int) -> None:
    """The module's text, element by element, in Python's integers."""
    p, heads = 0.3, 3
    mask = keep_mask(seed_of(seed), p, 2, heads, slice(0, 70), slice(0, 90))
    places = torch.randint(2**30, (300, 4), generator=torch.Generator().manual_seed(0)) % torch.tensor([2, 3, 70, 90])
    for b, h, q, k in places.tolist():
        k0, x0, x1 = philox([b * heads + h, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])[:3]
        i, j = q // 16 * 8 + q % 8, k // 16 * 8 + k % 8
        w0, w1 = philox([i ^ x0, j ^ x1], [k0])
        number = (w0 | w1 << 32) >> 16 * (2 * (q // 8 % 2) + k // 8 % 2) & 0xFFFF
        assert bool(mask[b, h, q, k]) == (number >= round(p * 65536)), (b, h, q, k)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator as the paper defines it, for any number of words."""
    multipliers = [0xD2511F53, 0xCD9E8D57] if len(counter) == 4 else [0xD256D193]
    key = list(key)
    for _ in range(10):
        products = [word * by for word, by in zip(counter[::2], multipliers)]
        highs, others = [product >> 32 for product in products][::-1], counter[1::2]
        lows = [product & 0xFFFFFFFF for product in products][::-1]
        mixed = [high ^ other ^ k for high, other, k in zip(highs, others, key)]
        counter = [word for pair in zip(mixed, lows) for word in pair]
        key = [(k + step) & 0xFFFFFFFF for k, step in zip(key, (0x9E3779B9, 0xBB67AE85))]
    return counter


sides = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(lambda ends: slice(*ends))
whole = keep_mask(seed_of(7), 0.5, 2, 2, slice(0, 60), slice(0, 60))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(sides, sides)
def test_a_tile_is_a_part_of_the_whole(rows: slice, keys: slice) -> None:
    assert torch.equal(keep_mask(seed_of(7), 0.5, 2, 2, rows, keys), whole[:, :, rows, keys])


def test_a_part_of_a_call() -> None:
    """Heads 1 .. 2 of 5, of batch element 2 on; rows from 16 on, keys from 32 on."""
    of_all = keep_mask(seed_of(7), 0.5, 4, 5, slice(0, 60), slice(0, 60))
    part = keep_mask(seed_of(7), 0.5, 2, 2, slice(3, 40), slice(1, 28), Place(5, 11, 16, 32))
    assert torch.equal(part, of_all[2:, 1:3, 19:56, 33:60])


def test_a_head_does_not_depend_on_the_batch() -> None:
    """Elements are counted, heads within batch elements: more of the batch leaves the first as they are."""
    more = keep_mask(seed_of(7), 0.5, 5, 2, slice(0, 60), slice(0, 60))
    assert torch.equal(more[:2], whole)


# --- Statistics: within 5 standard deviations, with the seeds as they are ---


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements(p: float) -> None:
    mask = keep_mask(seed_of(3), p, 2, 4, slice(0, 512), slice(0, 512))
    share, expected = 1 - mask.double(), threshold(p) / 65536
    for part in (share, share[0, 0], share[1, 3], share[..., 8:16, :], share[..., ::16]):
        deviation = (expected * (1 - expected) / part.numel()) ** 0.5
        assert abs(part.mean() - expected) < 5 * deviation


def correlation(x: Tensor, y: Tensor) -> float:
    """The correlation in standard deviations of that of independent elements."""
    x, y = ((z.double() - 0.5).flatten() for z in (x, y))
    return float((4 * x * y).mean() * x.numel() ** 0.5)


def test_neighbours_are_independent() -> None:
    mask = keep_mask(seed_of(11), 0.5, 1, 2, slice(0, 528), slice(0, 528))
    for dq in (0, 1, 7, 8, 9, 16):
        for dk in (0, 1, 7, 8, 9, 16):
            if (dq, dk) != (0, 0):
                x, y = mask[..., :512, :512], mask[..., dq : dq + 512, dk : dk + 512]
                assert abs(correlation(x, y)) < 5, (dq, dk)
    assert abs(correlation(mask[..., :512, :512], mask.mT[..., :512, :512])) < 5 * 2**0.5  # each pair counts twice


def test_heads_and_seeds_are_independent() -> None:
    tile = (slice(0, 256), slice(0, 256))
    mask = keep_mask(seed_of(5), 0.5, 2, 3, *tile).flatten(0, 1)
    for x in range(6):
        for y in range(x):
            assert abs(correlation(mask[x], mask[y])) < 5, (x, y)
    for other in (4, 6, 5 + 2**32, -5):
        again = keep_mask(seed_of(other), 0.5, 2, 3, *tile).flatten(0, 1)
        assert abs(correlation(mask, again)) < 5, other


# --- Probabilities and seeds ---


def test_all_or_nothing() -> None:
    tile = (slice(0, 40), slice(0, 40))
    assert keep_mask(seed_of(1), 0.0, 1, 1, *tile).all()
    assert not keep_mask(seed_of(1), 1.0, 1, 1, *tile).any()
    assert (weight_of_kept(0.0), weight_of_kept(1.0)) == (1.0, 0.0)


def test_a_number_at_the_threshold_is_kept() -> None:
    """Among a million numbers some sixteen are 0, and some are the largest."""
    seed, tile = seed_of(3), (1, 1, slice(0, 1024), slice(0, 1024))
    assert keep_mask(seed, 0.0, *tile).all()
    assert keep_mask(seed, 1 - 1 / 65536, *tile).any()
    assert not keep_mask(seed, 1 / 65536, *tile).all()


def test_the_expectation_is_exact() -> None:
    """Although p is rounded."""
    for p in (0.1, 1 / 3, 0.5, 0.99):
        share_kept = 1 - threshold(p) / 65536
        assert abs(1 - share_kept - p) <= 2**-17
        assert weight_of_kept(p) * share_kept == pytest.approx(1.0, rel=1e-15)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_what_is_no_probability_says_so(p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout: the probability must lie in 0 \.\. 1, got"):
        threshold(p)


def test_seeds_come_from_the_generator() -> None:
    torch.manual_seed(0)
    seeds = [draw_seed("cpu") for _ in range(3)]
    assert all(seed.shape == (1,) and seed.dtype == torch.int64 for seed in seeds)
    assert len({int(seed) for seed in seeds}) == 3
    assert max(int(seed) for seed in seeds) >= 2**32
    torch.manual_seed(0)
    assert torch.equal(draw_seed("cpu"), seeds[0])


def dropped(x: Tensor) -> Tensor:
    keep = keep_mask(draw_seed(x.device), 0.5, 1, 1, slice(0, x.shape[0]), slice(0, x.shape[1]))
    return x.sin() * keep[0, 0]


def test_recomputation_drops_the_same() -> None:
    x = torch.randn(20, 30, requires_grad=True)
    torch.manual_seed(2)
    y = torch.utils.checkpoint.checkpoint(dropped, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient == 0, y == 0)
    assert 0 < int((y == 0).sum()) < y.numel()


def test_the_whole_can_be_compiled() -> None:
    compiled = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    x = torch.ones(20, 30)
    torch.manual_seed(2)
    expected = dropped(x)
    torch.manual_seed(2)
    assert torch.equal(compiled(x), expected)


def test_the_testing_helper() -> None:
    mask = dropout_mask(9, 0.25, batch=2, heads=3, seqlen_q=33, seqlen_k=47)
    assert torch.equal(mask, keep_mask(seed_of(9), 0.25, 2, 3, slice(0, 33), slice(0, 47)))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"p": None}, TypeError, "p must be a probability, a number from 0 to 1, got None"),
        ({"p": 1.5}, ValueError, "p must be a probability, a number from 0 to 1, got 1.5"),
        ({"p": float("nan")}, ValueError, "p must be a probability, a number from 0 to 1, got nan"),
        ({"seed": 3.5}, TypeError, "seed must be an int from .* or an int64 tensor of shape .*, got 3.5"),
        ({"seed": 2**64}, ValueError, "seed must be an int from .*, got 18446744073709551616"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, ValueError, r"seed must .*, got torch.int64 of shape \(2,\)"),
        ({"seed": torch.zeros(1)}, TypeError, r"seed must be .*, got torch.float32 of shape \(1,\)"),
        ({"heads": 0}, ValueError, "heads must be an int of at least 1, got 0"),
        ({"batch": -1}, ValueError, "batch must be an int of at least 0, got -1"),
        ({"seqlen_k": 4.0}, TypeError, "seqlen_k must be an int of at least 0, got 4.0"),
    ],
)
def test_the_testing_helpers_errors(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    right: dict[str, Any] = {"seed": 0, "p": 0.5, "batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4}
    assert dropout_mask(**right).shape == (1, 2, 3, 4)
    with pytest.raises(error, match=text):
        dropout_mask(**{**right, **wrong})
