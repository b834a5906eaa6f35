"""Pages that are in the navigation once their file is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPTIONAL = ("ladder.md", "mi300x.md")


def on_config(config: Any, **_: Any) -> Any:
    """mkdocs' hook."""
    config.nav = present(config.nav, Path(config.docs_dir))
    return config


def present(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation without those optional pages that do not exist."""
    kept = []
    for entry in nav:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            kept.append({title: present(value, docs)})
        elif value not in OPTIONAL or (docs / value).is_file():
            kept.append(entry)
    return kept
