"""Opens pages in a real Chromium without a window, types and clicks like a person, and reports what went wrong in them.

    with browser.page(url) as page:        a profile of its own: pages share no storage, and nothing is kept
        page.until("document.title === 'tiny'")
        page.click("#text"); page.type("Hello"); page.press("Enter")
        page.js("document.querySelector('.model').textContent")
        page.playwright.get_by_role("button", name="Copy").click()     everything else that Playwright can do
        assert page.axe() == []

At the end of the `with` block, the page fails the test if it requested anything outside loopback, or if its console has
an error. A test that provokes an error names it first: `page.expect_error("401")`.

Playwright drives the Chromium that is installed on this machine; nothing is downloaded. If Chromium is missing, the
tests that need it are skipped with a message, or fail if CI is set.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import playwright.sync_api
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT_S = 60.0
_CLICK_S = 15.0
_LOOK_MS = 20
_ARGV = [
    "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server",
    # Without this, Chromium would look up names of other hosts, and contact its own makers.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]  # fmt: skip


def need_chromium() -> str:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed, and CI is set: .ci/run installs it")
        pytest.skip("chromium is not installed, so no page is seen in a real browser")
    return found


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with `folder` as its home directory, and end it after the `with` block."""
    program = need_chromium()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    with sync_playwright() as started:
        loop = asyncio.get_running_loop()
        chromium = started.chromium.launch(
            executable_path=program, args=_ARGV, chromium_sandbox=os.geteuid() != 0,
            env={**os.environ, **environment},
        )  # fmt: skip
        browser = Browser(chromium, loop)
        try:
            with browser.used():
                pass  # leave the loop unmarked until the first page is opened
            yield browser
        finally:
            with browser.used():
                chromium.close()
            asyncio._set_running_loop(loop)


class Broken(AssertionError):
    """A script in the page failed, or something that a test waits for did not happen."""


class Browser:
    def __init__(self, chromium: playwright.sync_api.Browser, loop: asyncio.AbstractEventLoop) -> None:
        self._chromium, self._loop, self._num_users = chromium, loop, 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark Playwright's event loop as running, but only inside the `with` block.

        Playwright leaves the loop marked for as long as the browser runs. Without this, no other test in the process
        could call asyncio.run.
        """
        self._num_users += 1
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                asyncio._set_running_loop(None)

    @contextmanager
    def page(
        self, url: str, *, width: int = 1024, height: int = 768, is_phone: bool = False, is_dark: bool = False
    ) -> Iterator[Page]:
        """Open a page, and check it for errors at the end."""
        with self.used():
            # A page that moves by itself would be in another place when it is clicked or photographed.
            context = self._chromium.new_context(no_viewport=True, reduced_motion="reduce", locale="en-US")
            context.set_default_timeout(_CLICK_S * 1000)
            try:
                page = Page(context.new_page())
                page.look(width, height, is_phone=is_phone, is_dark=is_dark)
                page.goto(url)
                yield page
                page.js("0")  # events that happened before have arrived when this is answered
            finally:
                context.close()
        assert page.outside == [], "a page asked for something outside loopback"
        assert page.errors == [], f"errors on the page's console: {page.errors}"


class Page:
    def __init__(self, page: playwright.sync_api.Page) -> None:
        self.playwright = page
        self.errors: list[str] = []  # console.error, uncaught exceptions, requests refused by server or policy
        self.requests: list[str] = []  # addresses, in the order they were asked for
        self.outside: list[str] = []  # those of them that are not on loopback
        self._devtools = page.context.new_cdp_session(page)
        page.on("console", self._hear_console)
        page.on("pageerror", lambda error: self.errors.append(error.stack or error.message))
        page.on("request", self._hear_request)

    def goto(self, url: str) -> None:
        """Open an address. Returns when the page has loaded and its scripts have run once."""
        self.playwright.goto(url)

    def reload(self) -> None:
        self.playwright.reload()

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        try:
            return self.playwright.evaluate(expression)
        except playwright.sync_api.Error as error:
            raise Broken(f"{expression}: {error.message}") from error

    def until(self, expression: str, timeout_s: float = _WAIT_S) -> None:
        # Playwright's wait_for_function would evaluate text inside the page, which the page's policy forbids.
        def is_so() -> bool:
            try:
                return bool(self.js(f"Boolean({expression})"))
            except Broken as broken:
                # The page is being replaced by the next one, or an element is not there yet.
                if "context was destroyed" in str(broken) or "Cannot read properties of null" in str(broken):
                    return False
                raise

        self._wait(is_so, lambda: f"it is not true that {expression}\n{self.text('body')}\n{self.errors}", timeout_s)

    def expect_error(self, part: str) -> None:
        """Wait for an error that contains this text, and take it off the list."""
        self._wait(lambda: any(part in each for each in self.errors), lambda: f"no error says {part!r}: {self.errors}")
        self.errors.remove(next(each for each in self.errors if part in each))

    def text(self, selector: str) -> str:
        """Return the visible text, as a person sees it."""
        return str(self.playwright.eval_on_selector(selector, "(part) => part.innerText"))

    def click(self, selector: str, timeout_s: float = _CLICK_S) -> None:
        """Click with the mouse. The element must be visible, and no other may cover it."""
        try:
            self.playwright.click(selector, timeout=timeout_s * 1000)
        except playwright.sync_api.Error as error:
            raise Broken(f"{selector} cannot be clicked: {error.message}") from error

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.playwright.keyboard.insert_text(text)

    def press(self, key: str, *, shift: bool = False) -> None:
        self.playwright.keyboard.press(f"Shift+{key}" if shift else key)

    def look(self, width: int, height: int, *, is_phone: bool = False, is_dark: bool = False) -> None:
        """Set the size of the window, whether it is a touch screen, and whether the system uses dark colors."""
        send = self._devtools.send
        send("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone,
        })  # fmt: skip
        send("Emulation.setTouchEmulationEnabled", {"enabled": is_phone})
        self.playwright.emulate_media(color_scheme="dark" if is_dark else "light")

    def overflow_px(self) -> int:
        """Return by how much the page is wider than its window, which no page should be."""
        return int(self.js("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def axe(self) -> list[str]:
        """Return the serious and critical accessibility problems that axe finds, one line for each element."""
        found = Axe().run(self.playwright).response["violations"]
        return [
            f"{each['impact']}: {each['id']}: {each['help']}: {node['html'][:200]} {node.get('failureSummary', '')}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def screenshot(self, path: Path) -> Path:
        self.playwright.screenshot(path=path)
        return path

    def _hear_console(self, message: playwright.sync_api.ConsoleMessage) -> None:
        if message.type in ("error", "assert"):
            self.errors.append(f"{message.text} {message.location['url']}".strip())

    def _hear_request(self, request: playwright.sync_api.Request) -> None:
        self.requests.append(request.url)
        if not _is_here(request.url):
            self.outside.append(request.url)

    def _wait(self, is_so: Callable[[], bool], messages: Callable[[], str], timeout_s: float = _WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise Broken(f"after {timeout_s:g} s {messages()}")
            self.playwright.wait_for_timeout(_LOOK_MS)  # events of the page arrive meanwhile


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("about", "blob", "data") or parts.hostname in ("127.0.0.1", "localhost", "::1")
