"""The values of an implementation beside those of one device: the ideal's, which ranks compute by heads.

Of o and the gradients some tokens are compared, with all heads. Together they may differ by two roundings of the dtype:
dk and dv are sums of parts, each of which a kernel has rounded (0.008 was seen in bfloat16, 0.0078 being one).
Two good kernels in 16 bits differ by half of that, whatever the length: rounding the outputs is most of an error. Exact
values are the business of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tileattn.bench.parallel.cases import Case
from tileattn.bench.parallel.implementations import Prepared
from tileattn.bench.parallel.problem import Part
from tileattn.bench.parallel.ranks import Ranks
from tileattn.testing.numerics import row_error

TOKENS = 96  # that are compared
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """How far values are from one device's.

    Attributes:
        errors: of all compared rows, relative, by name.
        wrong: the names of those that break the rule, or "".
    """

    errors: dict[str, float]
    wrong: str


def tokens_of(case: Case) -> Tensor:
    """The tokens that are compared: spread evenly, with the first and last of some documents."""
    spread = torch.linspace(0, case.seqlen - 1, TOKENS * 2 // 3, dtype=torch.float64).round().long()
    ends = torch.tensor(case.documents or (0, case.seqlen))
    borders = torch.cat([ends[:-1], ends[1:] - 1])
    return torch.cat([spread, borders[:: max(1, len(borders) * 3 // TOKENS)]]).unique()


def values_of(prepared: Prepared, mine: Values, case: Case, ranks: Ranks) -> Values:
    """The compared tokens, (tokens, heads, head_dim) by name, from all ranks; on all of them.

    mine: what a call computed on this rank.
    """
    tokens = tokens_of(case)
    held = torch.arange(case.seqlen) if prepared.part.tokens is None else prepared.part.tokens.cpu()
    order = torch.full((case.seqlen,), -1)
    order[held] = torch.arange(len(held))
    rows = order[tokens]
    here = rows >= 0
    cut = {name: x[0, rows[here].to(x.device)].cpu() for name, x in mine.items()}
    return _joined(tokens, case, ranks.gathered((here, prepared.part, cut)))


def _joined(tokens: Tensor, case: Case, parts: list[tuple[Tensor, Part, Values]]) -> Values:
    whole: Values = {}
    for here, part, cut in parts:
        for name, x in cut.items():
            keys = name in ("dk", "dv")
            heads = part.kv_heads if keys else part.heads
            shape = (len(tokens), case.kv_heads if keys else case.heads, x.shape[-1])
            place = whole.setdefault(name, torch.full(shape, torch.nan, dtype=x.dtype))
            place[here.nonzero()[:, 0], slice(None) if heads is None else heads] = x
    return whole


def verdict(found: Values, one_device: Values) -> Verdict:
    """How far values are from those of one device; what only one of them has is not compared."""
    errors, wrong = {}, []
    for name in one_device.keys() & found.keys():
        expected = one_device[name]
        errors[name] = row_error(found[name], expected.double()).whole
        if not errors[name] <= 2 * torch.finfo(expected.dtype).eps:  # nor is NaN
            wrong.append(name)
    return Verdict(dict(sorted(errors.items())), ", ".join(sorted(wrong)))
