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


@pytest.mark.parametrize("choice", [(1, 2, 3, 5, 8, 16, 40, 60), (1, 2, 7, 30), (0, 1, 12)], ids=str)
@pytest.mark.parametrize("equal", [True, False], ids=["equal strides", "other strides"])
def test_the_answer_is_exact(choice: tuple[int, ...], equal: bool) -> None:
    rng, buffer, answers = random.Random(0), torch.zeros(800), set()
    for _ in range(300):
        strides = [[rng.choice(choice) for _ in range(rng.randint(1, 3))] for _ in range(2)]
        x, y = (draw(buffer, strides[0 if equal else i], rng) for i in range(2))
        answer = bool(addresses(x) & addresses(y))
        assert overlap(x, y) == overlap(y, x) == answer, (x.shape, y.shape, strides)
        answers.add(answer)
    assert answers == {True, False}


def test_views_of_one_buffer_take_few_steps() -> None:
    """A search over all elements of such caches would not end."""
    pages = torch.empty(2**16, 2, 16, 8, 8, dtype=torch.uint8)
    rows = pages.view(2**16, 32, 8, 8)
    for x, y in (pages.unbind(1), pages.split(4, dim=-1), rows.split(4, dim=2), rows.split(2**15)):
        assert not overlap(x, y)
        assert overlap(x, pages)
        assert overlap(y, pages[-1, -1, -1])


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
    assert overlap(buffer[:1], buffer.view(torch.int16)[1:2])
    assert not overlap(buffer[:1], buffer.view(torch.int16)[2:])


def test_other_memory_and_nothing() -> None:
    x = torch.zeros(4, 4)
    assert not overlap(x, torch.zeros(4, 4))
    assert not overlap(x, x[:0])
    assert not overlap(x, torch.zeros(4, 4, device="meta"))
