"""The place of a new token: its sequence, its position there, its page, and its rotary position.

Wrong values that the macros come across are recorded in the status (:mod:`tileattn.call.cache_status`).
"""

from __future__ import annotations

import tilelang.language as T

from ....call.cache_fields import CU_SEQLENS_Q, PAGE_TABLE, SEQLENS_K

NOWHERE = -1


@T.macro
def find_sequence(arg, row):
    """The sequence of a packed row, and the row's position there: negative for a row of no sequence."""
    # cu_seqlens_q[low] <= row < cu_seqlens_q[high]: halved in each step. Wrong bounds lead to some sequence.
    low, high = T.alloc_var("int32", init=0), T.alloc_var("int32", init=arg.sequences)
    for _ in T.serial(arg.steps):
        middle = T.alloc_var("int32", init=T.truncdiv(low + high, 2))
        if arg.cu_seqlens_q[middle] <= row:
            low = middle
        else:
            high = middle
    start = T.alloc_var("int32", init=arg.cu_seqlens_q[low])
    end = T.alloc_var("int32", init=arg.cu_seqlens_q[low + 1])
    position = T.alloc_var("int32", init=T.max(arg.seqlens_k[low], 0) - (end - row))
    if (row < start) | (end <= row):
        position = -1
    return low, position


@T.macro
def check_bounds(arg, thread, threads):
    """Records sequences whose bounds are wrong."""
    for step in T.serial(T.ceildiv(arg.sequences, threads)):
        b = T.alloc_var("int32", init=step * threads + thread)
        if b < arg.sequences:
            start = T.alloc_var("int32", init=arg.cu_seqlens_q[b])
            end = T.alloc_var("int32", init=arg.cu_seqlens_q[b + 1])
            if ((b == 0) & (start != 0)) | (end < start) | ((b == arg.sequences - 1) & (end > arg.k_rows)):
                arg.status[CU_SEQLENS_Q] = b + 1


@T.macro
def find_page(call, arg, row, number, position, reports):
    """The row of the cache and the token there of a new token; the row is NOWHERE if the token is not written.

    `reports`: whether the thread records errors.
    """
    page, token = T.alloc_var("int32", init=NOWHERE), T.alloc_var("int32", init=position)
    seqlen = T.alloc_var("int32", init=arg.seqlens_k[number])
    if reports & ((seqlen < 0) | (seqlen > arg.capacity)):
        arg.status[SEQLENS_K] = number + 1
    if (row < arg.k_rows) & (position >= 0) & (position < arg.capacity):
        if call.paged:
            page = arg.page_table[number, T.truncdiv(position, arg.tokens)]
            token = T.truncmod(position, arg.tokens)
            if (page < 0) | (page >= arg.pages):
                page = NOWHERE
                if reports:
                    arg.status[PAGE_TABLE] = number + 1
        else:
            page = number
    return page, token


@T.macro
def find_position(call, arg, b, row, of_q, position, position_of_q):
    """The rotary position of a row of k, or of q, whose positions in the sequence are given."""
    rotary = T.alloc_var("int32", init=position)
    if of_q:
        if call.q_positions:
            rotary = arg.q_positions[b, row]
        elif call.positions:
            rotary = arg.positions[b, row]
        else:
            rotary = position_of_q
    elif call.positions:
        rotary = arg.positions[b, row]
    return rotary
