"""Several ranks: who computes and sends what, sums of gradients, agreement."""

from __future__ import annotations

from ..mutant import Mutant, mutants

PLAN, CONFORMANCE = ("parallel/test_plan.py",), ("parallel/test_conformance.py",)
GROUPS = ("parallel/test_groups.py",)
WINDOWS, SHIFTED = ("parallel/test_windows.py",), ("parallel/test_shifted.py",)
AGREEMENT, DOCUMENTS = ("parallel/test_agreement.py",), ("parallel/test_documents.py",)
CONTENTS, RANKS_OF_CONTENTS = ("parallel/test_contents.py",), ("parallel/test_contents_ranks.py",)
DROPOUT, COMPILE = ("parallel/test_dropout.py",), ("parallel/test_compile.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "parallel/algorithms/shifted.py",
        SHIFTED,
        {
            "parallel: a window that is not shifted": ("window.left + k - q", "window.left"),
            "parallel: relative masks at any shift": (
                "if mask is None or (q == k and is_relative(mask)):",
                "if is_relative(mask):",
            ),
            "parallel: all keys seen too early": ("first + right >= keys - 1", "first + right >= keys - 2"),
            "parallel: biases of all heads": (
                "heads = slice(None) if tensor.shape[1] == 1 else",
                "heads = slice(None) if True else",
            ),
        },
    ),
    *mutants(
        "parallel/sharding/ranges.py",
        CONTENTS,
        {
            "parallel: hosts compute on the default device": ('_HOST = torch.device("cpu")', "_HOST = None"),
            "parallel: a capture waits": ('if device.type == "cuda" and torch', "if False and torch"),
        },
    ),
    *mutants(
        "parallel/sharding/visible.py",
        ("parallel/test_visible.py",),
        {
            "parallel: a user's mask is asked for one head": ("if by_h else 0)", "if False else 0)"),
            "parallel: the last block that is seen is left out": ("visible, key_lo + BLOCK, 0", "visible, key_lo, 0"),
        },
    ),
    *mutants(
        "parallel/sharding/visible.py",
        CONTENTS,
        {
            "parallel: a capture reads tensors": (
                "if operands.tensors and (not reading or",
                "if operands.tensors and (",
            ),
            "parallel: a large matrix is read": ("and values[name].numel() > MOST_BLOCKS", "and False"),
        },
    ),
    *mutants(
        "parallel/sharding/ranges.py",
        CONTENTS,
        {
            "parallel: ranges that are read last": (
                "if ask is Ask.LASTING and not is_settled(mask):",
                "if False:",
            ),
        },
    ),
    *mutants(
        "parallel/sharding/contents.py",
        CONTENTS,
        {
            "parallel: keys of a tensor before it was written": ("entry.versions != versions", "False"),
            "parallel: keys of a tensor that is gone": (
                "any(ref() is None for ref in entry.tensors)]",
                "False]",
            ),
            "parallel: a part that reads is settled": (
                "return is_settled(mask.x) and is_settled(mask.y)",
                "return is_settled(mask.x) or is_settled(mask.y)",
            ),
        },
    ),
    *mutants(
        "parallel/plan.py",
        RANKS_OF_CONTENTS,
        {
            "parallel: a capture is not agreed on with its call": (
                "is_capturing(rows[0]), prepared.captured)",
                "is_capturing(rows[0]))",
            ),
        },
    ),
    *mutants(
        "parallel/sharding/ranges.py",
        WINDOWS,
        {
            "parallel: every key is needed": (
                "return torch.minimum(low.maximum(none), lengths), torch.minimum(high.maximum(none), lengths)",
                "return none, lengths",
            ),
            "parallel: the device of the first part alone": (
                "yield from _devices(value)",
                "yield from [*_devices(value)] or [torch.device('cpu')]",
            ),
        },
    ),
    *mutants(
        "parallel/transport/transfer.py",
        PLAN,
        {
            "parallel: gaps are not zeros": ("x[:, row : row + gap] = 0.0", "x[:, row : row + gap] = torch.nan"),
            "parallel: a sum of this rank only": (
                "    for (part,) in parts:\n        total += part",
                "    total += parts[link.rank][0]",
            ),
        },
    ),
    *mutants(
        "parallel/algorithms/pieces.py",
        PLAN,
        {"parallel: keys of another span": ("if start <= first and last <= stop:", "if start <= first < stop:")},
    ),
    *mutants(
        "parallel/algorithms/gather_backward.py",
        PLAN,
        {
            "parallel: dk and dv of the last group only": (
                "        self._arrived()\n        self.summing = summing, self.kv_heads",
                "        self.summing = summing, self.kv_heads",
            ),
        },
    ),
    *mutants(
        "parallel/sharding/own.py",
        GROUPS,
        {
            "parallel: own keys without what lies before them": (
                "return run.start <= aligned(reached[0]) and reached[1] <= run.stop",
                "return reached[1] <= run.stop",
            ),
            "parallel: rows of own queries from the run's begin": (
                "for start, stop in (inner[1:], reached)",
                "for start, stop in ((run.start, inner.stop), reached)",
            ),
        },
    ),
    *mutants(
        "parallel/transport/sums.py",
        GROUPS,
        {
            "parallel: sums in 16 bits": ("else before[0].to(dtype)", "else before[0]"),
            "parallel: sums of all heads": ("head_ends = _ends(heads,", "head_ends = _ends((0, out.shape[2]),"),
        },
    ),
    *mutants(
        "parallel/algorithms/ring.py",
        CONFORMANCE,
        {
            "parallel: a ring forgets what it saw": (
                "merge(place_o, place_lse, o.to(place_o.dtype), lse.to(place_lse.dtype))",
                "(o, lse)",
            ),
            "parallel: dk and dv do not go home": (
                "        if last == 0:\n            return dkv",
                "        return dkv",
            ),
        },
    ),
    *mutants(
        "parallel/sharding/documents.py",
        DOCUMENTS,
        {"parallel: no document is cut": ("min(ranks, math.ceil(size / most))", "1")},
    ),
    *mutants(
        "parallel/consent/agreement.py",
        AGREEMENT,
        {
            "parallel: signatures are not compared": ("if len(set(values)) > 1:", "if False:"),
            "parallel: nobody looks while tensors are awaited": (
                "        self.looked = waited\n        self._raise_failed()\n        self._raise_asked()\n",
                "        self.looked = waited\n",
            ),
            "parallel: a refusal is forgotten after two more": (
                'self._tell(f"rank {self.rank} refused its arguments: {_shown(error)}", refused=True)',
                "pass",
            ),
            "parallel: a refusal ends later backward passes": (
                'known = "refused" in failed and self.agreed_at >= self.call',
                "known = False",
            ),
        },
    ),
    *mutants(
        "parallel/consent/agreement.py",
        ("parallel/test_compile.py::test_a_capture_of_one_rank",),
        {"parallel: a capture that is refused is not told": ("            self.refuse(error)\n", "")},
    ),
    *mutants(
        "parallel/algorithms/autograd.py",
        RANKS_OF_CONTENTS,
        {
            "parallel: an error before the backward pass is not told": (
                "with ctx.call.agreement.telling():",
                "if True:",
            ),
        },
    ),
    *mutants(
        "parallel/algorithms/widened.py",
        DROPOUT,
        {"parallel: queries cut groups of the pattern": ("rows, keys = part.queries[0] % GROUP,", "rows, keys = 0,")},
    ),
    *mutants(
        "parallel/algorithms/call.py",
        DROPOUT,
        {
            "parallel: every part drops as the first head": (
                "head = (part.sequence or 0) * call.heads + part.heads[0]",
                "head = 0",
            ),
            "parallel: documents drop alike": (
                "head = (part.sequence or 0) * call.heads + part.heads[0]",
                "head = part.heads[0]",
            ),
            "parallel: rows of zeros have probabilities": (
                "padded(lse, wide.rows, 2, torch.inf)",
                "padded(lse, wide.rows, 2, torch.nan)",
            ),
        },
    ),
    *mutants(
        "parallel/algorithms/shifted.py",
        DROPOUT,
        {"parallel: keys of zeros are seen": ("    if hidden:", "    if False:")},
    ),
    *mutants(
        "parallel/plan.py",
        (*DROPOUT, *COMPILE),
        {
            "parallel: each rank drops by its own seed": (
                "seed = self._link.from_first(draw_seed(rows[0].device) if seed is None else seed, self.ranks)",
                "seed = draw_seed(rows[0].device) if seed is None else seed",
            ),
            "parallel: a capture agrees": (
                "self._agreement.agree(prepared.signature, is_capturing(rows[0]),",
                "self._agreement.agree(prepared.signature, False,",
            ),
        },
    ),
    *mutants(
        "parallel/operators.py",
        COMPILE,
        {
            "parallel: compiled code drops other elements in its backward pass": (
                "operands = prepared.operands._replace(seed=seed) if dropout_p else prepared.operands",
                "operands = prepared.operands._replace(seed=seed + 1) if dropout_p else prepared.operands",
            ),
        },
    ),
]
