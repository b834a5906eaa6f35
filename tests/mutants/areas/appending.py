"""append_kv: where new tokens are written, how they are rotated, and what is refused."""

from __future__ import annotations

from ..mutant import Mutant, mutants

CASES = ("api/test_append.py::test_case", "api/test_append.py::test_rotation_is_rounded_once")
WRONG = ("api/test_append.py::test_wrong_values_on_a_cpu",)
INTERPRETED = ("kernels/triton/test_append.py",)
EMULATED = "kernels/tilelang/append/test_emulated.py"

MUTANTS: list[Mutant] = [
    *mutants(
        "kernels/torch/append.py",
        CASES,
        {
            "append: rows of no sequence are written": (
                "first = written.int().argmax(keepdim=True)",
                "first = torch.arange(len(x))",
            ),
            "append: rotated in the tensors' dtype": (
                "dtype = torch.promote_types(x.dtype, torch.float32)",
                "dtype = x.dtype",
            ),
            "append: the other direction": (
                "(a * cos - b * sin, a * sin + b * cos)",
                "(a * cos + b * sin, b * cos - a * sin)",
            ),
            "append: negative positions are rotated": ("has_row = (positions >= 0) & ", "has_row = "),
            "append: q at the positions of k": (
                "q_rows = rows if q is None or q.shape[1] == k.shape[1] else",
                "q_rows = rows if q is None or q.shape[1] <= k.shape[1] else",
            ),
        },
    ),
    *mutants(
        "kernels/torch/append.py",
        WRONG,
        {
            "append: a length may be one beyond": ("(seqlens > inputs.capacity)", "(seqlens > inputs.capacity + 1)"),
            "append: any page exists": ("exists = (page >= 0) & (page < pages)", "exists = page < pages"),
            "append: cu_seqlens_q may decrease": ("wrong = bounds[1:] < bounds[:-1]", "wrong = bounds[1:] < 0"),
        },
    ),
    *mutants(
        "kernels/triton/append/kernel.py",
        INTERPRETED,
        {
            "append: triton's pages may be any": (
                "mask=reports & exists & wrong)",
                "mask=reports & exists & (page < 0))",
            ),
            "append: triton's first element of a pair": (
                "first, second = 2 * j, 2 * j + 1",
                "first, second = j, 2 * j + 1",
            ),
            "append: triton's position in a sequence": ("- (end - row)\n", "- (end - row) + 1\n"),
            "append: triton's length may be negative": ("((seqlen < 0) | (seqlen > capacity))", "(seqlen > capacity)"),
        },
    ),
    *mutants(
        "kernels/tilelang/append/place.py",
        (f"{EMULATED}::test_case[packed]", f"{EMULATED}::test_wrong_values_are_recorded"),
        {
            "append: the page of the next token": (
                "T.truncdiv(position, arg.tokens)]",
                "T.truncdiv(position + 1, arg.tokens)]",
            ),
            "append: the page behind the last": ("(page >= arg.pages)", "(page > arg.pages)"),
            "append: a sequence begins one later": (
                "arg.cu_seqlens_q[middle] <= row",
                "arg.cu_seqlens_q[middle] < row",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/append/elements.py",
        (f"{EMULATED}::test_case[packed]",),
        {
            "append: a pair's second element": (
                "second[at_second] = T.cast(a * sine + b * cosine,",
                "second[at_second] = T.cast(a * sine - b * cosine,",
            ),
        },
    ),
    *mutants(
        "runtime/append.py",
        ("api/test_append.py::test_new_rows_in_the_cache", "api/test_append.py::test_a_write_is_seen_by_autograd"),
        {
            "append: addresses are looked at once": (
                "if self._may_overlap(addresses):",
                "if not self.known_distances:",
            ),
            "append: one cache has a version": (
                "for cache in (inputs.k_cache, inputs.v_cache) if",
                "for cache in (inputs.k_cache,) if",
            ),
        },
    ),
    *mutants(
        "call/deferred_status.py",
        ("call/test_cache_status.py",),
        {
            "status: copies follow each other": (
                " and (not self.kind.pause or time.monotonic() >= self.next_start)",
                "",
            ),
        },
    ),
]
