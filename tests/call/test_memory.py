"""Whether tensors share memory: `overlap` beside a count of their elements' addresses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tileattn.call.memory import overlap


def addresses(x: Tensor) -> set[int]:
    places = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        shape = [1] * x.ndim
        shape[dim] = size
        places += torch.arange(size).view(shape) * stride
    return set((places * x.element_size() + x.data_ptr()).flatten().tolist())


def draw(buffer: Tensor, strides: list[int], rng: random.Random) -> Tensor:
    sizes = [rng.randint(1, 4) for _ in strides]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides))
    return torch.as_strided(buffer, sizes, strides, rng.randint(0, buffer.numel() - last - 1))


def test_with_equal_strides_the_answer_is_exact() -> None:
    rng, buffer, answers = random.Random(0), torch.zeros(800), set()
    for _ in range(40):
        strides = [rng.choice([1, 2, 3, 5, 8, 16, 40, 60]) for _ in range(rng.randint(1, 4))]
        for _ in range(40):
            x, y = draw(buffer, strides, rng), draw(buffer, strides, rng)
            answer = bool(addresses(x) & addresses(y))
            assert overlap(x, y) == overlap(y, x) == answer, (x.shape, y.shape, strides)
            answers.add(answer)
    assert answers == {True, False}


@pytest.mark.parametrize("seed", range(10))
def test_with_other_strides_only_what_is_sure_is_said(seed: int) -> None:
    rng, buffer = random.Random(seed), torch.zeros(400)
    for _ in range(100):
        x, y = (draw(buffer, [rng.choice([1, 2, 7, 30]) for _ in range(3)], rng) for _ in range(2))
        assert not overlap(x, y) or addresses(x) & addresses(y)


def test_tensors_without_gaps() -> None:
    buffer = torch.zeros(60)
    x, y = buffer[:40].view(2, 4, 5), buffer[39:59].view(4, 5)
    assert overlap(x, y)
    assert overlap(y, x)
    assert not overlap(buffer[:40].view(8, 5), buffer[40:].view(4, 5))
    with_gaps = torch.as_strided(buffer, (2, 2), (20, 1), 18)  # elements 18, 19, 38 and 39
    for begin, end, answer in ((39, 60, True), (40, 60, False), (0, 19, True), (0, 18, False)):
        assert overlap(buffer[begin:end], with_gaps) == overlap(with_gaps, buffer[begin:end]) == answer
    assert overlap(buffer, buffer[13:14])
    assert overlap(buffer[:16].view(torch.int32), buffer[15:])
    assert overlap(buffer[:8].view(torch.int16), buffer[7:])


def test_other_memory_and_nothing() -> None:
    x = torch.zeros(4, 4)
    assert not overlap(x, torch.zeros(4, 4))
    assert not overlap(x, x[:0])
    assert not overlap(x, torch.zeros(4, 4, device="meta"))
