"""The pattern of :mod:`tileattn.call.dropout` on fragments: shared by all schedules of both passes.

Each element needs the words of its group: ten rounds of Philox. In the layouts of NVIDIA's matrix units the four
elements of a group are in one thread, in registers whose numbers are known when the loop is unrolled. Their groups'
numbers are then the same expression, and nvcc computes the words once.
(tests/kernels/tilelang/tile/test_dropout_lowering.py counts the multiplications.) AMD GPUs have
other layouts, and each element recomputes the words.

All elements of a tile share six words in registers: of the head KEY, ROW and COLUMN, which are ``k0``, ``x0``
and ``x1``; the threshold; the first groups of the tile's rows and keys. Numbers of 16 bits are compared in the upper
half of a word, where one of the two in a word is already.
"""

import tilelang.language as T

from ....call.dropout import M2, M4, ROUNDS, WEYL

KEY, ROW, COLUMN, LIMIT, FIRST_ROWS, FIRST_KEYS = range(6)


def allocate():
    """Registers for the words of a head and a tile."""
    return T.alloc_local([6], "uint32")


def of_call(call):
    """The same, or None for a call without dropout."""
    return allocate() if call.dropout else None


def _word(value):
    return T.cast(value, "uint32")


def _product(x, odd):
    """64 bits."""
    return T.cast(x, "uint64") * T.uint64(odd)


def _high(product):
    return _word(T.shift_right(product, T.uint64(32)))


@T.macro
def enter_head(words, arg, b, h):
    """The words of query head h of batch element b; in a part of a call, of that head of the whole."""
    counter, product = T.alloc_local([4], "uint32"), T.alloc_local([2], "uint64")
    counter[0] = _word(b * arg.pattern_heads + (arg.first_head + h))
    for e in T.unroll(3):
        counter[e + 1] = T.uint32(0)
    words[0] = _word(arg.seed[0])
    words[1] = _word(T.shift_right(arg.seed[0], T.int64(32)))
    for number in T.unroll(ROUNDS):
        product[0] = _product(counter[0], M4[0])
        product[1] = _product(counter[2], M4[1])
        counter[0] = _high(product[1]) ^ counter[1] ^ (words[0] + _word(number) * T.uint32(WEYL[0]))
        counter[2] = _high(product[0]) ^ counter[3] ^ (words[1] + _word(number) * T.uint32(WEYL[1]))
        counter[1] = _word(product[1])
        counter[3] = _word(product[0])
    words[KEY] = counter[0]
    words[ROW] = counter[1]
    words[COLUMN] = counter[2]
    # At p = 1 the largest number is kept, and weighs 0.
    words[LIMIT] = _word(T.min(arg.threshold, 65535)) << T.uint32(16)


@T.macro
def enter_tile(words, arg, row, key):
    """The groups of its first query (from 0, whatever its position) and first key, which are multiples of 16."""
    words[FIRST_ROWS] = _word(row // 2 + arg.first_row_group)
    words[FIRST_KEYS] = _word(key // 2 + arg.first_key_group)


@T.macro
def share_in_warp(words):
    """Tells ptxas that the words are the same in all threads of a warp: it keeps them in uniform registers.

    Once a tile: then they are not the last tile's, as far as the compiler can tell, and it does not keep what it makes
    of them for each column in registers, or in local memory.
    """
    for e in T.unroll(6):
        words[e] = T.shfl_sync(words[e], 0)


def _group(i):
    """Of row (or key) i of a tile, counted from the tile's first."""
    return _word(i // 16 * 8 + i % 8)


def _is_second(i):
    return i % 16 >= 8


@T.macro
def _words_of_group(found, product, words, i, j):
    """Philox2x32 of row i and key j of a tile."""
    found[0] = (words[FIRST_ROWS] + _group(i)) ^ words[ROW]
    found[1] = (words[FIRST_KEYS] + _group(j)) ^ words[COLUMN]
    for number in T.unroll(ROUNDS):
        product[0] = _product(found[0], M2)
        found[0] = _high(product[0]) ^ (words[KEY] + _word(number) * T.uint32(WEYL[0])) ^ found[1]
        found[1] = _word(product[0])


def _keeps(found, words, i, j):
    """Whether row i and key j are kept, from their group's words."""
    word = T.if_then_else(_is_second(i), found[1], found[0])
    return word << T.if_then_else(_is_second(j), T.uint32(0), T.uint32(16)) >= words[LIMIT]


@T.macro
def drop(result, values, words, rows, columns, keys_first=False, factor=None):
    """result = values where they are kept, times a factor, else 0; it may be the same fragment.

    ``keys_first``: whether rows of the tile are keys.
    """
    for i, j in T.Parallel(rows, columns):
        found, product = T.alloc_local([2], "uint32"), T.alloc_local([1], "uint64")
        q, k = (j, i) if keys_first else (i, j)
        _words_of_group(found, product, words, q, k)
        kept = T.if_then_else(_keeps(found, words, q, k), values[i, j], 0.0)
        result[i, j] = kept if factor is None else kept * factor


@T.macro
def mark(p, words, rows, columns, keys_first=False):
    """Makes probabilities that are dropped negative, so that the pattern is at hand as long as they are."""
    for i, j in T.Parallel(rows, columns):
        found, product = T.alloc_local([2], "uint32"), T.alloc_local([1], "uint64")
        q, k = (j, i) if keys_first else (i, j)
        _words_of_group(found, product, words, q, k)
        p[i, j] = T.if_then_else(_keeps(found, words, q, k), p[i, j], -p[i, j])


@T.macro
def copy_kept(result, marked, rows, columns):
    """Kept probabilities, 0 for the others."""
    for i, j in T.Parallel(rows, columns):
        result[i, j] = T.if_then_else(marked[i, j] < 0.0, 0.0, marked[i, j])


@T.macro
def unmark(p, dp, weight, rows, columns):
    """dp becomes that of the probabilities before they were dropped, and p what they were.

    Where p is 0, so is its score's gradient, whatever dp is.
    """
    for i, j in T.Parallel(rows, columns):
        dp[i, j] = T.if_then_else(p[i, j] < 0.0, 0.0, dp[i, j]) * weight
    for i, j in T.Parallel(rows, columns):
        p[i, j] = T.abs(p[i, j])
