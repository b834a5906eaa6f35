"""The fields of the status of calls on caches (cache_status.py), as kernels write them.

A field holds the number of a wrong sequence, plus 1, or 0.
"""

SEQLENS_K = 0  # seqlens_k is negative, or more than the cache's capacity
PAGE_TABLE = 1  # an entry of the page table that the sequence's keys reach is no page: not 0 <= entry < pages
CU_SEQLENS_Q = 2  # cu_seqlens_q does not start at 0, decreases, or goes beyond total_q at this sequence
MAX_SEQLEN_Q = 3  # the sequence has more queries than max_seqlen_q
POSITIONS = 4  # a token's rotary position has no row in cos and sin

FIELDS = 5
