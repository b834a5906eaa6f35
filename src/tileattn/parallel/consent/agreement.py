"""Agreement: ranks find out that they differ, or that one has failed, before they wait for each other's tensors.

Ranks write to the store of the process group, never to a GPU. Each attention call of a plan has a number. At the first
call of each signature (shapes, dtypes, options, variant, ranges of keys), or at every call with `check="always"`, each
rank writes its signature, or the error that its arguments raised, under the call's number, waits for those of all
others, and compares. All ranks then raise the same error, which names the rank, or all go on. No tensor is on its way
yet, so the plan stays usable.

At a call whose signature was agreed before, ranks exchange nothing. One that fails, or that sees a signature for the
first time, writes to the store all the same; those that wait for its tensors look there now and then
(:meth:`Agreement.watch`) and raise. Their process group then holds a transfer that never ends: it has to be made anew.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from .heartbeat import Heartbeat, Silence

Signature = dict[str, str]
_LOOK = 0.25  # seconds between two looks into the store while tensors are awaited
_LISTEN = 1.0  # seconds after which a rank that waits begins to listen for heartbeats
_REMEMBERED = 4096  # signatures


class RankError(RuntimeError):
    """Another rank has failed, has ended, or made another call. `rank` is its number in the group."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Agreement:
    """The agreement between the ranks of one plan.

    Args:
        store: the part of the store that the plan has for itself.
        heart: the heartbeats of the ranks.
        always: whether every call is agreed on, or the first of each signature only.
    """

    def __init__(self, store: Any, heart: Heartbeat, always: bool) -> None:
        self.store, self.heart, self.always = store, heart, always
        self.rank, self.ranks = heart.rank, heart.ranks
        self.call = 0
        self.agreed_at = 0
        self.mine: list[str] = []  # keys that I wrote, until all have read them
        self.seen: OrderedDict[str, None] = OrderedDict()
        self.silence: Silence | None = None
        self.looked = 0.0

    # --- Before the tensors ---

    def begin(self) -> None:
        """Counts a call. Each rank makes the same calls in the same order."""
        self.call += 1

    def agree(self, signature: Signature, capturing: bool = False, captured: Signature | None = None) -> None:
        """Returns if all ranks have the same signature at this call.

        Args:
            signature: of this rank.
            capturing: whether the call is captured in a CUDA graph.
            captured: the signature that the same call has in a capture. It follows from what ranks agree on here, so it
                counts as agreed on.

        Raises:
            RuntimeError: ranks would have to agree during a capture.
            RankError: another rank's arguments were refused, its signature differs, or it has ended.
        """
        if self.ranks == 1:
            return
        text = json.dumps(signature)
        if not self.always and text in self.seen:
            return
        if capturing:
            error = RuntimeError(
                self._of_call(
                    "ranks must agree on a call before a CUDA graph captures it, since they agree on the host, where a "
                    "replay does nothing: make the same call once before, with check='first'"
                )
            )
            self.refuse(error)
            raise error
        self._write({"signature": signature})
        answers = self._answers()
        self.agreed_at = self.call
        self.compare(answers)
        self.seen[text] = None
        if captured is not None:
            self.seen[json.dumps(captured)] = None
        while len(self.seen) > _REMEMBERED:
            self.seen.popitem(last=False)

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks that this rank's arguments raised an error, which the caller then raises."""
        if self.ranks > 1:
            # It stays when this rank, which waits for nobody, has refused the next calls, too, and deletes its answer.
            self._tell(f"rank {self.rank} refused its arguments: {_shown(error)}", refused=True)
            self._write({"error": _shown(error)})
            self.agreed_at = self.call

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Within it, an error of this rank is told to the others, which may wait for tensors of this call."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """Tells the other ranks, which may wait for tensors of this call, that this rank has failed."""
        if self.ranks > 1 and not isinstance(error, RankError):
            self._tell(_shown(error))

    def _tell(self, error: str, **more: Any) -> None:
        self._set(f"failed{self.call}", json.dumps({"rank": self.rank, "error": error, **more}))

    def compare(self, answers: list[dict[str, Any]]) -> None:
        """Raises RankError if a rank refused, or if signatures differ."""
        for answer in answers:
            if "named" in answer:
                raise RankError(answer["error"], answer["named"])
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(self._of_call(f"rank {rank} refused its arguments: {answer['error']}"), rank)
        signatures = [answer["signature"] for answer in answers]
        for name in signatures[0]:
            values = [signature.get(name, "") for signature in signatures]
            if len(set(values)) > 1:
                # Of two values that are equally common, the one that the lowest rank has counts as the usual one.
                usual = Counter(values).most_common(1)[0][0]
                odd = next(rank for rank, value in enumerate(values) if value != usual)
                raise RankError(
                    self._of_call(
                        f"ranks must make the same call, but {name} is {values[odd]} on rank {odd} and {usual} on rank "
                        f"{values.index(usual)}"
                    ),
                    odd,
                )

    def _of_call(self, text: str) -> str:
        return f"tileattn.parallel, call {self.call} of this plan: {text}"

    def _write(self, answer: dict[str, Any]) -> None:
        key = f"{self.call}/{self.rank}"
        self._set(key, json.dumps(answer))
        self._set("asks", json.dumps([self.call, self.rank]))
        # Whoever wrote for this call has read all that was written for those before.
        for old in self.mine[:-1]:
            self._asked(self.store.delete_key, old)
        self.mine = [*self.mine[-1:], key]

    def _answers(self) -> list[dict[str, Any]]:
        """What all ranks wrote for this call. Waits for them."""
        keys = [f"{self.call}/{rank}" for rank in range(self.ranks)]
        begin, pause = time.monotonic(), 1e-4
        self.silence = None
        while not self._asked(self.store.check, keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            self._listen(time.monotonic() - begin)
            self._raise_failed()
        return [json.loads(self._asked(self.store.get, key)) for key in keys]

    # --- While tensors are awaited ---

    def watch(self, waited: float) -> None:
        """Called now and then while a transfer is awaited, with the seconds waited so far.

        Raises:
            RankError: another rank has failed or ended, or is not in this call.
        """
        if waited < self.looked:  # another transfer has begun
            self.looked, self.silence = 0.0, None
        if waited - self.looked < _LOOK:
            return
        self.looked = waited
        self._raise_failed()
        self._raise_asked()
        self._listen(waited)

    def explain(self, error: Exception) -> None:
        """Finds out which rank ended, after a transfer has failed. Returns if none is known to.

        Raises:
            RankError: it names the rank.
        """
        if isinstance(error, RankError):
            return
        silence, begin = self.heart.watch(), time.monotonic()
        while time.monotonic() - begin < 4.0:
            self._raise_failed()
            self._raise_asked()
            try:
                quiet = silence.ended(2.5)
            except RuntimeError as broken:
                self._lost(broken)
            if quiet:
                self._raise_ended(quiet[0])
            time.sleep(0.1)

    def _raise_failed(self) -> None:
        if self._asked(self.store.check, [f"failed{self.call}"]):
            failed = json.loads(self._asked(self.store.get, f"failed{self.call}"))
            known = "refused" in failed and self.agreed_at >= self.call  # as in a later backward pass of a good call
            if failed["rank"] != self.rank and not known:
                self.agreed_at = self.call
                named = failed.get("ended", failed["rank"])
                raise RankError(self._of_call(failed["error"]), named)

    def _raise_asked(self) -> None:
        """Raises if a rank asks for agreement on this call or one before, on which this rank saw no need to agree."""
        if not self._asked(self.store.check, ["asks"]):
            return
        call, rank = json.loads(self._asked(self.store.get, "asks"))
        if not self.agreed_at < call <= self.call or rank == self.rank:
            return
        answer = json.loads(self._asked(self.store.get, f"{call}/{rank}"))
        text = (
            "makes a call that this rank does not make: its signature is new there, and was agreed on here before. A "
            "mask's tensor may hold something else there, or was written here by what PyTorch does not count, such as "
            "torch.distributed.broadcast (then call torch.autograd.graph.increment_version)"
        )
        if "error" in answer:
            text = f"refused its arguments: {answer['error']}"
        error = RankError(f"tileattn.parallel, call {call} of this plan: rank {rank} {text}", rank)
        answer = {"error": str(error), "named": rank}
        self._set(f"{call}/{self.rank}", json.dumps(answer))  # for those that wait for my signature
        raise error

    def _listen(self, waited: float) -> None:
        if waited < _LISTEN:
            return
        if self.silence is None:
            self.silence = self.heart.watch()
        try:
            quiet = self.silence.ended()
        except RuntimeError as error:
            self._lost(error)
        if quiet:
            self._raise_ended(quiet[0])

    def _raise_ended(self, rank: int) -> NoReturn:
        text = f"rank {rank} gives no sign of life: its process has ended, or no Python thread runs in it"
        self._set(f"failed{self.call}", json.dumps({"rank": self.rank, "ended": rank, "error": text}))
        raise RankError(self._of_call(text), rank)

    # --- The store ---

    def _set(self, key: str, value: str) -> None:
        self._asked(self.store.set, key, value)

    def _asked(self, ask: Any, *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        raise RankError(
            self._of_call(
                "the store of the process group does not answer: the process that holds it has ended (that of rank 0, "
                "unless a launcher such as torchrun holds it)"
            ),
            0,
        ) from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
