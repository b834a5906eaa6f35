"""Formatting of numbers with units."""


def human_bytes(count: float) -> str:
    """Bytes with a binary unit: 512 B, 1.5 KiB, 64.0 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
