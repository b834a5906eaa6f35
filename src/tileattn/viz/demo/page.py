"""The page, in gradio. `form` has its fields and their limits; `measure` computes what it shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tileattn.bench import environment
from tileattn.viz.demo import form, measure

if TYPE_CHECKING:
    import gradio

INTRODUCTION = """# tileattn

Choose a mask, a score modification and a shape, and press **Run**: the tiles that the kernel visits, and time, memory
and the error against float64 on this machine, beside PyTorch's own attention.
"""
READY = "Nothing has been run yet."


def answer(device: torch.device, *values: Any) -> tuple[str, Any, list[list[str]] | None, str]:
    """The contents of the page for its fields' values: a message, the tile map, the table's rows, the call in Python.

    If the case cannot be run, the message gives the reason and the rest is empty.
    """
    try:
        case = form.read(values).case(device)
        result = measure.run(case, device)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"**Not run.** {error}", None, None, ""
    return "\n\n".join([f"**{case.name}**", *result.notes]), result.figure, result.table, result.code


def page(device: torch.device) -> gradio.Blocks:
    """The page for a device.

    Raises:
        ModuleNotFoundError: gradio is not installed.
    """
    # Disables gradio's telemetry; gradio reads the variable when it is imported.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio as gr
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the page needs gradio: pip install 'tileattn[demo]'") from error

    offered = form.OFFERED[device.type]
    with gr.Blocks(title="tileattn", analytics_enabled=False) as blocks:
        gr.Markdown(INTRODUCTION + f"\nThis machine: {environment.device_name(device)}.")
        with gr.Row():
            with gr.Column(scale=2, min_width=340):
                fields = _fields(gr, offered)
                run = gr.Button("Run", variant="primary", elem_id="run")
            with gr.Column(scale=3, min_width=420):
                message = gr.Markdown(READY, elem_id="message")
                table = gr.Dataframe(
                    headers=list(measure.HEADINGS), elem_id="table", interactive=False, label="Measured"
                )
                code = gr.Code(language="python", label="The call", elem_id="code", interactive=False)
                tiles = gr.Plot(show_label=False, format="png", elem_id="tiles")
        # One run at a time: concurrent runs would slow each other down and falsify the measurements.
        run.click(_bound(device), fields, [message, tiles, table, code], concurrency_limit=1, api_name="run")
    return blocks


def _bound(device: torch.device) -> Callable[..., Any]:
    def run(*values: Any) -> tuple[str, Any, list[list[str]] | None, str]:
        return answer(device, *values)

    return run


def _fields(gr: Any, dtypes: tuple[str, ...]) -> list[Any]:
    """The page's fields, in the order of `form.NAMES`."""
    usual = form.Form()

    def number(label: str, value: Any, info: str | None = None, name: str = "") -> Any:
        return gr.Number(value=value, label=label, info=info, elem_id=name, min_width=90)

    with gr.Row():
        batch = number("batch", usual.batch, name="batch")
        seqlen_q = number("length of q", usual.seqlen_q, name="seqlen_q")
        seqlen_k = number("length of k, v", usual.seqlen_k, name="seqlen_k")
    with gr.Row():
        heads = number("heads of q", usual.heads, name="heads")
        kv_heads = number("heads of k, v", usual.kv_heads, name="kv_heads")
        head_dim = number("head dim", usual.head_dim, name="head_dim")
    dtype = gr.Dropdown(list(dtypes), value=dtypes[0], label="dtype", elem_id="dtype")
    mask = gr.Radio(list(form.MASKS), value=usual.mask, label="mask", elem_id="mask")
    with gr.Row():
        size = number("size", usual.size, "of a window to the left, a prefix, a document", "size")
        right = number("right", usual.right, "of a window, to the right", "right")
    softcap = number("soft cap", usual.softcap, "cap * tanh(score / cap); 0: none", "softcap")
    with gr.Row():
        alibi = gr.Checkbox(usual.alibi, label="ALiBi", min_width=90)
        bias = gr.Checkbox(usual.bias, label="bias", min_width=90)
        sink = gr.Checkbox(usual.sink, label="sink", min_width=90)
    return [batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, dtype, mask, size, right, softcap, alibi, bias, sink]


def serve(device: torch.device, port: int | None = None, open_browser: bool = True, wait: bool = True) -> str:
    """Serves the page at an address that only this machine can reach.

    Args:
        device: where the cases run.
        port: of the address; None: the first free port from 7860 on.
        open_browser: whether to open the page in the user's browser.
        wait: whether to return only after Ctrl-C.

    Returns:
        The address.
    """
    blocks = page(device)
    import gradio as gr

    # Fonts of the system: the default theme would download its fonts.
    theme = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    _, address, _ = blocks.queue(default_concurrency_limit=1, max_size=8).launch(
        server_name="127.0.0.1",
        server_port=port,
        inbrowser=open_browser,
        theme=theme,
        quiet=True,
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        show_error=True,
        prevent_thread_lock=True,
    )
    if wait:
        print(f"the page is at {address} (Ctrl-C ends it)", flush=True)
        blocks.block_thread()
    return address
