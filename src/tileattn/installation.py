"""How this tileattn was installed: its version, and the command for pip that adds an extra to it.

An error that names an extra must name a command that works. `pip install "tileattn[plot]"` asks the package index, and
would put another tileattn in the place of one that was installed from a clone, a file or a repository.
"""

from __future__ import annotations

import functools
import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "tileattn"
# Of a tree that is imported without an install, as with PYTHONPATH=src.
UNKNOWN = "0+unknown"


def version() -> str:
    """The installed version; "0+unknown" where tileattn is imported without an install."""
    found = _distribution()
    return UNKNOWN if found is None else found.version


def pip_install(extra: str) -> str:
    """The command that installs an extra of tileattn from where tileattn itself came from.

    Args:
        extra: its name in ``pyproject.toml``, such as "plot".
    """
    return _command(extra, _tree(), _origin())


def _command(extra: str, tree: Path | None, origin: dict[str, Any]) -> str:
    """The command.

    Args:
        extra: the extra's name.
        tree: the clone that this module is imported from; None if it lies elsewhere.
        origin: what pip noted in ``direct_url.json``; empty if a package index was asked.
    """
    if tree is not None:
        return f'pip install -e "{tree}[{extra}]"'
    url = origin.get("url", "")
    if (path := _local(url)) is not None:
        return f'pip install "{path}[{extra}]"'
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        revision = vcs.get("requested_revision") or vcs["commit_id"]
        return f'pip install "{NAME}[{extra}] @ {vcs["vcs"]}+{url}@{revision}"'
    return f'pip install "{NAME}[{extra}]"'


def _local(url: str) -> Path | None:
    """The folder or file of a file:// URL; None if it is another URL, or gone."""
    parts = urlsplit(url)
    path = Path(url2pathname(parts.path)) if parts.scheme == "file" else None
    return path if path is not None and path.exists() else None


def _tree() -> Path | None:
    """The clone whose `src` this module is in, as with an editable install or PYTHONPATH; None if there is none."""
    source = Path(__file__).resolve().parent.parent
    project = source.parent / "pyproject.toml"
    # Another project may keep a copy of tileattn in its own `src`.
    is_clone = source.name == "src" and project.is_file() and f'\nname = "{NAME}"\n' in project.read_text("utf-8")
    return source.parent if is_clone else None


@functools.cache
def _origin() -> dict[str, Any]:
    """What pip noted about the URL or path that it installed from (PEP 610); empty for a package index."""
    found = _distribution()
    noted = found.read_text("direct_url.json") if found else None
    try:
        origin = json.loads(noted) if noted else {}
    except ValueError:  # this is for the text of another error, which must not be lost
        return {}
    return origin if isinstance(origin, dict) else {}


def _distribution() -> Distribution | None:
    try:
        return distribution(NAME)
    except PackageNotFoundError:
        return None
