"""Errors of tileattn's functions, in the names that flash-attn's arguments have."""

from __future__ import annotations

import re
from collections.abc import Mapping


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> Exception:
    """The same error, in whose message each word among `names` is another."""
    message = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(error))
    return type(error)(message)
