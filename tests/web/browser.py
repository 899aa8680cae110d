"""A real chromium without a window: it opens pages of loopback, types, clicks, and tells what went wrong in them.

    with browser.page(url) as page:        a profile of its own: no other page's storage, nothing kept
        page.until("document.title === 'tiny'")
        page.click("#text"); page.type("Hello"); page.press("Enter")
        page.js("document.querySelector('.model').textContent")
        page.screenshot(path)

Whoever leaves the `with` asserts that nothing outside loopback was asked for, and that the console has no error; one
that a test expects it names before: `page.expect_error("401")`.

It speaks the DevTools protocol over two pipes: no port is open, and the browser ends when this process does. Where
chromium is absent the tests that want it are skipped with a message, and fail where CI is set.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT_S = 60.0
_KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "Backspace": 8, "Space": 32, "ArrowUp": 38, "ArrowDown": 40}
_SHIFT = 8


def need_chromium() -> str:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed, and CI is set: .ci/run installs it")
        pytest.skip("chromium is not installed, so no page is seen in a real browser")
    return found


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    browser = Browser(need_chromium(), folder)
    try:
        yield browser
    finally:
        browser.close()


class Broken(AssertionError):
    """The browser refused a command, or a script in the page failed."""


class Browser:
    def __init__(self, program: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        there, self._commands = os.pipe()
        self._answers, back = os.pipe()
        argv = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={folder}",
            # What it would ask of its makers by itself. Names are not looked up, and no proxy of the machine is used.
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-extensions", "--disable-default-apps", "--disable-breakpad", "--no-proxy-server",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        ]  # fmt: skip
        environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        with (folder / "log").open("wb") as log:
            # It reads commands from 3 and writes answers to 4; a shell moves the pipes there.
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", *argv], pass_fds=(there, back),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        os.close(there)
        os.close(back)
        self._log, self._numbers, self._sending = folder / "log", itertools.count(1), threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.call("Browser.getVersion")

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number, answer = next(self._numbers), queue.SimpleQueue[dict[str, Any]]()
        self._waiting[number] = answer
        command = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        with self._sending:
            left = json.dumps(command).encode() + b"\0"
            while left:
                left = left[os.write(self._commands, left) :]
        try:
            got = answer.get(timeout=_WAIT_S)
        except queue.Empty:
            raise Broken(f"{method} was not answered in {_WAIT_S:g} s\n{self._log.read_text()[-2000:]}") from None
        if "error" in got:
            raise Broken(f"{method}: {got['error']['message']}\n{self._log.read_text()[-2000:]}")
        return dict(got["result"])

    @contextmanager
    def page(
        self, url: str, *, width: int = 1024, height: int = 768, is_phone: bool = False, is_dark: bool = False
    ) -> Iterator[Page]:
        """A page, and in the end its check."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call("Page.setLifecycleEventsEnabled", enabled=True)
        page.look(width, height, is_phone=is_phone, is_dark=is_dark)
        try:
            page.goto(url)
            yield page
            page.js("0")  # earlier events have arrived when this is answered
        finally:
            del self._pages[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)
        assert page.outside == [], "a page asked for something outside loopback"
        assert page.errors == [], "errors on the page's console"

    def close(self) -> None:
        os.close(self._commands)  # whereupon it ends
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._listener.join(20)
            os.close(self._answers)

    def _listen(self) -> None:
        held = b""
        while part := os.read(self._answers, 1 << 16):
            *whole, held = (held + part).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._waiting.pop(message["id"]).put(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.hear(message["method"], message["params"])
        for answer in [*self._waiting.values()]:
            answer.put({"error": {"message": "the browser has ended"}})


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []  # console.error, uncaught exceptions, requests refused by server or policy
        self.requests: list[str] = []  # addresses, in the order they were asked for
        self.outside: list[str] = []  # those of them that are not on loopback
        self._loaded: set[str] = set()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def goto(self, url: str) -> None:
        """Returns when the page has loaded, its script run once; what that has begun may still be on its way."""
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        if "loaderId" in found:  # else it is a place in the page that is open
            _wait(lambda: found["loaderId"] in self._loaded, lambda: f"{url} does not load: {self.errors}")

    def reload(self) -> None:
        self.js("window.__before = true")
        self.call("Page.reload")
        self.until("!window.__before && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True,
                        userGesture=True)  # fmt: skip
        if "exceptionDetails" in got:
            raise Broken(f"{expression}: {got['exceptionDetails'].get('exception', {}).get('description')}")
        return got["result"].get("value")

    def until(self, expression: str, timeout_s: float = _WAIT_S) -> None:
        def is_so() -> bool:
            try:
                return bool(self.js(f"Boolean({expression})"))
            except Broken as broken:
                if "context" in str(broken).partition("\n")[0]:  # between two pages there is none to ask
                    return False
                raise

        _wait(is_so, lambda: f"it is not true that {expression}\n{self.text('body')}\n{self.errors}", timeout_s)

    def expect_error(self, part: str) -> None:
        """Takes one error with these words away, as soon as it is there."""
        _wait(lambda: any(part in each for each in self.errors), lambda: f"no error says {part!r}: {self.errors}")
        self.errors.remove(next(each for each in self.errors if part in each))

    def text(self, selector: str) -> str:
        """As a person sees it: nothing of what is hidden."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what must be in sight and under no other."""
        name = json.dumps(selector)
        self.js(f"document.querySelector({name}).scrollIntoView({{block: 'nearest'}})")
        x, y, is_hit = self.js(
            f"(() => {{ const part = document.querySelector({name}), box = part.getBoundingClientRect();"
            "const x = box.x + box.width / 2, y = box.y + box.height / 2, at = document.elementFromPoint(x, y);"
            "return [x, y, at !== null && (part.contains(at) || at.contains(part) && at.tagName === 'LABEL')]; })()"
        )
        assert is_hit, f"{selector} is not there to be clicked at {x:g}, {y:g}"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        key = " " if key == "Space" else key
        code = _KEYS["Space" if key == " " else key]
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": _SHIFT if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self, width: int, height: int, *, is_phone: bool = False, is_dark: bool = False) -> None:
        """The size of the window, and whether the person likes it dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=2 if is_phone else 1, mobile=is_phone)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def overflow_px(self) -> int:
        """By how much the page is wider than its window, which no page should be."""
        return int(self.js("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return path

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """In the browser's thread."""
        if method == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            self.requests.append(url)
            if not _is_here(url):
                self.outside.append(url)


def _wait(is_so: Callable[[], bool], messages: Callable[[], str], timeout_s: float = _WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise Broken(f"after {timeout_s:g} s {messages()}")
        time.sleep(0.02)


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("about", "blob", "data") or parts.hostname in ("127.0.0.1", "localhost", "::1")
