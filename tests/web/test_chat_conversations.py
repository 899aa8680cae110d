"""Conversations of the chat page: they stay in the browser, can be found, renamed, deleted, exported and imported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cli.typed import Homing, typed
from tests.web.browser import Browser
from tests.web.chat_rig import IDLE, ask, downloaded, opened, press_button, shown
from tests.web.rig import Script, served

pytestmark = [pytest.mark.machine]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def homing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Homing:
    return typed(capsys, monkeypatch)


@pytest.fixture
def chat(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> Iterator[httpx.Client]:
    with served(models / "sft", monkeypatch, script) as client:
        yield client


def test_conversations_survive_a_reload_and_each_has_its_own_messages(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "about cats"
    with opened(browser, chat) as page:
        ask(page, "Tell me a very long and winding story about a cat who went to sea\nand more")
        press_button(page, "New conversation")
        assert shown(page, ".turn") == []
        script.says = "about dogs"
        ask(page, "dogs")
        assert shown(page, ".entry .open") == ["dogs", "Tell me a very long and winding story about a…"]
        page.playwright.fill("#text", "a draft")
        page.reload()
        page.until("document.querySelectorAll('.said').length === 1")
        assert (shown(page, ".bubble"), shown(page, ".said")) == (["dogs"], ["about dogs"])
        assert page.js("document.querySelector('#text').value") == "a draft"
        page.playwright.fill("#text", "")
        page.click(".entry:nth-child(2) .open")
        assert shown(page, ".said") == ["about cats"]
        script.says = "more"
        ask(page, "go on")
        assert "about cats" in script.prompt()
        assert "dogs" not in script.prompt()
        page.playwright.fill("#search", "DOGS")
        assert shown(page, ".entry .open") == ["dogs"], "found by its words"
        page.playwright.fill("#search", "horses")
        assert "No conversation contains “horses”." in page.text("#list")


def test_a_conversation_is_renamed_deleted_and_brought_back(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "yes"
    with opened(browser, chat) as page:
        ask(page, "first")
        page.playwright.hover(".entry")
        press_button(page, "Rename “first”")
        page.type("My talk")
        page.press("Enter")
        assert shown(page, ".entry .open") == ["My talk"]
        ask(page, "second")
        page.reload()
        page.until("document.querySelectorAll('.said').length === 2")
        assert shown(page, ".entry .open") == ["My talk"], "a given title stays"
        page.playwright.hover(".entry")
        press_button(page, "Delete “My talk”")
        assert shown(page, ".turn") == []
        assert page.js("Object.keys(localStorage).filter((key) => key.startsWith('homing-chat:'))") == []
        press_button(page, "Undo")
        assert shown(page, ".bubble") == ["first", "second"]
        assert shown(page, ".entry .open") == ["My talk"]


def test_an_answer_that_a_reload_interrupts_is_kept_and_says_so(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "abcdef"
    script.hold()
    with opened(browser, chat) as page:
        ask(page, "go", is_answered=False)
        script.step(3)
        page.until("document.querySelector('.said').textContent === 'abc'")
        page.reload()
        page.until("document.querySelector('.said')")
        assert shown(page, ".said") == ["abc"]
        assert "The answer was interrupted." in page.text(".end")
        script.step(100)
        press_button(page, "Try again")
        page.until(f"{IDLE} && document.querySelector('.said').textContent === 'abcdef'")


def test_a_full_storage_is_announced_and_the_conversation_goes_on(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "yes"
    with opened(browser, chat) as page:
        page.js("localStorage.setItem('homing-chat:big', 'x'.repeat(3_999_900))")
        ask(page, "one")
        ask(page, "two")
        assert shown(page, ".said") == ["yes", "yes"]
        assert page.playwright.locator("#notice").is_visible()
        assert "storage for conversations in this browser is full" in page.text("#notice")
        assert "Export old conversations and delete them." in page.text("#notice")


def test_what_is_exported_is_training_data_and_can_be_imported(
    browser: Browser, chat: httpx.Client, script: Script, homing: Homing, tmp_path: Path
) -> None:
    with opened(browser, chat) as page:
        page.click("#open-settings")
        page.playwright.fill("#system", "Be brief.")
        page.press("Escape")
        script.says = "Grüße \x07€ <b>"  # with a character that data for training must not contain
        ask(page, "hello")
        ask(page, "again")
        press_button(page, "New conversation")
        script.says = "twice"
        ask(page, "other")
        press_button(page, "New conversation")
        script.says = ""
        ask(page, "unanswered")
        path = downloaded(page, "Export all", tmp_path)
        assert "Exported 2 conversations; left out 1 without an answer." in page.text(".toast")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [[(each["role"], each["content"]) for each in line["messages"]] for line in lines] == [
            [("user", "other"), ("assistant", "twice")],
            [("system", "Be brief."), ("user", "hello"), ("assistant", "Grüße € <b>"), ("user", "again"),
             ("assistant", "Grüße € <b>")],
        ]  # fmt: skip
        code, out, _ = homing("data", "check", str(path))
        assert code == 0, out
        page.js("localStorage.clear()")
        page.reload()
        page.until("document.activeElement.id === 'text'")
        path.write_text(path.read_text(encoding="utf-8") + '{"no": 1}\n', encoding="utf-8")
        page.playwright.set_input_files("#file", path)
        page.until("document.querySelector('.toast')?.innerText.includes('Imported 2 conversations.')")
        assert "1 line could not be read. Line 3: no list of messages." in page.text(".toast")
        assert sorted(shown(page, ".entry .open")) == ["hello", "other"]
        page.playwright.get_by_role("button", name="hello", exact=True).click()
        assert shown(page, ".said") == ["Grüße € <b>"] * 2
        assert "Be brief." in page.playwright.text_content(".system")
        page.playwright.hover(".entry.is-current")
        one = downloaded(page, "Export “hello”", tmp_path)
        assert one.name == "hello.jsonl"
        assert len(one.read_text(encoding="utf-8").splitlines()) == 1


def test_texts_of_a_base_model_are_exported_as_pairs_of_messages(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script, homing: Homing, tmp_path: Path
) -> None:
    script.says = " sat"
    with served(models / "pretrain", monkeypatch, script) as client, opened(browser, client) as page:
        ask(page, "the cat")
        press_button(page, "Continue")
        page.until(f"{IDLE} && document.querySelectorAll('.said').length === 2")
        path = downloaded(page, "Export all", tmp_path)
    assert json.loads(path.read_text()) == {
        "messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat sat"}]
    }
    assert homing("data", "check", str(path))[0] == 0


def test_two_tabs_do_not_overwrite_each_other(browser: Browser, chat: httpx.Client, script: Script) -> None:
    script.says = "yes"
    with opened(browser, chat) as page:
        ask(page, "in the first tab")
        second = page.playwright.context.new_page()
        second.goto(page.playwright.url)
        second.evaluate(
            "(token) => { location.hash = 'token=' + token; }", page.js("sessionStorage.getItem('homing-token')")
        )
        second.fill("#text", "in the second tab")
        second.press("#text", "Enter")
        second.wait_for_selector(".foot .stats:has-text('complete')")
        page.until("document.querySelectorAll('.entry').length === 2")
        ask(page, "more")
        page.reload()
        page.until("document.querySelectorAll('.said').length === 2")
        assert shown(page, ".entry .open") == ["in the first tab", "in the second tab"]
        second.close()
