"""What `tileattn demo` does, once the command line has been taken apart."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from tileattn.bench.choices import refuse


def demo(device: torch.device, port: int | None, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    for package in ("gradio", "matplotlib"):
        if find_spec(package) is None:
            raise refuse("demo", f"the page needs {package}: pip install 'tileattn[demo]'")
    if port is not None and not 1 <= port <= 65535:
        raise refuse("--port", f"{port} is no port; accepted: 1 to 65535")
    from tileattn.demo import page

    try:
        page.serve(device, port, browser)
    except OSError as error:
        raise refuse("--port", f"the page cannot be served there: {error}") from error
