"""Whether two tensors share memory, from their addresses and strides; nothing is read."""

from __future__ import annotations

from torch import Tensor


def extent(x: Tensor) -> int:
    """The bytes from a tensor's first element to behind its last one. Strides are not negative."""
    if x.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def is_expanded(x: Tensor) -> bool:
    """Whether several indices lead to one element, by a stride of 0."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride()))


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether x and y share a byte.

    They do where ``sum(i * x's strides) - sum(j * y's strides)`` is the distance of the tensors, in bytes. Each stride
    is a term with a bounded integer factor; a byte within an element is a term of stride 1.
    """
    distance = y.data_ptr() - x.data_ptr()
    if x.device != y.device or 0 in (x.numel(), y.numel()) or not -extent(y) < distance < extent(x):
        return False
    bounds: dict[int, tuple[int, int]] = {}  # least and greatest factor of each stride
    for tensor, sign in ((x, 1), (y, -1)):
        size = tensor.element_size()
        strides = (1, *(stride * size for stride in tensor.stride()))
        for count, stride in zip((size, *tensor.shape), strides):
            (least, greatest), last = bounds.get(stride, (0, 0)), sign * (count - 1)
            bounds[stride] = least + min(last, 0), greatest + max(last, 0)
    terms = sorted(((stride, *each) for stride, each in bounds.items() if stride), reverse=True)
    return _is_sum(distance, terms)


def _is_sum(rest: int, terms: list[tuple[int, int, int]]) -> bool:
    """Whether `rest` is the sum of each stride times a factor within its bounds. The largest stride is the first.

    Factors that the smaller strides cannot make up for are left out; of tensors with nested strides few are left.
    """
    if not terms:
        return rest == 0
    (stride, least, greatest), *others = terms
    low = sum(other * at_least for other, at_least, _ in others)
    high = sum(other * at_most for other, _, at_most in others)
    # low <= rest - factor * stride <= high
    first, last = max(least, -((high - rest) // stride)), min(greatest, (rest - low) // stride)
    return any(_is_sum(rest - factor * stride, others) for factor in range(first, last + 1))
