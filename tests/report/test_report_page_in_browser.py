"""The HTML report in Chromium: accessible in both themes, within a phone's window, and printable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from tests.report.kept_run import sample_report
from tests.web.browser import need_chromium

from homing.report import render_html


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=need_chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    file = tmp_path / "report.html"
    file.write_text(render_html(sample_report(tmp_path)))
    # The page's policy forbids scripts, also that of the accessibility checker.
    opened = browser.new_page(bypass_csp=True)
    opened.goto(file.as_uri())
    yield opened
    opened.close()


def test_the_report_is_accessible_in_both_themes_and_fits_a_phone(page: Page) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    page.set_viewport_size({"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375, "only tables scroll sideways"


def test_on_paper_the_report_is_light_and_the_folded_tables_are_open(page: Page) -> None:
    page.emulate_media(color_scheme="dark", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(31, 29, 26)"
    assert page.evaluate("document.querySelector('details table').getBoundingClientRect().height") > 0
