"""The support matrix: what each backend's `refusal` answers, for every architecture. `{{ support }}` stands for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch

from tileattn.cli.info import AnyCall, AnyExample, Example, answers, caching_examples, chosen, examples
from tileattn.kernels.packages import any_machine
from tileattn.kernels.tilelang.architecture import ARCHITECTURES
from tileattn.runtime.dispatch import BACKENDS

MACRO = "{{ support }}"
ARCHS = ("cpu", *ARCHITECTURES)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
SIZE = re.compile(r", not (?:\d+|torch\.\w+)$")
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256, 264, 512)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook."""
    return markdown.replace(MACRO, matrix()) if MACRO in markdown else markdown


def matrix() -> str:
    """Four tables, of dtypes, head dims, features and caches, and the reasons of refusals, as Markdown.

    Architectures of which every answer is the same share a column.
    """
    plain = Example("")
    dtypes = [dataclasses.replace(plain, name=str(d).removeprefix("torch."), dtype=d) for d in DTYPES]
    dims = [dataclasses.replace(plain, name=str(size), head_dim=size, head_dim_v=size) for size in HEAD_DIMS]
    features = [each for each in examples() if each.dtype == torch.bfloat16 and not each.name.startswith("head dim ")]
    tables: dict[str, Sequence[AnyExample]] = {
        "dtype (head dim 128)": dtypes,
        "head dim (bfloat16)": dims,
        "feature (bfloat16)": features,
        "caches (bfloat16, head dim 128)": caching_examples(),
    }
    reasons: dict[str, int] = {}
    with any_machine():
        answers = {
            arch: {h: [_cell(row.call(arch), reasons) for row in rows] for h, rows in tables.items()} for arch in ARCHS
        }
    columns: dict[str, str] = {}  # from the first architecture of a column to all of them
    for arch in ARCHS:
        first = next((known for known in columns if answers[known] == answers[arch]), arch)
        columns[first] = f"{columns[first]}, {arch}" if first in columns else arch
    parts = [_table(h, rows, columns, {arch: answers[arch][h] for arch in columns}) for h, rows in tables.items()]
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return "\n\n".join([*parts, "The numbers are the reasons of refusals:", notes])


def _table(heading: str, rows: Sequence[AnyExample], columns: dict[str, str], answers: dict[str, list[str]]) -> str:
    lines = [f"| {heading} | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for index, row in enumerate(rows):
        lines.append(f"| {row.name} | {' | '.join(answers[arch][index] for arch in columns)} |")
    return "\n".join(lines)


def _cell(call: AnyCall, reasons: dict[str, int]) -> str:
    """The backends that run a call, in the order of preference; (named) where dispatch passes over one that would."""
    lines = []
    passed_over, runs = True, chosen(call)
    for backend in BACKENDS:
        reason, _ = answers(backend, call)
        if reason is not None:
            reason = _general(reason, call.arch)
            lines.append(f"~~{backend.name}~~&nbsp;{reasons.setdefault(reason, len(reasons) + 1)}")
        else:
            passed_over = passed_over and backend.name != runs
            lines.append(f"**{backend.name}**" + "&nbsp;(named)" * passed_over)
    return "<br>".join(lines)


def _general(reason: str, arch: str) -> str:
    """A reason without what differs from cell to cell, so that it has one number."""
    reason = reason.replace(f"device {arch!r}", "the device").replace(f", not {arch}", "").replace(arch, "this device")
    return SIZE.sub("", reason)
