"""The page of `tileattn demo`: its functions, and (slow) a user's steps in a real browser."""

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
from tileattn.viz.demo import measure, page, pictures
from tileattn.viz.demo.form import MASKS, NAMES, STARTS, Form
from tileattn.viz.demo.implementations import IMPLEMENTATIONS
from tileattn.viz.tiles import Tile

CPU = torch.device("cpu")
SMALL = Form(seqlen_q=50, seqlen_k=80, heads=4, kv_heads=2, head_dim=16)
EVERYTHING = dataclasses.replace(
    SMALL,
    masks=MASKS,
    join="any of them (|)",
    left=20,
    right=3,
    softcap=5,
    alibi=True,
    bias=True,
    sink=True,
    score_function="where(q - k > 8, score - 0.1 * abs(q - k), score)",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "EFFORT", dataclasses.replace(measure.EFFORT, warmup_ms=0, measure_ms=0.1, rounds=1))


def answer(form: Form) -> page.Run:
    return page.answer(CPU, *dataclasses.astuple(form))


def show(form: Form) -> page.Shown:
    return page.show(CPU, *dataclasses.astuple(form))


def test_an_answer_has_measurements_bars_tiles_and_the_call() -> None:
    got = answer(EVERYTHING)
    assert "50 queries, 80 keys, 4 heads over 2" in got.message
    assert "PyTorch SDPA is missing: PyTorch's attention takes no fp8 and no sink" in got.message
    assert got.table is not None
    assert [row[0] for row in got.table] == [IMPLEMENTATIONS[name].label for name in ("tileattn", "v1", "v2", "naive")]
    assert all(len(row) == len(page.HEADINGS) for row in got.table)
    # All compute the same, so that each error is a rounding.
    assert all(0 < float(row[3]) < 1e-4 for row in got.table)
    assert got.bars.count("MiB") + got.bars.count("KiB") == 4
    assert (
        "mask=Causal() | SlidingWindow(20, 3) | PrefixLM(64) | Documents(ids) | FunctionMask(my_mask), "
        "score_mod=[SoftCap(5), ALiBi(slopes), Bias(bias), my_score], sink=sink)"
    ) in got.code
    assert "<svg" in got.tiles
    without = answer(dataclasses.replace(SMALL, implementations=["v2", "sdpa"]))
    assert without.table is not None
    assert [row[0] for row in without.table] == [IMPLEMENTATIONS[name].label for name in ("v2", "sdpa")]
    assert "tolerance" in got.message
    assert "tolerance" not in without.message


@pytest.mark.parametrize("start", STARTS)
def test_every_start_runs_in_every_implementation(start: str) -> None:
    sizes = {"seqlen_q": 70, "seqlen_k": 70, "head_dim": 16, "dtype": "bf16"}
    got = answer(dataclasses.replace(Form(**sizes), **STARTS[start]))
    assert got.table is not None, got.message
    assert [row[0] for row in got.table] == [each.label for each in IMPLEMENTATIONS.values()]
    assert all(float(row[3]) < 0.02 for row in got.table)


def test_gradients_are_checked_and_timed() -> None:
    got = answer(dataclasses.replace(SMALL, gradients=True, masks=("causal", "my function"), join="any of them (|)"))
    assert got.table is not None, got.message
    assert "the gradients of q, k and v against float64, over all query rows" in got.message
    assert len(got.table) == len(IMPLEMENTATIONS)
    assert all(row[2].endswith(" ms") and float(row[3]) < 1e-4 for row in got.table)
    assert "o.backward(do)" in got.code


@pytest.mark.parametrize("form", [EVERYTHING, dataclasses.replace(SMALL, gradients=True, score_function="score / 2")])
def test_the_call_can_be_copied_and_run(form: Form, capsys: pytest.CaptureFixture[str]) -> None:
    """It computes what the page has measured, to the bit."""
    names: dict[str, Any] = {}
    exec(compile(show(form).code, "copied", "exec"), names)
    assert "torch.Size([1, 50, 4, 16])" in capsys.readouterr().out
    call = form.call(CPU)
    given = call.tensors(CPU)
    o = IMPLEMENTATIONS["tileattn"].prepare(call, given)[0]()
    assert torch.equal(names["o"], o)
    if form.gradients:
        assert torch.equal(names["q"].grad, torch.autograd.grad(o, given.q, given.do)[0])


def test_only_the_last_rows_of_a_large_call_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.SCORES_CHECKED, "cpu", 4 * 80 * 7)
    got = answer(EVERYTHING)
    assert got.table is not None, got.message
    assert "over the last 7 query rows" in got.message
    assert all(0 < float(row[3]) < 1e-4 for row in got.table)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": None}, "batch must be a whole number from 1 to 64, got nothing"),
        ({"seqlen_q": 0}, "length of q must be a whole number from 1 to 131072, got 0"),
        ({"head_dim": 64.5}, "head dim must be a whole number from 1 to 512, got 64.5"),
        ({"heads": float("nan")}, "heads of q must be a whole number from 1 to 256, got nan"),
        ({"heads": 6, "kv_heads": 4}, "heads of q must be a multiple of the heads of k and v, got 6 and 4"),
        ({"dtype": "fp8"}, "dtype must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"masks": ["documents"], "document": 0}, "document must be a whole number from 1 to 131072, got 0"),
        ({"masks": ["round"]}, "masks must be one of causal, sliding window, prefix, documents, my function, got 'rou"),
        ({"masks": ["my function"], "mask_function": "q"}, "mask function: 'q' must be a condition"),
        ({"score_function": "exec('x')"}, "score function: `exec` cannot be called"),
        ({"implementations": []}, "compare: choose one implementation at least"),
        ({"softcap": -1}, "soft cap must be 0 (none) or a number from 0.01 to 1000000, got -1"),
        ({"seqlen_q": 131072, "seqlen_k": 131072}, "too large for a CPU in a few seconds: 4.4e+12 floating-point"),
        (
            {"batch": 64, "heads": 256, "kv_heads": 256, "head_dim": 1, "seqlen_k": 100, "seqlen_q": 100},
            "too large for a CPU in a few seconds: 1.6e+08 scores",
        ),
        ({"seqlen_q": 2000, "seqlen_k": 2000, "gradients": True}, "1.6e+07 scores with gradients, at most 4.2e+06"),
    ],
)
def test_bad_input_is_a_message_and_nothing_else(wrong: dict[str, Any], says: str) -> None:
    message, *others = answer(dataclasses.replace(SMALL, **wrong))
    assert says in message.replace("\\", "")  # Markdown's escapes
    assert others == ["", page.NO_CALL, "", None]


def test_what_breaks_the_tolerance_rule_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(*arguments: Any) -> None:
        raise AssertionError("o is wrong")

    monkeypatch.setattr(measure, "assert_accurate", break_it)
    got = answer(SMALL)
    assert got.message == "**Not run.** AssertionError: o is wrong"
    assert (got.bars, got.table) == ("", None)


def test_the_picture_shows_the_tiles_of_the_joined_masks() -> None:
    form = dataclasses.replace(Form(), masks=("causal", "documents"), document=128)
    tiles = pictures.tiles_of(form.call(CPU))
    # Four documents of two tiles: each has two on the diagonal and one full tile below it.
    assert (tiles.count(Tile.PARTIAL), tiles.count(Tile.FULL)) == (8, 4)
    either = dataclasses.replace(form, join="any of them (|)")
    assert pictures.tiles_of(either.call(CPU)).share(Tile.SKIPPED) < tiles.share(Tile.SKIPPED)
    assert pictures.tile_picture(form.call(CPU)).count("<rect") == 64
    large = Form(seqlen_q=8, seqlen_k=131072, heads=1, kv_heads=1, head_dim=16, masks=("sliding window",))
    assert "tiles of 2048 x 2048" in pictures.tile_picture(large.call(CPU))


def test_the_page_opens_with_a_result_and_has_a_field_for_each_of_the_form() -> None:
    pytest.importorskip("gradio", reason="needs gradio: pip install 'tileattn[demo]'")
    blocks = page.page(CPU)
    (event,) = [each for each in blocks.fns.values() if each.api_name == "run"]
    assert [field.elem_id for field in event.inputs] == list(NAMES)
    usual = Form()
    assert [field.value for field in event.inputs] == [page.for_field(getattr(usual, name)) for name in NAMES]
    message, tiles, code, bars, table = [each.value for each in event.outputs]
    assert message.startswith("**Measured:**")
    assert "<svg" in tiles
    assert "tileattn.attention(q, k, v, causal=True)" in code
    assert "Memory of the forward pass" in bars
    assert len(table["data"]) == len(IMPLEMENTATIONS)
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
@pytest.mark.parametrize(
    "options", [{}, {"gradients": True, "score_function": "score - 0.1 * abs(q - k)"}, {"dtype": "fp8"}]
)
def test_on_a_gpu_the_kernels_answer(options: dict[str, Any]) -> None:
    form = Form(**{"seqlen_q": 200, "seqlen_k": 200, "dtype": "bf16", **options})
    got = page.answer(torch.device("cuda", 0), *dataclasses.astuple(form))
    assert got.table is not None, got.message
    assert got.table[0][0] == "tileattn.attention"
    assert "failed" not in got.message


@pytest.mark.slow
@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_a_users_steps_in_a_browser(tmp_path: Path) -> None:
    """Opens, changes fields, types a function, runs; DEMO_SCREENSHOTS names a folder to keep what it looked like."""
    pytest.importorskip("gradio", reason="needs gradio: pip install 'tileattn[demo]'")
    import os

    from selenium.common.exceptions import TimeoutException, WebDriverException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    folder = Path(os.environ.get("DEMO_SCREENSHOTS", tmp_path))
    address = page.serve(CPU, open_browser=False, wait=False)
    with browser.chromium() as driver:

        def text(name: str) -> str:
            return str(driver.find_element(By.ID, name).text)

        def until(name: str, says: str) -> None:
            try:
                WebDriverWait(driver, 60, ignored_exceptions=[WebDriverException]).until(lambda _: says in text(name))
            except TimeoutException:
                driver.save_screenshot(str(folder / "demo-failed.png"))
                pytest.fail(f"#{name} does not show {says!r} but {text(name)!r}")

        def write(name: str, value: str) -> None:
            field = driver.find_element(By.CSS_SELECTOR, f"#{name} input, #{name} textarea")
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(value, Keys.TAB)

        def click(name: str, label: str) -> None:
            driver.find_element(By.XPATH, f"//*[@id='{name}']//label[normalize-space()='{label}']").click()

        for theme in ("light", "dark"):
            driver.get(f"{address}?__theme={theme}")
            until("message", "Measured: Causal()")
            until("tiles", "512 queries x 512 keys")
            until("bars", "Memory of the forward pass")
            until("table", "PyTorch SDPA")
            assert driver.find_elements(By.CSS_SELECTOR, "#tiles svg rect")
            wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert driver.execute_script(wide) <= 0
            driver.save_screenshot(str(folder / f"demo-{theme}.png"))
            assert (folder / f"demo-{theme}.png").stat().st_size > 20_000

        # The picture and the call follow the fields without a run.
        write("seqlen_q", "300")
        until("tiles", "300 queries x 512 keys")
        until("message", "The fields have changed")
        click("start", "my own function")
        until("code", "FunctionMask(my_mask)")
        write("mask_function", "(q - k) % 5 == 0")
        until("code", "return (q - k) % 5 == 0")
        click("gradients", "gradients")
        until("code", "o.backward(do)")
        driver.find_element(By.ID, "run").find_element(By.XPATH, "descendant-or-self::button").click()
        until("message", "Measured: Causal() & FunctionMask(my_mask); batch 1, 300 queries, 512 keys")
        until("bars", "Memory of the forward and backward pass")
        driver.save_screenshot(str(folder / "demo-run.png"))

        # On a phone the picture and the bars are one below the other, and nothing is cut off.
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        )
        ends = (
            "return [...document.querySelectorAll('#tiles *, #bars *, label')]"
            ".map(each => each.getBoundingClientRect().right)"
        )
        WebDriverWait(driver, 20).until(lambda _: max(driver.execute_script(ends)) <= 390)
        driver.save_screenshot(str(folder / "demo-phone.png"))
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

        write("mask_function", "open('x')")
        until("message", "This cannot be run. mask function: `open` cannot be called")
        WebDriverWait(driver, 60).until(lambda _: not driver.find_elements(By.CSS_SELECTOR, "#tiles svg"))
        driver.save_screenshot(str(folder / "demo-refused.png"))
