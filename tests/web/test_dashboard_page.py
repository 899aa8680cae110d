"""The dashboard in a real browser: what a person sees, at a desk and on a phone, and that it follows by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.web.browser import Browser
from tests.web.dashboard_rig import (
    HERE,
    RENTED,
    TOKEN,
    Messages,
    add,
    at_work,
    fail,
    make_home,
    rent,
    served,
    step,
    train_here,
    until,
)

from homing.api.pages import dashboard_overview as dashboard_board
from homing.api.pages.dashboard_overview import Board
from homing.web.dashboard import dashboard_app as app_module
from homing.wire import file_names

pytestmark = [pytest.mark.machine]


@pytest.fixture
def board(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.setattr(dashboard_board, "TICK_S", 0.1)
    return Board(homing_home)


@pytest.fixture
def client(board: Board) -> Iterator[httpx.Client]:
    with served(board, board.end) as client:
        yield client


@pytest.mark.acceptance("X15")
@pytest.mark.slow
def test_a_person_sees_all_runs_then_one_and_its_curves_grow(
    browser: Browser, board: Board, client: httpx.Client, homing_home: Path
) -> None:
    home = make_home(homing_home)
    fail(home)
    rent(home)
    folder = train_here(homing_home)
    with ExitStack() as stack:
        stack.enter_context(at_work(folder))
        board.begin()
        page = stack.enter_context(browser.page(f"{client.base_url}/#token={TOKEN}"))
        page.until("document.querySelectorAll('a.run').length === 3")
        page.until(
            "document.querySelector('#money .big').innerText.includes('1 instance may still be billing, $2.50/h')"
        )
        assert "token" not in page.js("location.href"), "it does not stay in the address"
        assert "homing destroy --all" in page.text("#money")
        page.until("document.title.includes('$2.50/h')")
        page.click(f"a.run[href='#run={HERE}']")
        page.until("document.querySelectorAll('#charts canvas').length === 4")
        page.until("document.querySelector('#charts .now').innerText.includes('held-out 1.250')")
        page.until("document.querySelector('#next').innerText.includes('homing stop')")
        assert "once <b>upon</b> a time" in page.text("#samples"), "as text, whoever wrote it"
        assert "hf_" not in page.text("#log")
        assert "enforces no limits and destroys no instances" in page.text("footer")
        add(folder, file_names.METRICS, step(7, 0.125))
        page.until("document.querySelector('#charts .now').innerText.startsWith('0.125')")
        page.js(f"location.hash = 'run={RENTED}'")
        page.until("document.querySelector('#next').innerText.includes('homing destroy')")
        page.until("document.querySelectorAll('#charts canvas').length === 5")
        for is_dark in (False, True):
            page.look(360, 740, is_phone=True, is_dark=is_dark)
            page.until("document.querySelector('#charts canvas').getBoundingClientRect().width < 360")
            assert page.overflow_px() <= 0
        page.click("#home")
        page.until("document.querySelectorAll('a.run').length === 3")
        assert page.overflow_px() <= 0


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
        assert [error for error in page.errors if "401" not in error] == []
        page.errors.clear()
        page.js("document.querySelector('#token').value = ''")
        page.click("#token")
        page.type(TOKEN)
        page.press("Enter")
        page.until("document.querySelector('#all').innerText.includes('homing quickstart')")


def test_a_later_token_is_used_and_an_invalid_header_value_is_recoverable(
    browser: Browser, board: Board, client: httpx.Client
) -> None:
    board._tick()
    with browser.page(f"{client.base_url}/#token=schl%C3%BCssel") as page:
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
    point = ["pretrain", 1, 1000.0, 3.0, None, 6400.0, None, None, None, None]
    source.one.add("points", [point])
    with served(source, source.end) as client, browser.page(f"{client.base_url}/#token={TOKEN}") as page:
        page.js(f"location.hash = 'run={HERE}'")
        page.until("document.querySelectorAll('#charts canvas').length === 2")
        source.one.renew("points", [])
        page.until("document.querySelector('#charts').innerText.includes('No metrics yet')")
        source.one.renew("points", [point])
        page.until("document.querySelectorAll('#charts canvas').length === 2")


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
