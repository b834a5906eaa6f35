"""Translates the argument names in error messages, where a function calls another whose arguments have other names."""

from __future__ import annotations

import re
from collections.abc import Mapping


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """A copy of the error, with the keys of `names` in its message replaced by their values."""
    message = re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], str(error))
    return type(error)(message)
