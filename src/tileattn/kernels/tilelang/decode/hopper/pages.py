"""The page table as the producer's lanes follow it, ahead of the copies; see producer.py and gather.py."""

import tilelang.language as T

from .....call import cache_fields

# What a lane keeps: a page and the row in it, to copy from now, and those that were read ahead.
PAGE, ROW, NEXT_PAGE, NEXT_ROW = range(4)
NO_PAGE = -1


@T.macro
def find_page(arg, w, job, key, at):
    """Follows the page table. An entry that is no page is reported, and counts as the nearest that is one."""
    place = T.alloc_var("int32", init=T.truncdiv(key, arg.page_size))
    page = T.alloc_var("int32", init=arg.page_table[job.sequence, place])
    w.entry[at] = T.max(T.min(page, arg.k.shape[0] - 1), 0)
    w.entry[at + 1] = key - place * arg.page_size
    if page != w.entry[at]:
        arg.status[cache_fields.PAGE_TABLE] = job.sequence + 1


@T.macro
def take_next(w):
    """What was read ahead becomes what is copied."""
    w.entry[PAGE] = w.entry[NEXT_PAGE]
    w.entry[ROW] = w.entry[NEXT_ROW]
