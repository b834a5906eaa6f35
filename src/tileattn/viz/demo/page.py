"""The page, in gradio. `form` has its fields and their limits; `measure` and `pictures` make what it shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tileattn.bench import environment
from tileattn.installation import pip_install
from tileattn.measure.units import human_bytes
from tileattn.viz.demo import form, measure, pictures
from tileattn.viz.demo.implementations import IMPLEMENTATIONS

if TYPE_CHECKING:
    import gradio

INTRODUCTION = """# tileattn

Choose what attention computes. The tiles and the call follow each change at once; **Run** measures time, memory and the
error on this machine. It compares `tileattn.attention` with the definition of attention, with the loops of
FlashAttention (V1) and FlashAttention-2 (V2) written in PyTorch, and with PyTorch's own kernel (SDPA).
"""
STALE = "**The fields have changed since the last run.** Press **Run** to measure this call."
NO_CALL = "# The fields describe no call: the message above says why."
HEADINGS = ("implementation", "forward", "and backward", "error", "memory")
Table = list[list[str]] | None


class Shown(NamedTuple):
    """What follows each change of a field: a message, the tile picture, the call in Python."""

    message: str
    tiles: str
    code: str


class Run(NamedTuple):
    """What a run shows: that, the bars, and the table's rows."""

    message: str
    tiles: str
    code: str
    bars: str
    table: Table


def show(device: torch.device, *values: Any) -> Shown:
    """What the page shows when a field has changed. If the call cannot be run, the message says why."""
    try:
        call = form.read(values).call(device)
        return Shown(STALE, pictures.tile_picture(call), call.code(device))
    except (ValueError, TypeError) as error:
        return Shown(f"**This cannot be run.** {_plain(str(error))}", "", NO_CALL)


def answer(device: torch.device, *values: Any) -> Run:
    """What the page shows after a run. If the call cannot be run, the message gives the reason."""
    shown = show(device, *values)
    if not shown.tiles:
        return Run(*shown, "", None)
    try:
        call = form.read(values).call(device)
        result = measure.run(call, device)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return Run(f"**Not run.** {_plain(str(error))}", shown.tiles, shown.code, "", None)
    message = "\n\n".join([f"**Measured:** {_plain(call.title)}", *map(_plain, result.notes)])
    return Run(message, shown.tiles, shown.code, pictures.bars(result.rows, call), _table(result.rows))


def _plain(text: str) -> str:
    """Text in which Markdown finds no markup: what a user typed is a part of it."""
    return "".join(f"\\{letter}" if letter in "\\`*_|<>#~" else letter for letter in text)


def _table(rows: list[measure.Measured]) -> list[list[str]]:
    return [
        [
            row.label,
            f"{row.ms:.3g} ms",
            "-" if row.backward_ms is None else f"{row.backward_ms:.3g} ms",
            f"{row.error:.1e}",
            human_bytes(row.peak_bytes),
        ]
        for row in rows
    ]


def page(device: torch.device) -> gradio.Blocks:
    """The page for a device. It runs the first call, so that the page opens with a result.

    Raises:
        ModuleNotFoundError: gradio is not installed.
    """
    # Disables gradio's telemetry; gradio reads the variable when it is imported.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio as gr
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the page needs gradio: {pip_install('demo')}") from error

    usual = form.Form(dtype=form.OFFERED[device.type][0])
    first = answer(device, *(getattr(usual, name) for name in form.NAMES))
    with gr.Blocks(title="tileattn", analytics_enabled=False) as blocks:
        gr.Markdown(INTRODUCTION + f"\nThis machine: {environment.device_name(device)}.")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                start = gr.Radio(list(form.STARTS), label="start from", value="multi-head", elem_id="start")
                fields = _fields(gr, usual, form.OFFERED[device.type])
            with gr.Column(scale=3, min_width=320):
                run = gr.Button("Run", variant="primary", elem_id="run")
                message = gr.Markdown(first.message, elem_id="message")
                with gr.Row():
                    # Columns, so that a narrow window has one below the other.
                    with gr.Column(min_width=260):
                        tiles = gr.HTML(first.tiles, elem_id="tiles", min_height=60)
                    with gr.Column(min_width=260):
                        bars = gr.HTML(first.bars, elem_id="bars", min_height=60)
                code = gr.Code(
                    first.code, language="python", label="The call, to copy and run", elem_id="code", interactive=False
                )
                table = gr.Dataframe(
                    first.table, headers=list(HEADINGS), elem_id="table", interactive=False, label="Measured", wrap=True
                )
        inputs = [fields[name] for name in form.NAMES]
        # One run at a time: concurrent runs would slow each other down and falsify the measurements.
        run.click(
            _bound(answer, device), inputs, [message, tiles, code, bars, table], concurrency_limit=1, api_name="run"
        )
        # Only a user's own change counts: `input` is not raised when a start sets several fields at once.
        outputs = [message, tiles, code]
        follow = {"show_progress": "hidden", "trigger_mode": "always_last", "api_name": "show"}
        gr.on([field.input for field in inputs], _bound(show, device), inputs, outputs, **follow)
        chosen = sorted({name for sets in form.STARTS.values() for name in sets})
        start.input(
            _start(chosen), [start, *(fields[name] for name in chosen)], [fields[name] for name in chosen]
        ).then(_bound(show, device), inputs, outputs, show_progress="hidden", api_name=False)
    return blocks


def _start(names: list[str]) -> Callable[..., list[Any]]:
    def set_fields(start: str, *values: Any) -> list[Any]:
        sets = form.STARTS[start]
        return [for_field(sets.get(name, value)) for name, value in zip(names, values, strict=True)]

    return set_fields


def for_field(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _bound(function: Callable[..., tuple[Any, ...]], device: torch.device) -> Callable[..., tuple[Any, ...]]:
    def bound(*values: Any) -> tuple[Any, ...]:
        return tuple(function(device, *values))

    return bound


def _fields(gr: Any, usual: form.Form, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """The page's fields, by their names in `form.Form`."""
    made: dict[str, Any] = {}

    def add(name: str, kind: Any, label: str, **options: Any) -> None:
        value = for_field(getattr(usual, name))
        made[name] = kind(value=value, label=label, elem_id=name, min_width=90, **options)

    with gr.Row():
        add("batch", gr.Number, "batch")
        add("seqlen_q", gr.Number, "length of q")
        add("seqlen_k", gr.Number, "length of k, v")
    with gr.Row():
        add("heads", gr.Number, "heads of q")
        add("kv_heads", gr.Number, "heads of k, v")
        add("head_dim", gr.Number, "head dim")
    add("masks", gr.CheckboxGroup, "masks: which keys a query may see", choices=list(form.MASKS))
    add("join", gr.Radio, "a key must pass", choices=list(form.JOINS))
    with gr.Row():
        add("left", gr.Number, "window ←")
        add("right", gr.Number, "window →")
        add("prefix", gr.Number, "prefix")
        add("document", gr.Number, "document")
    add("mask_function", gr.Textbox, "my mask(b, h, q, k)", info="batch, head, position of the query and of the key")
    add(
        "score_function",
        gr.Textbox,
        "my score(score, b, h, q, k); empty: none",
        placeholder="score - 0.1 * abs(q - k)",
    )
    add("softcap", gr.Number, "soft cap", info="cap * tanh(score / cap); 0: none")
    with gr.Row():
        add("alibi", gr.Checkbox, "ALiBi")
        add("bias", gr.Checkbox, "bias")
    with gr.Row():
        add("sink", gr.Checkbox, "sink")
        add("gradients", gr.Checkbox, "gradients")
    add("dtype", gr.Dropdown, "dtype", choices=list(dtypes))
    choices = [(each.label, name) for name, each in IMPLEMENTATIONS.items()]
    add("implementations", gr.CheckboxGroup, "compare", choices=choices)
    return made


def serve(device: torch.device, port: int | None = None, open_browser: bool = True, wait: bool = True) -> str:
    """Serves the page at an address that only this machine can reach.

    Args:
        device: where the calls run.
        port: of the address; None: the first free port from 7860 on.
        open_browser: whether to open the page in the user's browser.
        wait: whether to return only after Ctrl-C.

    Returns:
        The address.
    """
    if wait:
        print("measuring the first call of the page ...", flush=True)
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
