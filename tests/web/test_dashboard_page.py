"""The dashboard in a real browser, used as a person would: the table, a comparison and one run, live and on a phone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.web.browser import Browser, Page
from tests.web.dashboard_rig import (
    HERE,
    TOKEN,
    Messages,
    add,
    at_work,
    served,
    step,
    train_here,
    until,
)
from tests.web.dashboard_runs import DIVERGED, DONE, LIVE, RESUMED, RL, QuietBoard, fill_home

from homing.api.pages import dashboard_overview as dashboard_board
from homing.api.pages.dashboard_overview import Board
from homing.web.dashboard import dashboard_app as app_module
from homing.wire import file_names

pytestmark = [pytest.mark.machine]
NUM_RUNS = 9
UNKNOWN = "\N{EN DASH}"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one dashboard for all tests of this file that only look."""
    path = tmp_path_factory.mktemp("dashboard") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOMING_HOME", str(path))
        patch.setattr(dashboard_board, "TICK_S", 0.2)
        fill_home(path, time.time())
        board = QuietBoard(path)
        with served(board, board.end) as client:
            board.begin()
            yield str(client.base_url)


@pytest.fixture(scope="module")
def opened(browser: Browser, url: str) -> Iterator[Page]:
    with browser.page(f"{url}/#token={TOKEN}", width=1280, height=800) as page:
        yield page


@pytest.fixture
def page(opened: Page) -> Page:
    """The table of runs, with everything loaded and no filter, order or choice left from the test before."""
    opened.look(1280, 800)
    opened.js("localStorage.clear(); location.hash = ''")
    opened.reload()
    opened.until(f"document.querySelectorAll('tr[data-row]').length === {NUM_RUNS}")
    opened.until(
        f"!document.querySelector('#runs').innerText.includes('{UNKNOWN}\\t{UNKNOWN}\\t{UNKNOWN}\\t{UNKNOWN}')"
    )
    return opened


def go(page: Page, address: str) -> None:
    page.js(f"location.hash = {json.dumps(address)}")
    page.until("document.querySelector('.chart:not([hidden]) canvas')")


def names(page: Page) -> list[str]:
    found: list[str] = page.js("[...document.querySelectorAll('tr[data-row] .name a')].map((each) => each.textContent)")
    return found


def cells(page: Page, column: str) -> list[str]:
    found: list[str] = page.js(
        f"[...document.querySelectorAll('td[data-column={column}]')].map((each) => each.innerText)"
    )
    return found


def test_the_table_shows_every_run_with_its_figures_and_why_it_failed(page: Page) -> None:
    assert "2 instances may still be billing, $3.84/h" in page.text("#money")
    assert "homing destroy --all" in page.text("#money")
    assert page.js("document.title").startswith("$3.84/h")
    assert "token" not in page.js("location.href"), "it does not stay in the address"
    assert names(page)[:2] == ["goethe-wide", "goethe-deep"], "live runs come first"
    row = page.text(f"tr[data-row='{DONE}']")
    for part in (
        "goethe-base",
        "done",
        "75M stock",
        "sft 2/2",
        "300 of 300",
        "39.3M",
        "$1.64 of $5.00",
        "aws, g6.xlarge",
    ):
        assert part in row, row
    assert page.text(f"tr[data-row='{DIVERGED}'] + .note-row").startswith(
        "Training stopped at step 402, because the loss"
    )
    assert page.js("getComputedStyle(document.querySelector('td[data-column=loss]')).textAlign") == "right"
    assert page.js("document.querySelector('progress').getAttribute('aria-label')").startswith(
        "Spend compared with the"
    )


def test_a_header_sorts_and_the_filters_and_columns_are_remembered(page: Page) -> None:
    sort = page.playwright.get_by_role("button", name="Val. loss")
    sort.click()
    losses = [float(each) for each in cells(page, "val_loss") if each != UNKNOWN]
    assert losses == sorted(losses, reverse=True)
    assert cells(page, "val_loss")[-1] == UNKNOWN, "unknown values come last"
    assert page.js("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    sort.press("Enter")
    losses = [float(each) for each in cells(page, "val_loss") if each != UNKNOWN]
    assert losses == sorted(losses), "the header is a button, so a keyboard can press it"
    page.playwright.get_by_text("Columns", exact=True).click()
    page.playwright.get_by_label("Learning rate").check()
    page.playwright.get_by_label("Tokens/s").uncheck()
    page.press("Escape")
    page.reload()
    page.until("document.querySelectorAll('td[data-column=lr]').length === 9")
    assert page.js("document.querySelectorAll('td[data-column=tokens_per_s]').length") == 0
    assert page.js("document.querySelector('th[aria-sort]').innerText").startswith("Val. loss")
    page.playwright.get_by_label("Filter runs by text").fill("a100")
    page.until("document.querySelectorAll('tr[data-row]').length === 1")
    page.playwright.get_by_label("Filter runs by text").fill("")
    page.playwright.get_by_label("Filter by state").select_option("failed")
    page.until("document.querySelectorAll('tr[data-row]').length === 2")
    page.playwright.get_by_label("Filter by state").select_option("")
    page.playwright.get_by_label("Filter by preset or project").select_option("play")
    assert sorted(names(page)) == ["shakespeare", "tiny"]
    page.playwright.get_by_label("Filter runs by text").fill("no such run")
    page.until("document.querySelector('#runs').innerText.includes('No run matches')")


def test_chosen_runs_are_compared_and_the_address_brings_the_comparison_back(page: Page) -> None:
    assert page.playwright.get_by_role("button", name="Compare").is_disabled()
    page.js("runs_table.chosen = new Set([...Array(21).keys()].map(String)); runs_table.show_tools()")
    assert page.playwright.get_by_role("button", name="Compare 21 runs").is_disabled()
    assert page.js("$('do-compare').title") == "Select at most 20 runs"
    page.js("runs_table.clear()")
    for run in (RESUMED, DONE, DIVERGED):
        page.playwright.get_by_label(f"Select {run}").check()
    page.playwright.get_by_role("button", name="Compare 3 runs").click()
    page.until("document.querySelectorAll('.chart:not([hidden]) canvas').length >= 7")
    page.until("document.querySelectorAll('#finals tbody tr').length === 3")
    page.playwright.get_by_role("button", name="Dollars").click()
    page.playwright.get_by_role("button", name="Log").click()
    page.js(
        "(() => { const s = $('smoothing'); s.value = .8; s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    page.playwright.get_by_role("button", name="goethe-base").click()
    assert page.js("$('legend').children[1].getAttribute('aria-pressed')") == "false"
    address = page.js("location.hash")
    assert address == f"#compare={RESUMED},{DONE},{DIVERGED}&x=usd&log=1&smooth=0.8&off={DONE}"
    chart = page.js(
        "comparison.board.charts[0]._series().map((each) => [each.line.name, each.xs.length, !!each.smooth])"
    )
    assert [each[0] for each in chart] == ["goethe-swift", "goethe-hot"], "the run that is off is not drawn"
    assert all(each[1] > 100 and each[2] for each in chart)
    colors = page.js("[...comparison.runs.values()].map((each) => each.color)")
    # As a bookmark, in an other order: each run keeps its color.
    page.js("location.hash = ''")
    page.until("!document.querySelector('#all').hidden")
    go(page, f"compare={DIVERGED},{RESUMED}&x=usd&log=1&smooth=0.8")
    page.until("document.querySelectorAll('#finals tbody tr').length === 2")
    assert page.js("[comparison.view.x, comparison.view.is_log, comparison.view.smoothing]") == ["usd", True, 0.8]
    assert page.js("[...comparison.runs.values()].map((each) => each.color)") == [colors[2], colors[0]]


def test_the_pointer_and_the_keys_read_the_values_of_all_runs(page: Page) -> None:
    go(page, f"compare={RESUMED},{DONE}")
    page.until("comparison.board.charts[0].series?.length === 2")
    box = page.playwright.locator(".plot").first.bounding_box()
    assert box is not None
    page.playwright.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.until("!document.querySelector('.tip').hidden")
    tip = page.text(".tip")
    assert "goethe-swift" in tip
    assert "goethe-base" in tip
    page.playwright.mouse.move(5, 5)
    page.playwright.locator(".plot").first.focus()
    page.press("End")
    page.until("$('spoken').textContent.startsWith('step 1,500, goethe-swift: 1.')")
    label = page.js("document.querySelector('.plot').getAttribute('aria-label')")
    assert label.startswith("Training loss. Last: goethe-swift 1.")
    page.playwright.get_by_text("Data table: Training loss").click()
    page.until("document.querySelectorAll('.chart tbody tr').length === 2")
    rows = page.js("[...document.querySelectorAll('.chart tbody tr')].map((row) => row.innerText.split('\\t'))")
    assert [row[0] for row in rows] == ["goethe-swift", "goethe-base"]
    assert float(rows[0][4]) <= float(rows[0][3]) < float(rows[0][2]), "lowest, last, first"


def test_runs_with_the_same_name_are_all_compared_by_their_ids(page: Page) -> None:
    go(page, f"compare={RESUMED},{DONE}")
    page.until("[...comparison.runs.values()].every((each) => each.head)")
    named = f"{{...comparison.runs.get('{DONE}').head, name: 'goethe-swift'}}"
    page.js(f"comparison.take({{run: '{DONE}', section: 'head', value: {named}}}); 0")
    assert page.js("[...comparison.runs.values()].map((each) => each.name)") == [RESUMED, DONE]


def test_a_comparison_shows_which_settings_differ(page: Page) -> None:
    go(page, f"compare={RESUMED},{DONE},{DIVERGED}")
    page.until("document.querySelector('#differences tbody')")
    page.until("document.querySelectorAll('#differences thead th').length === 4")
    keys = "[...document.querySelectorAll('#differences tbody tr')].map((row) => row.innerText.split('\\t'))"
    page.until(f"{keys}.some((row) => row[3]?.trim() === '0.003')")
    page.until("[...comparison.runs.values()].every((each) => each.config && each.head)")
    found = {row[0].strip(): [each.strip() for each in row[1:]] for row in page.js(keys)}
    assert found["phases.0.optimizer.lr"] == ["0.0006", "0.0006", "0.003"]
    assert found["model.family"] == ["swift", "stock", "stock"]
    assert found["phases.1.kind"] == ["sft", "sft", UNKNOWN], "a phase that a run does not have is one difference"
    assert "seed" not in found
    assert "run_file_sha256" not in found, "a hash is no setting"
    assert "phases.1.num_steps" not in found
    page.playwright.get_by_label("Only what differs").uncheck()
    page.until(f"{keys}.length > 100")
    page.playwright.get_by_label("Filter settings").fill("optimizer.beta")
    assert [row[0].strip() for row in page.js(keys)] == [
        f"phases.{n}.optimizer.beta{b}" for n in (0, 1) for b in (1, 2)
    ]
    assert page.axe() == []


def test_one_run_has_charts_with_marks_and_then_its_commands(page: Page) -> None:
    page.click(f"tr[data-row='{RESUMED}'] a")
    page.until("document.querySelectorAll('.chart:not([hidden]) canvas').length === 8")
    titles = page.js("[...document.querySelectorAll('.chart:not([hidden]) h3')].map((each) => each.firstChild.data)")
    assert titles == [
        "Loss",
        "Bits per byte",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "MFU",
        "GPU memory",
        "Dollars",
    ]
    assert page.text(".chart .now").strip().startswith("training 1.")
    assert page.js("document.querySelectorAll('.chart .now')[0].querySelectorAll('.swatch').length") == 2, "a legend"
    assert page.js("[0, 3e-5, 0.0011, 0.02, 10].map(rate)") == ["0", "3.0e-5", "0.0011", "0.02", "10"]
    assert page.js("[0, 0.005, 0.01, 0.015, 0.5, 12.5].map(dollar_tick)") == [
        "$0.00",
        "$0.005",
        "$0.01",
        "$0.015",
        "$0.50",
        "$12.50",
    ]
    page.until("one_run.marks('step').length === 4")
    assert [each["name"] for each in page.js("one_run.marks('step')")] == ["pretrain", "sft", "preempted", "restart"]
    assert page.js("one_run.marks('step')[1].x") == 1202, "steps continue where the phase before ended"
    page.until("document.querySelector('#next').innerText.includes('homing fetch')")
    assert page.js(
        "$('next').getBoundingClientRect().top > document.querySelector('.charts').getBoundingClientRect().bottom"
    )
    page.playwright.locator("#phase").select_option("sft")
    page.until("one_run.board.charts[0].series[0].xs.length === 150")
    page.playwright.get_by_role("button", name="Time").click()
    page.until("one_run.board.charts[0].series[0].xs[0] > 5000")
    go(page, f"run={RL}")
    page.until("document.querySelector('#panel-charts').innerText.includes('Answer length')")
    assert page.js("one_run.curve.series('loss', 'step', 'rl')[0].length") == 0
    assert "Validation reward" in page.text("#figures")
    go(page, f"run={LIVE}")
    page.until("document.querySelector('#figures').innerText.includes('GPU in use')")
    page.until("document.querySelector('#next').innerText.includes('homing destroy')")


def test_one_run_has_samples_settings_events_logs_and_files(page: Page) -> None:
    go(page, f"run={RESUMED}")
    page.playwright.get_by_role("tab", name="Charts").focus()
    page.press("ArrowRight")
    page.until("document.querySelectorAll('.sample').length === 2")
    assert page.js("document.activeElement.id") == "tab-samples"
    assert page.js("document.querySelectorAll('#evaluations tbody tr').length") == 25
    page.playwright.locator("#by").select_option("prompt")
    page.until("document.querySelectorAll('.sample').length === 6")
    steps = page.js("[...document.querySelectorAll('.sample h3')].map((each) => each.innerText)")
    assert (steps[0], steps[-1]) == ("sft, step 300", "pretrain, step 250")
    assert "who had three sons" in page.text("#samples")
    page.playwright.locator("#picked").select_option("The capital of Germany is")
    assert "The capital of Germany is" in page.text("#samples")
    page.playwright.get_by_role("tab", name="Settings").click()
    page.playwright.get_by_label("Filter settings").fill("width")
    page.until("document.querySelectorAll('#settings tbody tr').length === 2")
    assert "derived from model.depth" in page.text("#settings")
    page.playwright.get_by_role("tab", name="Events and logs").click()
    page.playwright.get_by_label("Filter events").fill("took the machine")
    page.until("document.querySelectorAll('#events li').length === 1")
    page.playwright.get_by_label("Search the log").fill("step 300/300")
    page.until("$('log').textContent.split('\\n').length === 1")
    page.playwright.get_by_role("tab", name="Checkpoints").click()
    page.until("document.querySelector('#kept table')")
    assert "model.safetensors" in page.text("#kept")
    assert page.js("document.querySelector('#kept code').title.length") == 64
    assert page.js("document.querySelectorAll('#attempts tbody tr').length") == 2
    page.reload()
    page.until("document.querySelector('#kept table')")  # the tab is in the address


def test_a_failed_run_says_at_the_top_why_and_what_to_do(page: Page) -> None:
    go(page, f"run={DIVERGED}")
    page.until("document.querySelector('#failure').innerText.includes('Exit code 1')")
    failure = page.text("#failure")
    assert "This run failed in pretrain, step 402" in failure
    assert "error: Training stopped at step 402" in failure
    page.until("document.querySelectorAll('#failure .command').length === 2")
    assert "--resume" in page.text("#failure")
    assert page.js("$('failure').getBoundingClientRect().top < $('figures').getBoundingClientRect().top")


@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_no_page_has_a_serious_accessibility_problem_or_is_wider_than_a_phone(page: Page, is_dark: bool) -> None:
    found = []
    tabs = [f"run={RESUMED}&tab={tab}" for tab in ("samples", "settings", "events", "files")]
    addresses = ["", f"compare={RESUMED},{DONE}", f"run={DIVERGED}", *tabs]
    ready = [
        "tr[data-row]",
        "#differences tbody",
        "#failure pre",
        ".sample",
        "#settings tbody",
        "#events li",
        "#kept table",
    ]
    for address, selector in zip(addresses, ready, strict=True):
        page.look(1280, 800, is_dark=is_dark)
        page.js(f"location.hash = {address!r}")
        page.until(f"document.querySelector('{selector}') && $('link').textContent === 'live'")
        found += [(address, each) for each in page.axe()]
        page.look(390, 844, is_phone=True, is_dark=is_dark)
        assert page.overflow_px() <= 0, address
        assert page.js("document.querySelector('.topbar').offsetHeight") < 80, "the bar at the top is one line"
    page.js("location.hash = ''")
    page.until("document.querySelector('.runs .name .id')?.offsetHeight > 0")  # it tells runs of the same name apart
    assert found == []


def test_the_colors_can_be_chosen_and_the_charts_follow(page: Page) -> None:
    go(page, f"run={DONE}")
    page.until("one_run.board.charts[0].plot")
    before = page.js("one_run.board.charts[0].plot.series[1].stroke()")
    page.playwright.get_by_label("Colors").select_option("dark")
    page.until(f"one_run.board.charts[0].plot.series[1].stroke() !== {json.dumps(before)}")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.js(background) == "rgb(19, 21, 23)"
    page.reload()
    page.until("one_run.board.charts[0].plot")
    assert page.js(background) == "rgb(19, 21, 23)"
    page.playwright.get_by_label("Colors").select_option("")
    page.until(f"one_run.board.charts[0].plot.series[1].stroke() === {json.dumps(before)}")
    page.look(1280, 800, is_dark=True)  # the system changes its colors in the evening
    page.until(f"one_run.board.charts[0].plot.series[1].stroke() !== {json.dumps(before)}")


def test_every_control_of_the_table_is_reached_by_the_tab_key(page: Page) -> None:
    page.js("document.body.focus()")
    seen = set()
    for _ in range(60):
        page.press("Tab")
        seen.add(
            page.js(
                "((focused) => focused.id || focused.dataset.sort || focused.dataset.run || focused.className"
                " || focused.tagName)(document.activeElement)"
            )
        )
    assert {"skip", "home", "theme", "find", "btn", "name", "val_loss", DONE, "btn-small copy"} <= seen, seen
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") != "none"


# --- pages that change while they are shown ---


@pytest.fixture
def board(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.setattr(dashboard_board, "TICK_S", 0.1)
    return QuietBoard(homing_home)


@pytest.fixture
def client(board: Board) -> Iterator[httpx.Client]:
    with served(board, board.end) as client:
        yield client


@pytest.mark.slow
@pytest.mark.acceptance("X15")
def test_curves_grow_states_are_spoken_and_hostile_text_stays_text(
    browser: Browser, board: Board, client: httpx.Client, homing_home: Path
) -> None:
    folder = train_here(homing_home)
    run = folder / file_names.RUN
    run.write_text(
        run.read_text()
        .replace('"name": "first"', f'"name": "{HOSTILE}"')
        .replace('"prompts": []', f'"prompts": ["{HOSTILE}"]')
    )
    (folder / file_names.SAMPLES / "pretrain-00000006.txt").write_text(f"[{HOSTILE}] <script>alert(2)</script>\n\n")
    (folder / file_names.LOGS / "trainer.log").write_text(f"{HOSTILE}\nwith hf_abcdefghijklmnopqrstuvwx in its log\n")
    with ExitStack() as stack:
        working = stack.enter_context(ExitStack())
        working.enter_context(at_work(folder))
        board.begin()
        page = stack.enter_context(browser.page(f"{client.base_url}/#token={TOKEN}"))
        page.until(f"document.querySelector('tr[data-row] .name a').textContent === '{HOSTILE}'")
        page.click(f"a[href='#run={HERE}']")
        page.until("document.querySelectorAll('.chart:not([hidden]) canvas').length === 4")
        page.until("document.querySelector('.chart .now').innerText.includes('validation 1.250')")
        page.until("document.querySelector('#next').innerText.includes('homing stop')")
        add(folder, file_names.METRICS, step(7, 0.125))
        page.until("document.querySelector('.chart .now').innerText.startsWith('training 0.125')")
        for tab, selector in (("samples", "#samples"), ("settings", "#settings"), ("events", "#log")):
            page.click(f"#tab-{tab}")
            page.until(f"document.querySelector('{selector}').innerText.includes('{HOSTILE}')")
        assert "hf_" not in page.text("#log")
        assert page.js("document.querySelectorAll('img, main script').length") == 0
        page.js(f"location.hash = 'compare={HERE}'")
        page.until(f"document.querySelector('#legend').innerText.includes('{HOSTILE}')")
        page.click("#home")
        page.until("document.querySelector('#runs').innerText.includes('training')")
        working.close()
        page.until("$('spoken').textContent.includes('is now unfinished')")
        assert "enforces no limits and destroys no instances" in page.text("footer")
        assert page.js("document.querySelectorAll('img, main script').length") == 0


def test_without_a_token_it_asks_and_with_none_of_ours_it_says_so(
    browser: Browser, board: Board, client: httpx.Client
) -> None:
    board._tick()
    with browser.page(f"{client.base_url}/") as page:
        page.until("!document.querySelector('#login').hidden")
        page.click("#token")
        page.type("not-the-right-one-at-all")
        page.press("Enter")
        page.until("document.querySelector('#refusal').innerText.includes('missing or wrong')")
        assert page.axe() == []
        assert [error for error in page.errors if "401" not in error] == []
        page.errors.clear()
        page.js("document.querySelector('#token').value = 'schlüssel'")
        page.click("#token")
        page.press("Enter")
        page.until("document.querySelector('#refusal').innerText.includes('invalid characters')")
        page.js(f"location.hash = 'token={TOKEN}'")
        page.until("document.querySelector('#all').innerText.includes('homing quickstart')")
        assert "token" not in page.js("location.href")
        assert page.js("document.querySelector('#login').hidden")


def test_a_silent_connection_is_reported_and_reopened(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_QUIET_S", 1e9)  # as of a server at the other end of a tunnel that is gone
    source = Messages()
    with ExitStack() as stack:
        client = stack.enter_context(served(source, source.end))
        page = stack.enter_context(browser.page(f"{client.base_url}/#token={TOKEN}"))
        page.until("document.querySelector('#link').innerText === 'live'")
        page.js("window.seen = []; new MutationObserver(() => seen.push(document.querySelector('#link').innerText))"
                ".observe(document.querySelector('#link'), { childList: true }); silence_s = 0.2; open()")  # fmt: skip
        page.until("seen.join().includes('not connected') && seen.filter((each) => each === 'live').length > 1")
        until(lambda: source.num_open <= 1)  # the silent ones are given up, and not held open
        page.js("silence_s = 30")


def test_curves_come_back_after_a_phase_without_any(browser: Browser) -> None:
    source = Messages()
    source.one.put("point_columns", ["phase", "step", "t", "num_tokens", "loss"])
    point = ["pretrain", 1, 1000.0, 64, 3.0]
    source.one.add("points", [point])
    with served(source, source.end) as client, browser.page(f"{client.base_url}/#token={TOKEN}") as page:
        page.js(f"location.hash = 'run={HERE}'")
        page.until("document.querySelectorAll('.chart:not([hidden]) canvas').length === 1")
        source.one.renew("points", [])
        page.until("document.querySelector('#panel-charts').innerText.includes('No metrics yet')")
        source.one.renew("points", [point])
        page.until("document.querySelectorAll('.chart:not([hidden]) canvas').length === 1")


def test_a_stopped_server_is_reported_on_the_page(browser: Browser, board: Board) -> None:
    board._tick()
    with ExitStack() as stack:
        client = stack.enter_context(served(board, board.end))
        page = stack.enter_context(browser.page(f"{client.base_url}/#token={TOKEN}"))
        page.until("document.querySelector('#link').innerText === 'live'")
        board.end()
        page.until("document.querySelector('#link').innerText.includes('still running')")
        page.js("stream.abort()")
        page.errors.clear()
