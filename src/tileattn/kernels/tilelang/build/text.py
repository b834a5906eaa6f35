"""Kernels as JSON: dataclasses of tileattn, whose fields are numbers, texts, dtypes, tuples and such dataclasses."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from ....variant.key import CLASSES

PACKAGE = __name__.partition(".")[0]
PLACES = (f"{PACKAGE}.call.", f"{PACKAGE}.kernels.tilelang.")  # where classes are taken from


def encode(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Enum):
        return {"class": _name_of(type(value)), "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        # Fields that follow from others are not arguments.
        given = {each.name: encode(getattr(value, each.name)) for each in fields(value) if each.init}
        return {"class": _name_of(type(value)), "fields": given}
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_fields"):
            return {"class": _name_of(type(value)), "items": [encode(each) for each in value]}
        return [encode(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r} has no form in JSON")


def decode(value: Any) -> Any:
    """The value that :func:`encode` made this of; lists become tuples.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, list):
        return tuple(decode(each) for each in value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is no dtype")
        return dtype
    kind = _class(value["class"])
    if "fields" in value:
        return kind(**{name: decode(each) for name, each in value["fields"].items()})
    if "items" in value:
        return kind(*(decode(each) for each in value["items"]))
    return kind(value["value"])


def modules_of(text: str) -> list[str]:
    """The modules, besides this package's own variants, of the masks and modifications that a text names.

    A kernel's key names a class. A new process knows only those of `tileattn.variant`.
    """
    modules = {known.__module__ for known in _classes_of(text)}
    return sorted(module for module in modules if module != "__main__" and not module.startswith("tileattn.variant"))


def of_main(text: str) -> list[str]:
    """The classes that a text names and that the main script defines: no other process can import these."""
    return sorted(known.__name__ for known in _classes_of(text) if known.__module__ == "__main__")


def _classes_of(text: str) -> list[type]:
    named = set(re.findall(r"(\w+)\(", text))
    return [known for name, known in CLASSES.items() if name in named]


def import_modules(names: Iterable[str]) -> None:
    """Imports modules that define masks and modifications."""
    for name in names:
        importlib.import_module(name)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if not module.startswith(PLACES):
        raise ValueError(f"{name!r} is no class of tileattn's kernels")
    kind = getattr(importlib.import_module(module), qualname)
    # Functions, and classes that a module has only imported, such as Path, would do more than hold values.
    if not isinstance(kind, type) or kind.__module__ != module or not _holds_values(kind):
        raise ValueError(f"{name!r} is no class of tileattn's kernels")
    return kind


def _holds_values(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Enum) or hasattr(kind, "_fields")
