"""Caches: the pages that `PagedKVCache` counts, and the checks of a decode call's memory."""

from __future__ import annotations

from ..mutant import Mutant, mutants

CACHE = ("api/test_kv_cache.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "api/kv_cache.py",
        CACHE,
        {
            "cache: a page more for a full last page": (
                "torch.div(lengths + (self.page_size - 1),",
                "torch.div(lengths + self.page_size,",
            ),
            "cache: pages of a fork are not counted": ("self._count(self.page_table, shared, 1)\n", "pass\n"),
            "cache: freed pages stay counted": ("self._count(self.page_table, places, -1)\n", "pass\n"),
            "cache: a copied page stays counted": ("self._count(page, shared, -1)\n", "pass\n"),
            "cache: a fork writes to the page of its source": (
                "            self._own_last_pages(rows)\n",
                "",
            ),
            "cache: a full last page is copied as well": ("rows & (self.seqlens % self.page_size != 0)", "rows"),
            "cache: a copied page without its values": ("for cache in (self._k, self._v):", "for cache in (self._k,):"),
            "cache: the first layer's page alone is copied": (
                "cache[:, target] = cache[:, source]",
                "cache[:1, target] = cache[:1, source]",
            ),
            "cache: one free page for all": ("order[place]", "order[place * 0]"),
            "cache: changed by what was refused": (
                "            for x, old in zip(counted, before):\n                x.copy_(old)\n",
                "",
            ),
            "cache: lacking pages are forgotten": ("self._errors[:1] += (wanted & (taken < 0)).sum()\n", "pass\n"),
            "cache: a length above the most": ("= lengths > self.max_seqlen\n", "= lengths > self.max_seqlen + 1\n"),
        },
    ),
    *mutants(
        "call/memory.py",
        ("call/test_memory.py",),
        {
            "overlap: the last byte does not count": (
                "zip((size, *tensor.shape), strides)",
                "zip((1, *tensor.shape), strides)",
            ),
            "overlap: one index behind the last": ("sign * (count - 1)", "sign * count"),
            "overlap: one index too far": ("min(greatest, (rest - low)", "min(greatest + 1, (rest - low)"),
            "overlap: factors of strides": (
                "max(least, -((high - rest) // stride))",
                "max(least, (rest - high) // stride + 1)",
            ),
        },
    ),
    *mutants(
        "call/decode_validation.py",
        ("api/test_decode.py",),
        {
            "decode: out may be q": ('for name in ("q", "k_cache",', 'for name in ("k_cache",'),
            "decode: gradients are dropped silently": ("if torch.is_grad_enabled() and any(", "if False and any("),
            "decode: a plan of any call": ("if planned != call:", "if False:"),
            "decode: a table of any batch": (
                '"page_table", table, {"batch": batch,',
                '"page_table", table, {"batch": None,',
            ),
        },
    ),
    *mutants(
        "runtime/prepared_decode.py",
        ("api/test_decode.py",),
        {
            "decode: a call is kept for gradients": ("if torch.is_grad_enabled() and (", "if False and ("),
            "decode: 1 finds the call of True": ("*options, *map(type, options),", "*options,"),
        },
    ),
]
