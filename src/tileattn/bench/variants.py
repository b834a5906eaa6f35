"""The variants of attention by name: masks, score modifications and the sink.

A name consists of terms joined with "+". All masks hold at once; score modifications apply in the order of `TERMS`.

    full                every query sees every key
    causal              a query sees keys up to its own position
    window1024          a causal sliding window: its own position and the 1024 before it, `SlidingWindow(1024, 0)`
    window512-256       a sliding window: 512 positions before its own to 256 after, `SlidingWindow(512, 256)`
    prefix256           causal, and every query sees the first 256 keys
    documents1024       packed documents of 1024 tokens each: only keys of the query's own document
    softcap50           score -> 50 * tanh(score / 50)
    alibi               score -> score - slope[head] * |q_pos - k_pos|
    bias                score -> score + bias[head, q, k], the same for every batch element
    bias-bh             score -> score + bias[batch, head, q, k]
    bias-b1             score -> score + bias[batch, q, k], the same for every head
    bias-11             score -> score + bias[q, k], the same for every batch element and head
    dbias               with a bias: its gradient is wanted too, in addition to those of q, k and v
    userscore           score -> user_score(score, ...), a plain Python function
    sink                one logit per head joins the softmax's denominator

Every mask here is an interval of keys per query. FLOPs, the oracle and the baselines' dense masks are computed from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TERMS = {
    "causal": r"causal",
    "window": r"window(?P<left>\d+)(?:-(?P<right>\d+))?",
    "prefix": r"prefix(?P<prefix>\d+)",
    "documents": r"documents(?P<documents>[1-9]\d*)",
    "softcap": r"softcap(?P<softcap>\d+(?:\.\d+)?)",
    "alibi": r"alibi",
    "bias": r"bias(?:-(?P<bias>bh|b1|1h|11))?",
    "dbias": r"dbias",
    "userscore": r"userscore",
    "sink": r"sink",
}
MASKS = ("causal", "window", "prefix", "documents")
ACCEPTED_MASKS = "full, or masks joined with '+': causal, window<L> or window<L>-<R>, prefix<N>, documents<N>"
ACCEPTED = (
    "full, or terms joined with '+': causal, window<L> or window<L>-<R>, prefix<N>, documents<N>, softcap<cap>, "
    "alibi, bias or bias-<bh, b1 or 11> (+dbias), userscore, sink (for example causal+softcap50)"
)


def user_score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A score modification of a user: the farther a key, the smaller the factor of its score.

    The factor falls from 1 to a half over 16384 positions. The same function is given to tileattn, which traces it, to
    FlexAttention, which compiles it, and to plain PyTorch: it takes numbers, traced values and tensors alike.
    """
    return score * (1.0 - abs(q - k) * 2.0**-15)


@dataclass(frozen=True)
class Variant:
    """Masks (`causal`, `window` as (left, right), `prefix`, `documents`), score modifications, and a sink.

    bias: None, or the dimensions (batch, heads) that the bias has: "1h" is (1, heads, seqlen_q, seqlen_k), and so on.
    dbias: Whether a backward pass computes the gradient of the bias.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    prefix: int | None = None
    documents: int | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None
    dbias: bool = False
    userscore: bool = False
    sink: bool = False

    @property
    def name(self) -> str:
        """The name that `parse` reads back."""
        terms = []
        if self.causal:
            terms.append("causal")
        if self.window is not None:
            left, right = self.window
            terms.append(f"window{left}-{right}" if right else f"window{left}")
        if self.prefix is not None:
            terms.append(f"prefix{self.prefix}")
        if self.documents is not None:
            terms.append(f"documents{self.documents}")
        if self.softcap is not None:
            terms.append(f"softcap{written_out(self.softcap)}")
        terms += ["alibi"] if self.alibi else []
        if self.bias is not None:
            terms.append("bias" if self.bias == "1h" else f"bias-{self.bias}")
        terms += [flag for flag in ("dbias", "userscore", "sink") if getattr(self, flag)]
        return "+".join(terms) or "full"

    @property
    def plain(self) -> bool:
        """Whether it is full or causal and nothing else, which every implementation supports."""
        return self.name in ("full", "causal")

    @property
    def masked(self) -> bool:
        """Whether a mask may hide some key from some query."""
        return self.causal or self.window is not None or self.prefix is not None or self.documents is not None

    @property
    def modified(self) -> bool:
        """Whether a score modification is applied."""
        return self.softcap is not None or self.alibi or self.bias is not None or self.userscore

    @property
    def mask(self) -> Variant:
        """The masks alone, without score modifications and sink."""
        return Variant(self.causal, self.window, self.prefix, self.documents)

    def key_range(self, q_pos: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        """The keys `lo <= k < hi` that each query position sees; `hi <= lo` where it sees none.

        q_pos: int64 of any shape, aligned bottom-right (`q_idx + seqlen_k - seqlen_q`), so possibly negative.
        """
        lo, hi = q_pos.new_zeros(q_pos.shape), q_pos.new_full(q_pos.shape, seqlen_k)
        if self.causal:
            hi = hi.minimum(q_pos + 1)
        if self.window is not None:
            left, right = self.window
            lo, hi = lo.maximum(q_pos - left), hi.minimum(q_pos + right + 1)
        if self.prefix is not None:
            hi = hi.minimum((q_pos + 1).clamp(min=self.prefix))
        if self.documents is not None:
            start = q_pos.div(self.documents, rounding_mode="floor") * self.documents
            lo, hi = lo.maximum(start), hi.minimum(start + self.documents)
        return lo, hi


def parse(name: str) -> Variant:
    """The variant of a name; `ValueError` names the term that is not understood and those that are."""
    terms: dict[str, bool | int | float | str | tuple[int, int]] = {}
    for term in name.split("+"):
        if term == "full" and name == "full":
            continue
        kind, match = _match(term)
        if match is None:
            raise ValueError(f"variant {name!r}: {term!r} is not understood; accepted: {ACCEPTED}")
        if kind in terms:
            raise ValueError(f"variant {name!r}: {kind!r} is given twice")
        terms[kind] = _value(kind, match)
    if "dbias" in terms and "bias" not in terms:
        raise ValueError(
            f"variant {name!r}: 'dbias' is the gradient of a bias, and there is none; accepted: {ACCEPTED}"
        )
    return Variant(**terms)  # type: ignore[arg-type]


def is_mask(term: str) -> bool:
    """Whether a term is a mask."""
    return term == "full" or _match(term)[0] in MASKS


def written_out(number: float) -> str:
    """A positive number in decimal digits that reads back exactly, without an exponent."""
    text = f"{Decimal(repr(float(number))):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _match(term: str) -> tuple[str, re.Match[str] | None]:
    for kind, pattern in TERMS.items():
        if match := re.fullmatch(pattern, term):
            return kind, match
    return "", None


def _value(kind: str, match: re.Match[str]) -> bool | int | float | str | tuple[int, int]:
    if kind == "window":
        return int(match["left"]), int(match["right"] or 0)
    if kind in ("prefix", "documents"):
        return int(match[kind])
    if kind == "bias":
        return match["bias"] or "1h"
    return float(match[kind]) if kind == "softcap" else True
