"""In which order a round measures the implementations.

A GPU at its power limit remembers: after a kernel that draws little the next one runs at a higher clock, up to 4 % on
an H200. If rounds only began with another each time, everyone would always follow the same one. So the orders of
successive rounds form a Williams square (E. J. Williams 1949, "Experimental designs balanced for the estimation of
residual effects of treatments"): over `count` rounds everyone follows everyone else once, over ``2 * count`` rounds
twice where that is odd.
"""


def order(count: int, number: int) -> list[int]:
    """Who is measured when, among `count`, in round `number` (from 0)."""
    zigzag = [(position + 1) // 2 if position % 2 else -(position // 2) for position in range(count)]
    rotated = [(place + number) % count for place in zigzag]
    mirrored = count % 2 == 1 and number // count % 2 == 1
    return rotated[::-1] if mirrored else rotated
