"""The page table as the producer's lanes follow it, ahead of the copies; see producer.py and gather.py."""

import tilelang.language as T

from .....call import cache_fields

# What a lane keeps: a page and the row in it, to copy from now, and those that were read ahead.
PAGE, ROW, NEXT_PAGE, NEXT_ROW = range(4)
EXACT = 1 << 22
NO_ROW = -1  # the lane has no row to copy


def page_of(arg, w, key):
    """key // page_size. A division takes some 40 instructions, one after the other, and all loads wait for it.

    Below EXACT floating point misses by one page at most.
    """
    near = T.cast(T.cast(key, "float32") * w.per_page, "int32")
    rest = key - near * arg.page_size
    near = near + T.cast(rest >= arg.page_size, "int32") - T.cast(rest < 0, "int32")
    return T.if_then_else(key < EXACT, near, T.truncdiv(key, arg.page_size))


@T.macro
def read_ahead(arg, w, job, key, rows, end):
    """Reads the page table for the rows of keys from `key` on, if the job sees one of them. Nothing waits for it."""
    w.entry[NEXT_ROW] = NO_ROW
    if (key + rows > job.kv_lo) & (key < T.min(job.kv_hi, end)):
        place = T.alloc_var("int32", init=page_of(arg, w, key))
        w.entry[NEXT_PAGE] = arg.page_table[job.sequence, place]
        w.entry[NEXT_ROW] = key - place * arg.page_size


@T.macro
def take_next(arg, w, job):
    """What was read ahead is copied next. An entry that is no page is reported, and counts as the nearest that is."""
    w.entry[PAGE] = T.max(T.min(w.entry[NEXT_PAGE], arg.k.shape[0] - 1), 0)
    w.entry[ROW] = w.entry[NEXT_ROW]
    if (w.entry[ROW] != NO_ROW) & (w.entry[PAGE] != w.entry[NEXT_PAGE]):
        arg.status[cache_fields.PAGE_TABLE] = job.sequence + 1
