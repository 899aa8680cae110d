"""The chat page, as a person at a desk or with a phone uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.web.browser import Browser, Page
from tests.web.rig import TOKEN

IDLE = "!document.body.classList.contains('is-running')"


@contextmanager
def opened(browser: Browser, client: httpx.Client, **look: Any) -> Iterator[Page]:
    """Open the address that `homing serve` prints."""
    with browser.page(f"{client.base_url}#token={TOKEN}", **look) as page:
        page.until("document.title !== 'homing' && !document.querySelector('#app').hidden")
        yield page


def ask(page: Page, words: str, *, is_answered: bool = True) -> None:
    """Send a message with the keyboard."""
    page.click("#text")
    page.type(words)
    page.press("Enter")
    page.until("document.querySelector('#text').value === ''")
    if is_answered:
        page.until(IDLE)


def shown(page: Page, selector: str) -> list[str]:
    """Return the visible text of each element."""
    return list(page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)"))


def press_button(page: Page, name: str, number: int = 0) -> None:
    """Click a button by its name, as a screen reader speaks it."""
    page.playwright.get_by_role("button", name=name, exact=True).nth(number).click()


def downloaded(page: Page, name: str, folder: Path) -> Path:
    """Click a button that saves a file, and return the file."""
    with page.playwright.expect_download() as waiting:
        press_button(page, name)
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path
