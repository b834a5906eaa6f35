"""The code of `tileattn demo`, called with parsed options."""

from __future__ import annotations

import errno
import socket
from importlib.util import find_spec

import torch

from tileattn.cli.choices import refuse
from tileattn.installation import pip_install


def demo(device: torch.device, port: int | None, browser: bool) -> None:
    """Serves the page until Ctrl-C."""
    if port is not None:
        _check_port(port)
    if find_spec("gradio") is None:
        raise refuse("demo", f"the page needs gradio: {pip_install('demo')}")
    from tileattn.viz.demo import page

    try:
        page.serve(device, port, browser)
    except OSError as error:
        raise refuse("--port", f"the page cannot be served there: {error}") from error


def _check_port(port: int) -> None:
    """Checks the port before gradio does, whose message does not say why a port is unavailable."""
    if not 1 <= port <= 65535:
        raise refuse("--port", f"{port} is no port; accepted: 1 to 65535")
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            raise refuse(
                "--port", f"{port} {why}; accepted: a free port, or none for the first free one from 7860 on"
            ) from error
