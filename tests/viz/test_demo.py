"""The page of `tileattn demo`: its functions, and (slow) a click in a real browser."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.tools import browser
from tileattn.cli.app import app
from tileattn.viz.demo import measure, page
from tileattn.viz.demo.form import NAMES, Form

CPU = torch.device("cpu")
SMALL = Form(seqlen_q=100, seqlen_k=130, heads=4, kv_heads=2, head_dim=16)


def answer(form: Form) -> tuple[str, Any, list[list[str]] | None, str]:
    return page.answer(CPU, *dataclasses.astuple(form))


def test_an_answer_has_measurements_tiles_and_the_call() -> None:
    form = dataclasses.replace(
        SMALL, mask="sliding window", size=50, right=3, softcap=5, alibi=True, bias=True, sink=True
    )
    message, figure, table, code = answer(form)
    assert "D16 window50-3+softcap5+alibi+bias+sink (1,100" in message
    assert "tileattn's keeps the tolerance rule" in message
    assert table is not None
    assert table[0][0] == "tileattn (torch)"
    assert all(len(row) == len(measure.HEADINGS) for row in table)
    assert 0 < float(table[0][3]) < 1e-4
    assert figure.axes
    assert code == (
        "o = tileattn.attention(q, k, v, mask=SlidingWindow(50, 3), score_mod=[SoftCap(5), ALiBi(slopes), Bias(bias)], "
        "sink=sink)"
    )


@pytest.mark.parametrize("mask", ["none", "causal", "prefix", "documents"])
def test_every_mask_runs(mask: str) -> None:
    message, _, table, code = answer(dataclasses.replace(SMALL, mask=mask, dtype="bf16"))
    assert table, message
    assert ("mask=" in code) == (mask in ("prefix", "documents"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": None}, "batch must be a whole number from 1 to 64, got nothing"),
        ({"seqlen_q": 0}, "length of q must be a whole number from 1 to 131072, got 0"),
        ({"head_dim": 64.5}, "head dim must be a whole number from 1 to 512, got 64.5"),
        ({"heads": float("nan")}, "heads of q must be a whole number from 1 to 256, got nan"),
        ({"heads": 6, "kv_heads": 4}, "heads of q must be a multiple of the heads of k and v, got 6 and 4"),
        ({"dtype": "fp8"}, "dtype must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"mask": "documents", "size": 0}, "size must be a whole number from 1 to 131072, got 0"),
        ({"mask": "round"}, "mask must be one of none, causal, sliding window, prefix, documents, got 'round'"),
        ({"softcap": -1}, "soft cap must be 0 (none) or a number from 0.01 to 1000000, got -1"),
        ({"seqlen_q": 131072, "seqlen_k": 131072}, "too large for a CPU in a few seconds: 4.4e+12 floating-point"),
        (
            {"batch": 64, "heads": 256, "kv_heads": 256, "head_dim": 1},
            "too large for a CPU in a few seconds: 2.1e+08 scores",
        ),
    ],
)
def test_bad_input_is_a_message_and_nothing_else(wrong: dict[str, Any], says: str) -> None:
    message, *others = answer(dataclasses.replace(SMALL, **wrong))
    assert says in message
    assert others == [None, None, ""]


def test_what_breaks_the_tolerance_rule_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from tileattn.bench.oracle.output import Oracle

    def break_it(self: Oracle, o: torch.Tensor) -> None:
        raise AssertionError("o is wrong")

    monkeypatch.setattr(Oracle, "check", break_it)
    message, *others = answer(SMALL)
    assert message == "**Not run.** AssertionError: o is wrong"
    assert others == [None, None, ""]


def test_large_tile_maps_have_larger_tiles() -> None:
    form = Form(seqlen_q=8, seqlen_k=131072, heads=1, kv_heads=1, head_dim=16, mask="sliding window", size=1000)
    assert "tiles of 512 x 512" in measure.draw(form.case(CPU)).get_suptitle()


def test_the_page_has_a_field_for_each_of_the_form() -> None:
    pytest.importorskip("gradio", reason="needs gradio: pip install 'tileattn[demo]'")
    blocks = page.page(CPU)
    (event,) = [each for each in blocks.fns.values() if each.api_name == "run"]
    assert len(event.inputs) == len(NAMES)
    usual = Form()
    assert [field.value for field in event.inputs] == [getattr(usual, name) for name in NAMES]
    assert event.concurrency_limit == 1


def test_the_command_refuses_a_port_that_is_none() -> None:
    outcome = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", "--port", "70000", "--no-browser"])
    assert outcome.exit_code == 2
    assert "70000 is no port" in outcome.output


def test_the_command_refuses_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", "--port", port, "--no-browser"])
    assert outcome.exit_code == 2
    assert f"{port} is in use; accepted: a free port, or none" in outcome.output


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_answer() -> None:
    form = Form(seqlen_q=200, seqlen_k=200, head_dim=64, dtype="bf16")
    message, figure, table, _ = page.answer(torch.device("cuda", 0), *dataclasses.astuple(form))
    assert table is not None, message
    assert table[0][0] == "tileattn (tilelang)"
    assert figure is not None


@pytest.mark.slow
@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_a_click_in_a_browser(tmp_path: Path) -> None:
    """A run, then a field that cannot be; DEMO_SCREENSHOTS names a folder to keep what it looked like."""
    pytest.importorskip("gradio", reason="needs gradio: pip install 'tileattn[demo]'")
    import os

    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    folder = Path(os.environ.get("DEMO_SCREENSHOTS", tmp_path))
    address = page.serve(CPU, open_browser=False, wait=False)
    with browser.chromium() as driver:

        def text(name: str) -> str:
            return str(driver.find_element(By.ID, name).text)

        def write(name: str, value: str) -> None:
            field = driver.find_element(By.CSS_SELECTOR, f"#{name} input")
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(value, Keys.TAB)

        def press_run_and_wait_for(says: str) -> None:
            driver.find_element(By.ID, "run").click()
            WebDriverWait(driver, 60).until(lambda _: says in text("message"))

        driver.get(address)
        WebDriverWait(driver, 60).until(lambda _: page.READY in text("message"))
        write("seqlen_q", "300")
        write("seqlen_k", "500")
        press_run_and_wait_for("D64 causal (1,300")
        WebDriverWait(driver, 60).until(lambda _: driver.find_elements(By.CSS_SELECTOR, "#tiles img"))
        picture = driver.find_element(By.CSS_SELECTOR, "#tiles img")
        WebDriverWait(driver, 60).until(lambda _: int(picture.get_property("naturalWidth")) > 500)
        assert "tileattn (torch)" in text("table")
        assert "tileattn.attention(q, k, v, causal=True)" in text("code")
        driver.save_screenshot(str(folder / "demo.png"))
        assert (folder / "demo.png").stat().st_size > 20_000

        write("heads", "7")
        press_run_and_wait_for("heads of q must be a multiple of the heads of k and v, got 7 and 8")
        WebDriverWait(driver, 60).until(lambda _: not driver.find_elements(By.CSS_SELECTOR, "#tiles img"))
        driver.save_screenshot(str(folder / "demo-refused.png"))
