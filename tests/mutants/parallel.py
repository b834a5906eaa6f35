"""Several ranks: who computes and sends what, sums of gradients, agreement."""

from __future__ import annotations

from .mutant import Mutant, mutants

PLAN, CONFORMANCE = ("parallel/test_plan.py",), ("parallel/test_conformance.py",)
WINDOWS, SHIFTED = ("parallel/test_windows.py",), ("parallel/test_shifted.py",)
AGREEMENT, DOCUMENTS = ("parallel/test_agreement.py",), ("parallel/test_documents.py",)

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
        WINDOWS,
        {
            "parallel: every key is needed": (
                "start, stop = max(0, min(low, length)), max(0, min(high, length))",
                "start, stop = 0, length",
            )
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
        "parallel/algorithms/gather.py",
        PLAN,
        {
            "parallel: keys of another span": ("if start <= first and last <= stop:", "if start <= first < stop:"),
            "parallel: dk and dv of the last group only": (
                "            self._arrived()\n            self.summing = summing",
                "            self.summing = summing",
            ),
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
        {"parallel: no document is cut": ("if ranks > 1 and sizes[document] > _CUT_ABOVE * share:", "if False:")},
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
        },
    ),
]
