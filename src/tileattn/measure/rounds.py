"""The order in which a round of timing measures the implementations.

On a GPU at its power limit a measurement depends on the one before: after a kernel that draws little power the next
runs at a higher clock, up to 4 % on an H200. If rounds only rotated, each implementation would always follow the same
other one. So the orders of successive rounds form a Williams square (E. J. Williams 1949, "Experimental designs
balanced for the estimation of residual effects of treatments"): over `count` rounds each implementation follows each
other one once; for an odd `count`, twice over ``2 * count`` rounds.
"""


def order(count: int, number: int) -> list[int]:
    """The indices of `count` implementations in the order in which round `number` (from 0) measures them."""
    zigzag = [(position + 1) // 2 if position % 2 else -(position // 2) for position in range(count)]
    rotated = [(place + number) % count for place in zigzag]
    mirrored = count % 2 == 1 and number // count % 2 == 1
    return rotated[::-1] if mirrored else rotated
