"""Whether two tensors share memory, from their addresses and strides; nothing is read."""

from __future__ import annotations

from torch import Tensor


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether x and y surely share an element.

    Exact for tensors with equal strides, and where one of them fills its range of memory without gaps and the other
    begins or ends in it. Otherwise the answer is False, for it would need a search over all elements.
    """
    if x.device != y.device or 0 in (x.numel(), y.numel()):
        return False
    (x_begin, x_end), (y_begin, y_end) = _span(x), _span(y)
    if x_end <= y_begin or y_end <= x_begin:
        return False
    size, distance = x.element_size(), y_begin - x_begin
    if size == y.element_size() and x.stride() == y.stride() and distance % size == 0:
        largest = [(size_x - 1, size_y - 1) for size_x, size_y in zip(x.shape, y.shape)]
        return _is_sum(distance // size, sorted(zip(x.stride(), largest), reverse=True))
    return _meets(x, y_begin, y_end) or _meets(y, x_begin, x_end)


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the byte behind the last one. Strides are not negative."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _is_sum(distance: int, by_stride: list[tuple[int, tuple[int, int]]]) -> bool:
    """Whether y's first element is `distance` elements behind x's, and i * stride = distance + j * stride for indices.

    by_stride: each stride, largest first, with the largest index of x and of y. i - j lies in -largest_y .. largest_x.
    """
    if not by_stride:
        return distance == 0
    (stride, (most_x, most_y)), rest = by_stride[0], by_stride[1:]
    if stride == 0:
        return _is_sum(distance, rest)
    reach = sum(step * max(most) for step, most in rest)
    lowest, highest = -(-(distance - reach) // stride), (distance + reach) // stride
    return any(
        _is_sum(distance - times * stride, rest) for times in range(max(lowest, -most_y), min(highest, most_x) + 1)
    )


def _meets(x: Tensor, begin: int, end: int) -> bool:
    """Whether x has no gaps and contains the byte at `begin` or the one before `end`."""
    x_begin, x_end = _span(x)
    without_gaps = x_end - x_begin == x.numel() * x.element_size()
    return without_gaps and (x_begin <= begin < x_end or x_begin < end <= x_end)
