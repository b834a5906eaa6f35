"""Operations of masks and score modifications that Triton lacks, or defines differently."""

import triton
import triton.language as tl

TWO_LOG2E = tl.constexpr(2.8853900817779268)


@triton.jit
def tanh(x):
    """tanh with an error of some 2^-22, saturating at both ends; Triton has none that runs everywhere."""
    return 1.0 - 2.0 / (tl.exp2(x * TWO_LOG2E) + 1.0)


@triton.jit
def exact_tanh(x):
    """tanh with a relative error of some 2^-23: small results are not differences of larger numbers.

    Near 0 an odd polynomial, fitted for the least relative error in -1 .. 1, which is below 2^-27.
    """
    u = x * x
    series = -0.00035844947 * u + 0.0023013558
    series = series * u - 0.0079460945
    series = series * u + 0.02148664923
    series = series * u - 0.05387980118
    series = series * u + 0.13332344589
    series = series * u - 0.33333295584
    return tl.where(u < 1.0, x + x * (u * series), tanh(x))


@triton.jit
def floor_div(x, y):
    """Python's ``x // y`` of integers; Triton's rounds towards 0."""
    quotient, rest = x // y, x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


@triton.jit
def floor_mod(x, y):
    """Python's ``x % y`` of integers."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def floor_mod_float(x, y):
    return x - y * tl.floor(x / y)


@triton.jit
def clamped(index, size):
    """The nearest index within a tensor: tiles reach beyond the last query and key, and use nothing of it."""
    return tl.minimum(tl.maximum(index, 0), size - 1).to(tl.int64)
