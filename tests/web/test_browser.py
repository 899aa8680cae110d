"""The browser of the tests sees what a person sees, and reports errors that a person would not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.web.browser import Broken, Browser

pytestmark = pytest.mark.machine


def html(body: str) -> str:
    return f"data:text/html,{quote(f'<!doctype html><html lang=en><meta charset=utf-8><body>{body}')}"


def test_it_types_clicks_and_reads(browser: Browser, tmp_path: Path) -> None:
    parts = "<input id=a><button onclick=\"out.textContent = a.value + '!'\">go</button><p id=out></p>"
    with browser.page(html(f"{parts}<p hidden>not this</p>")) as page:
        page.click("#a")
        page.type("grüße")
        page.click("button")
        assert page.text("#out") == "grüße!"
        assert "not this" not in page.text("body")
        page.js("document.querySelector('input').focus()")
        page.press("Tab")
        page.press("Space")
        assert page.js("document.activeElement.tagName") == "BUTTON"
        assert page.screenshot(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_it_waits_for_what_comes_and_not_for_ever(browser: Browser) -> None:
    with browser.page(html("<script>setTimeout(() => { window.done = 1; }, 50)</script>")) as page:
        page.until("window.done")
        with pytest.raises(Broken, match=r"not true that window\.never"):
            page.until("window.never", timeout_s=0.1)
        page.js("void setTimeout(() => { document.body.innerHTML = '<p id=late>here</p>'; }, 50)")
        page.until("document.querySelector('#late').textContent === 'here'")  # there is no such element at first
        with pytest.raises(Broken, match="nothing_of_that_name"):
            page.js("nothing_of_that_name")


def test_what_is_covered_cannot_be_clicked(browser: Browser) -> None:
    over = "<div style='position:fixed;inset:0;background:#fff'></div>"
    with browser.page(html(f"<button>go</button>{over}")) as page, pytest.raises(Broken, match="cannot be clicked"):
        page.click("button", timeout_s=0.5)


def test_a_window_has_its_size_and_its_colours(browser: Browser) -> None:
    with browser.page(html("<div style='width:900px'>x</div>"), width=375, height=667, is_dark=True) as page:
        assert page.js("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [375, True]
        assert page.overflow_px() > 500


@pytest.mark.parametrize("wrong", ["console.error('bad', 7)", "throw new Error('bad 7')"])
def test_an_error_in_a_page_fails_its_test(browser: Browser, wrong: str) -> None:
    with pytest.raises(AssertionError, match="console"), browser.page(html(f"<script>{wrong}</script>")) as page:
        page.until("document.readyState === 'complete'")
    assert len(page.errors) == 1
    assert "bad 7" in page.errors[0]


def test_a_request_to_elsewhere_fails_its_test_and_goes_nowhere(browser: Browser) -> None:
    with (
        pytest.raises(AssertionError, match="outside loopback"),
        browser.page(html("<img src='http://elsewhere.example/a.png' onerror='window.failed = 1'>")) as page,
    ):
        page.until("window.failed")
    assert page.outside == ["http://elsewhere.example/a.png"]
    assert "ERR_NAME_NOT_RESOLVED" in page.errors[0]


def test_accessibility_problems_are_listed(browser: Browser) -> None:
    with browser.page(html("<title>a</title><main><h1>a</h1><button></button></main>")) as page:
        (problem,) = page.axe()
        assert problem.startswith("critical: button-name:")
        page.js("document.querySelector('button').textContent = 'go'")
        assert page.axe() == []


def test_other_tests_may_run_an_event_loop_while_no_page_is_open(browser: Browser) -> None:
    with browser.page(html("a")):
        pass
    assert asyncio.run(asyncio.sleep(0, "ran")) == "ran"


def test_a_touch_screen_has_a_coarse_pointer(browser: Browser) -> None:
    with browser.page(html("a"), width=390, height=844, is_phone=True) as page:
        assert page.js("[matchMedia('(pointer: coarse)').matches, devicePixelRatio]") == [True, 2]


def test_two_pages_share_nothing(browser: Browser) -> None:
    with browser.page(html("one")) as one, browser.page(html("two")) as two:
        assert (one.text("body"), two.text("body")) == ("one", "two")
