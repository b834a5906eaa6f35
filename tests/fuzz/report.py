"""How a failure is shown: the seed, what is wrong, the minimal call as Python reads it, and how to run it again."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from .spec import Call


class Failure(NamedTuple):
    """What is known of one failure; `call` is as drawn, `minimal` as shrunk."""

    call: str
    minimal: str
    wrong: str
    detail: str
    seed: str
    device: str
    structure: int = -1

    def text(self) -> str:
        call = Call.from_json(self.minimal)
        lines = [
            f"FAILED (seed {self.seed})",
            f"  {self.wrong}",
            self.detail,
            f"  minimal call: {sketch(call)}",
            f"  again: make fuzz ARGS={shlex.quote(f'--device {self.device} --call {shlex.quote(self.minimal)}')}",
            f"  as drawn: {self.call}",
        ]
        return "\n".join(line for line in lines if line)


def sketch(call: Call) -> str:
    """The call in words close to Python; how values are made is in :mod:`fuzz.values`."""
    if call.packed:
        sizes = (
            f"lengths_q={list(call.lengths_q)}, lengths_k={list(call.lengths_k)}, heads={call.heads}/{call.kv_heads}"
        )
    else:
        sizes = f"batch={call.batch}, seqlen={call.seqlen_q}/{call.seqlen_k}, heads={call.heads}/{call.kv_heads}"
    dims = f"head_dim={call.head_dim}" + (f"/{call.head_dim_v}" if call.head_dim_v != call.head_dim else "")
    skipped = {
        "seed", "adapter", "dtype", "batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v",
        "lengths_q", "lengths_k",
    }  # fmt: skip
    options = [f"{name}={_shown(value)}" for name, value in call.changed().items() if name not in skipped]
    return f"{call.adapter}({call.dtype}, {sizes}, {dims}{''.join(', ' + option for option in options)})"


def _shown(value: Any) -> str:
    return repr(value) if not isinstance(value, tuple) else repr(list(value))
