"""A server's day on one paged cache: arrivals, growth, ends, page reuse, prefix sharing, beside a plain reference.

Each step appends the new tokens of all running sequences with `append_kv` and attends with `decode`: chunks of prefill,
single tokens and drafts of speculative decoding in one packed call, or single tokens in a batch. Pages that nobody has
are NaN, and so are the rows of a page that were never written. Table entries behind a sequence's pages, and before its
window, lead nowhere.

The reference keeps every sequence's keys and values in a padded tensor of its own, written by indexing. What decode
returns is held to the tolerance rule beside standard attention on that tensor; the cache is compared bit by bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tileattn
from tests.tools.cached_sequences import Heads, int32
from tileattn import FunctionMask, SlidingWindow
from tileattn.call.decoding import Splits
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

NOWHERE = (-1, 2**31 - 1, -(2**31), 123_456_789)  # entries of a page table that must not be followed


@dataclass(frozen=True)
class Day:
    """What a day is like.

    Attributes:
        sizes: heads, head dims, dtype and device.
        backend: who decodes.
        steps: how many.
        page_size, pages: of the cache.
        running: the most sequences at a time.
        capacity: the longest sequence.
        prompt: the longest prompt.
        chunk: the most tokens of a prompt in a step.
        drafts: the most tokens of a decoding sequence in a step.
        window: the keys before its own that a query sees; pages before are given back. None: all.
        splits: as `decode` takes them.
        seed: of everything.
    """

    sizes: Heads
    backend: str
    steps: int
    page_size: int
    pages: int
    running: int
    capacity: int
    prompt: int
    chunk: int = 48
    drafts: int = 4
    window: int | None = None
    splits: Splits = None
    seed: int = 0


@dataclass
class Session:
    """A running sequence.

    Attributes:
        slot: its row of the plain reference.
        pages: its pages, in order; None where one was given back, since it lies before the window.
        length: keys that are in the cache.
        prompt: tokens of its prompt that are not.
        end: the length at which it ends.
    """

    slot: int
    prompt: int
    end: int
    pages: list[int | None] = field(default_factory=list)
    length: int = 0


@dataclass
class Counts:
    """What a day consisted of."""

    arrivals: int = 0
    ends: int = 0
    shared: int = 0
    reused: int = 0
    preempted: int = 0
    rejected: int = 0
    given_back: int = 0
    packed: int = 0
    dense: int = 0
    rows: int = 0
    longest: int = 0


class Server:
    """The cache, the running sequences, and the reference."""

    def __init__(self, day: Day) -> None:
        self.day, self.draw, self.counts = day, random.Random(day.seed), Counts()
        sizes = day.sizes
        self.generator = torch.Generator(sizes.device).manual_seed(day.seed)
        # Keys and values are views of one buffer.
        widest = max(sizes.head_dim, sizes.head_dim_v)
        memory = torch.full(
            (day.pages, 2, day.page_size, sizes.kv_heads, widest), torch.nan, dtype=sizes.dtype, device=sizes.device
        )
        self.k_cache, self.v_cache = memory[:, 0, ..., : sizes.head_dim], memory[:, 1, ..., : sizes.head_dim_v]
        self.plain_k, self.plain_v = (
            torch.zeros(day.running, day.capacity, sizes.kv_heads, dim, dtype=sizes.dtype, device=sizes.device)
            for dim in (sizes.head_dim, sizes.head_dim_v)
        )
        self.free = list(range(day.pages))
        self.draw.shuffle(self.free)
        self.users = [0] * day.pages
        self.met: set[int] = set()
        self.sessions: list[Session] = []

    def run(self) -> Counts:
        """The whole day."""
        for number in range(self.day.steps):
            self._arrive()
            self._step(f"step {number}")
            for session in [each for each in self.sessions if each.length >= each.end]:
                self.counts.ends += 1
                self._end(session)
            if number % 16 == 0:
                self.check_cache()
        self.check_cache()
        tileattn.check_caches()
        return self.counts

    # --- Arrivals, ends and pages ---

    def _arrive(self) -> None:
        day, draw = self.day, self.draw
        if len(self.sessions) == day.running or (self.sessions and draw.random() > 0.3):
            return
        taken = {session.slot for session in self.sessions}
        slot = next(slot for slot in range(day.running) if slot not in taken)
        prompt = min(day.prompt, 1 + int(draw.expovariate(3.0 / day.prompt)))
        end = min(day.capacity, prompt + 1 + int(draw.expovariate(4.0 / (day.capacity - day.prompt))))
        session = Session(slot, prompt, end)
        if self.sessions and draw.random() < 0.4:
            self._share(session, draw.choice(self.sessions))
        self.sessions.append(session)
        self.counts.arrivals += 1

    def _share(self, session: Session, other: Session) -> None:
        """The new sequence begins as another one does: some full pages of it are its own, too."""
        full = [page for page in other.pages[: other.length // self.day.page_size] if page is not None]
        count = min(len(full), session.prompt // self.day.page_size)
        if count == 0 or None in other.pages[:count]:
            return
        session.pages = [*full[:count]]
        for page in full[:count]:
            self.users[page] += 1
        session.length = count * self.day.page_size
        session.prompt -= session.length
        for plain in (self.plain_k, self.plain_v):
            plain[session.slot, : session.length] = plain[other.slot, : session.length]
        self.counts.shared += 1

    def _end(self, session: Session) -> None:
        self.sessions.remove(session)
        for page in session.pages:
            self._release(page)

    def _release(self, page: int | None) -> None:
        if page is None:
            return
        self.users[page] -= 1
        if self.users[page] == 0:
            self.k_cache[page], self.v_cache[page] = torch.nan, torch.nan
            self.free.insert(self.draw.randrange(len(self.free) + 1), page)

    def _grow(self, session: Session, length: int) -> bool:
        """Takes the pages for so many keys; where there are too few, the youngest other sequence is ended."""
        while len(session.pages) * self.day.page_size < length:
            if not self.free:
                others = [each for each in self.sessions if each is not session]
                if not others:
                    return False
                self._end(others[-1])
                self.counts.preempted += 1
                continue
            page = self.free.pop()
            self.users[page] = 1
            self.counts.reused += page in self.met
            self.met.add(page)
            session.pages.append(page)
        return True

    # --- A step ---

    def _step(self, name: str) -> None:
        day, draw = self.day, self.draw
        wanted: list[tuple[Session, int]] = []
        for session in list(self.sessions):
            if session not in self.sessions:
                continue  # ended for its pages
            most = min(day.chunk, session.prompt) if session.prompt else draw.randint(1, day.drafts)
            count = min(most, day.capacity - session.length)
            if draw.random() < 0.05:
                count = 0  # waits
            if self._grow(session, session.length + count):
                wanted.append((session, count))
        wanted = [(session, count) for session, count in wanted if session in self.sessions]
        draw.shuffle(wanted)
        if all(count == 0 for _, count in wanted):
            return
        if draw.random() < 0.4:  # single tokens of those that decode
            single = [(session, 1) for session, count in wanted if count and not session.prompt]
            if single:
                self._attend(name, single, packed=False)
                return self._accept(single)
        self._attend(name, wanted, packed=True)
        return self._accept(wanted)

    def _attend(self, name: str, wanted: list[tuple[Session, int]], packed: bool) -> None:
        """Appends random tokens to the sequences, and attends; everything is checked."""
        day, sizes = self.day, self.day.sizes
        counts = [count for _, count in wanted]
        lengths = [session.length + count for session, count in wanted]
        total, behind = sum(counts), 3 if packed and self.draw.random() < 0.3 else 0
        q, k, v = (
            torch.randn(total + behind, heads, dim, generator=self.generator, device=sizes.device).to(sizes.dtype)
            for heads, dim in (
                (sizes.heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim_v)
            )
        )  # fmt: skip
        for x in (q, k, v):
            x[total:] = torch.nan
        places = _Places([session.slot for session, _ in wanted], counts, lengths, sizes.device)
        self.plain_k[places.slot, places.position] = k[:total]
        self.plain_v[places.slot, places.position] = v[:total]

        named: dict[str, Tensor] = {"page_table": self._table([session for session, _ in wanted])}
        longest: dict[str, int] = {}
        if packed:
            named["cu_seqlens_q"] = int32([0, *_ends(counts)], sizes.device)
            longest = {"max_seqlen_q": max(counts) + self.draw.choice((0, 0, 7))}
            rows = (q, k, v)
        else:
            rows = (q[:, None], k[:, None], v[:, None])
        seqlens_k = int32(lengths, sizes.device)
        tileattn.append_kv(*rows[1:], self.k_cache, self.v_cache, seqlens_k, **named)
        call = (rows[0], self.k_cache, self.v_cache, seqlens_k)
        options = {
            "mask": None if day.window is None else SlidingWindow(day.window, 0),
            "splits": day.splits,
            "backend": day.backend,
        }
        plan = tileattn.decode_plan(*call, **named, **longest, **options) if self.draw.random() < 0.3 else None
        o, lse = tileattn.decode(*call, **named, **longest, **options, plan=plan, return_lse=True)
        if not packed:
            o, lse = o[:, 0], lse[:, :, 0].T
        self._check(name, q[:total], places, o, lse)
        self.counts.rows += total
        self.counts.longest = max(self.counts.longest, *lengths)
        self.counts.packed += packed
        self.counts.dense += not packed

    def _table(self, sessions: list[Session]) -> Tensor:
        """The page table of some sequences."""
        width = max(len(session.pages) for session in sessions) + self.draw.randrange(3)
        rows = []
        for session in sessions:
            row = [self.draw.choice(NOWHERE) for _ in range(width)]
            row[: len(session.pages)] = [-1 if page is None else page for page in session.pages]
            rows.append(row)
        return int32(rows, self.day.sizes.device)  # type: ignore[arg-type]

    def _accept(self, wanted: list[tuple[Session, int]]) -> None:
        """Of drafts, some tokens stay; the others' rows are written again later, and pages without a token go back."""
        size = self.day.page_size
        for session, count in wanted:
            if session.prompt:
                session.prompt -= count
                session.length += count
            elif count:
                accepted = self.draw.randint(1, count)
                session.length += accepted
                self.counts.rejected += count - accepted
            kept = -(-session.length // size)
            for page in session.pages[kept:]:
                self._release(page)
            del session.pages[kept:]
            if self.day.window is not None:
                for index in range(max(0, session.length - self.day.window) // size):
                    self.counts.given_back += session.pages[index] is not None
                    self._release(session.pages[index])
                    session.pages[index] = None

    # --- The reference ---

    def _check(self, name: str, q: Tensor, places: _Places, o: Tensor, lse: Tensor) -> None:
        """Holds a step's results to the rule: all sequences at once, padded, on the plain tensors."""
        total, window = q.shape[0], self.day.window
        keys, most = max(places.lengths), max(places.counts)
        padded = q.new_zeros(len(places.counts), most, *q.shape[1:])
        padded[places.number, places.row] = q
        first, count = (
            torch.tensor(x, device=q.device)[:, None, None, None]
            for x in ([n - c for n, c in zip(places.lengths, places.counts)], places.counts)
        )

        def allows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row = q - (keys - most)
            position = first[b.flatten()] + row
            seen = (k <= position) & (row < count[b.flatten()])
            return seen if window is None else seen & (k >= position - window)

        slots = torch.tensor(places.slots, device=q.device)
        call = (padded, self.plain_k[slots, :keys], self.plain_v[slots, :keys], FunctionMask(allows))
        (exact, exact_lse), (eager, eager_lse) = oracle_attention(*call), eager_attention(*call)
        at = (places.number, places.row)
        oracle = exact[at][None], exact_lse.transpose(1, 2)[at].T[None]
        runs = [x[at][None] for x in eager], [x.transpose(1, 2)[at].T[None] for x in eager_lse]
        assert_forward_accurate(name, (o[None, :total], lse[None, :, :total]), oracle, runs)
        assert (o[total:] == 0).all(), f"{name}: rows of no sequence"

    def check_cache(self) -> None:
        """Pages of nobody are NaN still; each sequence's keys and values are what was appended."""
        if self.free:
            free = torch.tensor(self.free, device=self.k_cache.device)
            assert self.k_cache[free].isnan().all(), "a page of nobody was written"
            assert self.v_cache[free].isnan().all(), "a page of nobody was written"
        size = self.day.page_size
        for session in self.sessions:
            known = [(index, page) for index, page in enumerate(session.pages) if page is not None]
            if not known or not session.length:
                continue
            index, pages = (torch.tensor(x, device=self.k_cache.device) for x in zip(*known))
            at = (index[:, None] * size + torch.arange(size, device=index.device)).flatten()
            for cache, plain in ((self.k_cache, self.plain_k), (self.v_cache, self.plain_v)):
                found = cache[pages].flatten(0, 1)[at < session.length]
                assert torch.equal(found, plain[session.slot, at[at < session.length]]), "a written token changed"


class _Places:
    """Where the rows of a packed call belong.

    slots, counts, lengths: of each sequence. number, row, slot, position: of each row, on the device.
    """

    def __init__(self, slots: list[int], counts: list[int], lengths: list[int], device: str) -> None:
        self.slots, self.counts, self.lengths = slots, counts, lengths
        rows = [
            (number, row, slots[number], length - count + row)
            for number, (count, length) in enumerate(zip(counts, lengths))
            for row in range(count)
        ]
        self.number, self.row, self.slot, self.position = torch.tensor(rows, device=device).T


def _ends(counts: list[int]) -> list[int]:
    found, end = [], 0
    for count in counts:
        end += count
        found.append(end)
    return found
