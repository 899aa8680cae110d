"""The page of `homing serve` in a real browser: what a person sees, types, and reads when something fails."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.web.browser import Browser, Page
from tests.web.rig import TOKEN, Script, lasting_port, served

from homing.sampling_settings import SamplingSettings
from homing.web.openai_requests import Defaults

HTML = files("homing.web").joinpath("page.html").read_text(encoding="utf-8")
SCRIPT = HTML.split("<script>")[1].split("</script>")[0]
IDLE = "!document.querySelector('#send').disabled"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def chat(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> Iterator[httpx.Client]:
    with served(models / "sft", monkeypatch, script) as client:
        yield client


def opened(browser: Browser, client: httpx.Client, **look: Any) -> AbstractContextManager[Page]:
    """As by the address that `homing serve` prints."""
    return browser.page(f"{client.base_url}#token={TOKEN}", **look)


def ask(page: Page, words: str, *, is_answered: bool = True) -> None:
    """By the keyboard, as soon as the page has met its model."""
    page.until("document.title === 'tiny' && document.activeElement.id === 'text'")
    number = page.js("document.querySelectorAll('.turn').length")
    page.type(words)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn').length === {number + 1}")
    if is_answered:
        page.until(IDLE)


def shown(page: Page, name: str) -> list[str]:
    return list(page.js(f"[...document.querySelectorAll('.{name}')].map((each) => each.innerText)"))


def test_its_own_script_and_style_are_all_that_may_run(chat: httpx.Client) -> None:
    response = chat.get("/", headers={"Authorization": ""})
    assert response.text == HTML
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert response.headers["referrer-policy"] == "no-referrer"


def test_it_asks_for_nothing_outside_and_writes_no_html() -> None:
    assert not re.search(r"https?:|//[a-z]|src=|href=|@import|url\(|style=| on[a-z]+=", HTML.split("<script>")[0])
    assert not re.search(r"https?:|innerHTML|insertAdjacent|document\.write|eval\(|\bFunction\(", SCRIPT)


@pytest.mark.acceptance("X16")
@pytest.mark.machine
def test_it_talks_in_turns_and_takes_the_token_from_the_address(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "<b>Grüße</b> <script>document.title = 'x'</script>\n\n€"
    with opened(browser, chat) as page:
        ask(page, "one")
        ask(page, "two")
        assert (shown(page, "asked"), shown(page, "said")) == (["one", "two"], [script.says] * 2)
        assert page.js("document.querySelectorAll('main b, main script').length") == 0, "words are never HTML"
        assert page.js("location.href") == f"{chat.base_url}/", "the token is gone from the address"
        assert page.text("#note") == "context 256 tokens"
    assert all(TOKEN not in url for url in page.requests)
    assert script.prompt().count("Grüße") == 1, "the second question comes with the first and its answer"
    assert [script.asked[0][name] for name in ("temperature", "num_tokens")] == [0.8, 200]


@pytest.mark.machine
def test_words_are_seen_as_they_come_and_a_stop_ends_them(browser: Browser, chat: httpx.Client, script: Script) -> None:
    script.says = "abcdefgh" * 20
    script.hold()
    with opened(browser, chat) as page:
        for number, stop in enumerate((lambda: page.click("#stop"), lambda: page.press("Escape"))):
            ask(page, "go on", is_answered=False)
            assert script.begun.acquire(timeout=60)
            script.step(3)
            page.until(f"document.querySelectorAll('.said')[{number}].textContent === 'abc'")
            assert not page.js(IDLE)
            page.press("Enter")  # nothing is sent while words come
            stop()
            page.until(IDLE)
            assert script.closed.acquire(timeout=60), "the server has ended the text"
            assert shown(page, "end")[number] == "Stopped."
        assert page.js("document.activeElement.id") == "text", "ready for the next words"
    assert script.num_made < 10
    assert "abc" in script.prompt(), "what was said until then is part of the conversation"


@pytest.mark.machine
def test_the_newest_words_are_in_sight_unless_one_reads_above(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "\n" * 30 + "end"
    script.hold()
    with served(models / "pretrain", monkeypatch, script) as client, opened(browser, client, height=500) as page:
        place = (
            "(() => { const box = document.querySelector('.turn:last-child').getBoundingClientRect();"
            "return box.bottom <= document.querySelector('#ask').getBoundingClientRect().top; })()"
        )
        ask(page, "first", is_answered=False)
        script.step(1000)
        page.until(IDLE)
        assert page.js("document.querySelector('#log').scrollTop") > 100
        assert page.js(place), "it is not covered by what is below"
        ask(page, "second", is_answered=False)
        assert page.js(place)
        page.js("document.querySelector('#log').scrollTop = 0")
        script.step(1000)
        page.until(IDLE)
        assert page.js("document.querySelector('#log').scrollTop") == 0
        assert page.js("document.documentElement.scrollHeight <= innerHeight"), "what is typed into stays where it is"


@pytest.mark.machine
def test_a_wrong_token_is_said_and_the_right_one_opens_the_page(browser: Browser, chat: httpx.Client) -> None:
    with browser.page(str(chat.base_url)) as page:
        page.until("document.activeElement.id === 'token'")
        assert page.js("[...document.querySelectorAll('#ask, #log')].every((each) => !each.offsetParent)")
        page.type("not-the-token-at-all")
        page.press("Enter")
        page.until("document.querySelector('#why').textContent")
        assert page.text("#why") == "This token does not belong to the running server."
        page.expect_error("401")
        page.type("€")
        page.click("#login button")
        page.until("document.querySelector('#why').textContent.includes('invalid characters')")
        page.type(TOKEN)
        page.press("Enter")
        page.until("document.title === 'tiny' && document.activeElement.id === 'text'")
        assert page.js("document.querySelector('#login').offsetParent") is None


@pytest.mark.machine
def test_a_server_that_is_gone_and_comes_back_with_another_token(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "hello"
    folder, port = models / "sft", lasting_port()
    with browser.page("about:blank") as page:
        with served(folder, monkeypatch, script, port=port) as client:
            page.goto(f"{client.base_url}#token={TOKEN}")
            ask(page, "one")
        ask(page, "two")
        page.expect_error("ERR_CONNECTION_REFUSED")
        assert shown(page, "end")[-1] == "The server does not respond. Is homing serve still running?"
        assert page.js("document.querySelector('#text').value") == "two", "to be sent again"
        with served(folder, monkeypatch, script, port=port, token="the-token-of-the-second") as client:
            page.press("Enter")
            page.until("document.querySelector('#why').textContent.includes('does not belong')")
            page.expect_error("401")
            page.type("the-token-of-the-second")
            page.press("Enter")
            page.until("document.activeElement.id === 'text'")
            assert page.js("document.querySelector('#text').value") == "two"
            page.press("Enter")
            page.until(f"document.querySelectorAll('.said').length === 2 && {IDLE}")
            assert shown(page, "asked") == ["one", "two"]
        with served(folder, monkeypatch, script, port=port, token="the-token-of-the-third") as client:
            # The printed address, pasted into the tab that is open: the browser loads nothing anew for it.
            page.js("window.is_same_page = true")
            page.goto(f"{client.base_url}#token=the-token-of-the-third")
            page.until("!location.hash")
            ask(page, "three")
            assert shown(page, "said") == ["hello"] * 3
            assert page.js("window.is_same_page")


@pytest.mark.machine
def test_a_text_that_breaks_off_is_not_taken_for_a_whole_one(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = RuntimeError("out of memory")
    with opened(browser, chat) as page:
        ask(page, "one")
        assert "out of memory" in shown(page, "end")[0]
        assert page.js("document.querySelector('#text').value") == "one"
        page.js("document.querySelector('#text').value = ''")
        half = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\\n\\n'
        page.js(f"window.fetch = async () => new Response('{half}')")
        ask(page, "two")
        assert shown(page, "said")[1] == "half"
        assert "was lost before the end" in shown(page, "end")[1]


@pytest.mark.machine
def test_a_full_context_is_said_and_a_new_conversation_begins(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "x" * 300
    with opened(browser, chat) as page:
        ask(page, "one")
        assert shown(page, "end") == ["Stopped after 200 tokens."]
        ask(page, "two")
        assert shown(page, "end")[1].startswith("The context is full")
        ask(page, "three")
        page.expect_error("400")
        assert re.search(
            r"The prompt has .* must fit in the context of 256 tokens.* Click New to start"
            r" another",
            shown(page, "end")[2],
        )
        assert page.js("document.querySelector('#text').value") == "three"
        page.click("#new")
        assert shown(page, "turn") == []
        page.press("Enter")
        page.until(f"document.querySelectorAll('.said').length === 1 && {IDLE}")
    assert "one" not in script.prompt()


@pytest.mark.machine
def test_a_reload_keeps_the_conversation_of_this_tab(browser: Browser, chat: httpx.Client, script: Script) -> None:
    script.says = "the answer"
    with opened(browser, chat) as page:
        ask(page, "the question")
        page.reload()
        page.until("document.querySelectorAll('.said').length")
        assert (shown(page, "asked"), shown(page, "said")) == (["the question"], ["the answer"])
        ask(page, "and now")
        assert "the question" in script.prompt()
        page.click("#new")
        page.reload()
        page.until("document.title === 'tiny'")
        assert shown(page, "turn") == []


@pytest.mark.machine
def test_settings_go_along_and_empty_ones_are_left_to_the_server(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "x"
    defaults = Defaults(num_tokens=33, sampling=SamplingSettings(temperature=0.75))  # no multiple of the field's step
    with served(models / "sft", monkeypatch, script, defaults=defaults) as client, opened(browser, client) as page:
        ask(page, "one")
        page.js("document.querySelector('#temperature').value = '0.25'; document.querySelector('#tokens').value = ''")
        ask(page, "two")
        page.js("document.querySelector('#tokens').value = '7'")
        ask(page, "three")
    assert [(each["temperature"], each["num_tokens"]) for each in script.asked] == [(0.75, 33), (0.25, 33), (0.25, 7)]


@pytest.mark.machine
def test_a_line_is_begun_by_shift_and_every_button_is_reached_by_tab(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "x"
    with opened(browser, chat) as page:
        page.until("document.activeElement.id === 'text'")
        page.press("Enter")
        page.type("a")
        page.press("Enter", shift=True)
        ask(page, "b")
        assert shown(page, "asked") == ["a\nb"]
        reached = []
        for _ in range(4):
            page.press("Tab")
            reached.append(page.js("document.activeElement.id"))
        assert reached == ["send", "new", "temperature", "tokens"]
    assert len(script.asked) == 1, "nothing was sent where nothing was typed"


@pytest.mark.machine
@pytest.mark.parametrize("is_dark", [False, True])
def test_long_words_and_narrow_windows(browser: Browser, chat: httpx.Client, script: Script, is_dark: bool) -> None:
    script.says = "Donaudampfschifffahrt" * 8
    with opened(browser, chat, width=320, height=568, is_phone=True, is_dark=is_dark) as page:
        ask(page, "y" * 50)
        assert shown(page, "said") == [script.says]
        assert page.overflow_px() == 0
        assert page.js("document.querySelector('#tokens').getBoundingClientRect().bottom <= innerHeight")
        red = page.js(
            "(() => { const pixel = document.createElement('canvas').getContext('2d');"
            "pixel.fillStyle = getComputedStyle(document.querySelector('#note')).color; pixel.fillRect(0, 0, 1, 1);"
            "return pixel.getImageData(0, 0, 1, 1).data[0]; })()"
        )
        assert (red > 140) is is_dark, "light words on a dark ground, and the other way round"


@pytest.mark.machine
def test_a_base_model_continues_the_text(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = " sat"
    with served(models / "pretrain", monkeypatch, script) as client, opened(browser, client) as page:
        ask(page, "the cat")
        assert shown(page, "answer") == ["the cat sat"]
        assert shown(page, "asked") == []
        assert "not trained for chat" in page.text("#note")
        ask(page, "a dog")
        assert shown(page, "answer") == ["the cat sat", "a dog sat"]
    assert "cat" not in script.prompt()
