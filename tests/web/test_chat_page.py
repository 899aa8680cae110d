"""The chat page in a real browser: what a person sees, types, and reads when something fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from tests.web.browser import Browser
from tests.web.chat_rig import IDLE, ask, opened, press_button, shown
from tests.web.rig import TOKEN, Script, lasting_port, served, served_together

from homing.sampling_settings import SamplingSettings
from homing.web.chat import SCRIPTS
from homing.web.openai_requests import Defaults


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def chat(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> Iterator[httpx.Client]:
    with served(models / "sft", monkeypatch, script) as client:
        yield client


@pytest.fixture
def two(models: Path, script: Script) -> Iterator[httpx.Client]:
    """Two chat models and a base model behind one address."""
    with served_together({"ann": models / "sft", "bob": models / "sft", "base": models / "pretrain"}, script) as client:
        yield client


def test_only_its_own_files_may_run_and_they_need_no_token(chat: httpx.Client) -> None:
    html = chat.get("/", headers={"Authorization": ""})
    policy = html.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "sha256" not in policy
    for name in re.findall(r'(?:src|href)="([^"#]+)"', html.text):
        response = chat.get(f"/{name}", headers={"Authorization": ""})
        assert response.status_code == 200, name
        assert response.headers["content-security-policy"] == policy
        assert response.headers["x-content-type-options"] == "nosniff"


def test_it_loads_nothing_from_elsewhere_and_writes_no_html() -> None:
    folder = files("homing.web.chat")
    html = folder.joinpath("page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|style=| on[a-z]+=|<script>|<style", html)
    for name in SCRIPTS:
        code = folder.joinpath(name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://[a-z]|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bFunction\(", code
        )


@pytest.mark.acceptance("X16")
@pytest.mark.machine
def test_it_talks_in_turns_and_takes_the_token_from_the_address(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "**Grüße** from `me`\n\n€"
    with opened(browser, chat) as page:
        ask(page, "one")
        ask(page, "two")
        assert shown(page, ".bubble") == ["one", "two"]
        assert shown(page, ".said") == ["Grüße from me\n\n€"] * 2
        assert shown(page, ".said strong") == ["Grüße"] * 2
        assert page.js("location.href") == f"{chat.base_url}/", "the token is gone from the address"
        usage = [len(script.asked[-1]["ids"]), len(script.tokenizer.encode(script.says))]
        assert re.fullmatch(rf"{usage[1]} tokens · [\d,.]+ tok/s · complete", shown(page, ".stats")[1])
        assert page.text("#meter-text") == f"{sum(usage)} of 256 tokens"
        assert page.js("document.querySelector('#spoken').textContent") == script.says, (
            "a screen reader hears the answer once, when it is complete"
        )
        press_button(page, "Show as plain text", 1)
        assert shown(page, ".said") == ["Grüße from me\n\n€", script.says]
        press_button(page, "Show as plain text", 1)
        assert shown(page, ".said")[1] == "Grüße from me\n\n€"
    assert all(TOKEN not in url for url in page.requests)
    assert script.prompt().count("Grüße") == 1, "the second question comes with the first and its answer"
    assert [script.asked[0][name] for name in ("temperature", "num_tokens")] == [0.8, 200]


BLOCKED = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } });"""


@pytest.mark.machine
def test_it_works_in_a_browser_that_blocks_storage(browser: Browser, chat: httpx.Client, script: Script) -> None:
    script.says = "Good morning."
    with opened(browser, chat) as page:
        page.playwright.add_init_script(BLOCKED)
        page.goto(f"{chat.base_url}?blocked#token={TOKEN}")
        page.until("document.title !== 'homing' && !document.querySelector('#app').hidden")
        ask(page, "hello")
        assert shown(page, ".said") == ["Good morning."]


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
            page.type("next")
            page.press("Enter")  # nothing is sent while an answer comes, and nothing typed is lost
            assert page.js("document.querySelector('#text').value") == "next"
            stop()
            page.until(IDLE)
            page.playwright.fill("#text", "")
            assert script.closed.acquire(timeout=60), "the server has ended the text"
            assert shown(page, ".end")[number] == "You stopped this answer."
            assert re.fullmatch("about 3 tokens · stopped", shown(page, ".stats")[number])
        assert page.js("document.activeElement.id") == "text", "ready for the next message"
    assert script.num_made < 10
    assert "abc" in script.prompt(), "what was said until then is part of the conversation"


@pytest.mark.machine
def test_a_person_who_scrolls_up_stays_there_and_can_jump_to_the_latest(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "line\n\n" * 20
    script.hold()
    at_end = "(log.scrollHeight - log.scrollTop - log.clientHeight < 2)"
    with opened(browser, chat, height=400) as page:
        page.js("window.log = document.querySelector('#log')")
        ask(page, "first", is_answered=False)
        script.step(50)
        page.until(f"log.scrollTop > 100 && {at_end}")
        assert page.playwright.locator("#latest").is_hidden()
        page.js("log.scrollTop = 0")
        script.step(1000)
        page.until(IDLE)
        assert page.js("log.scrollTop") == 0
        page.click("#latest")
        page.until(at_end)
        page.until("document.querySelector('#latest').hidden")
        assert page.js("document.documentElement.scrollHeight <= innerHeight"), "the box stays where it is"


@pytest.mark.machine
def test_regenerate_replaces_the_last_answer_and_an_edit_drops_what_came_after(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    with opened(browser, chat) as page:
        for number in ("one", "two", "three"):
            script.says = f"answer {number}"
            ask(page, number)
        script.says = "another answer"
        press_button(page, "Regenerate")
        page.until(f"{IDLE} && document.querySelectorAll('.said')[2].textContent === 'another answer'")
        assert "answer three" not in script.prompt()
        press_button(page, "Edit message")
        assert "removes the answer and the 2 turns after it" in page.text(".edit .hint")
        page.press("Escape")
        assert shown(page, ".bubble") == ["one", "two", "three"], "cancelled"
        page.press("ArrowUp")
        assert page.js("document.activeElement.value") == "three", "the last message, from an empty box"
        page.press("Escape")
        press_button(page, "Edit message")
        page.playwright.fill(".edit textarea", "uno")
        script.says = "risposta"
        page.press("Enter")
        page.until(f"document.querySelectorAll('.turn').length === 1 && {IDLE}")
        assert (shown(page, ".bubble"), shown(page, ".said")) == (["uno"], ["risposta"])
        assert "Removed 2 later turns." in page.text(".toast")
        press_button(page, "Undo")
        assert shown(page, ".bubble") == ["one", "two", "three"]


@pytest.mark.machine
def test_a_wrong_token_is_refused_and_the_right_one_opens_the_page(browser: Browser, chat: httpx.Client) -> None:
    with browser.page(str(chat.base_url)) as page:
        page.until("document.activeElement.id === 'token'")
        assert page.playwright.locator("#ask").is_hidden()
        page.type("not-the-token-at-all")
        page.press("Enter")
        page.until("document.querySelector('#why').textContent")
        assert page.text("#why") == "This token does not belong to the running server."
        page.expect_error("401")
        page.type("€")
        page.press("Enter")
        page.until("document.querySelector('#why').textContent.includes('invalid characters')")
        page.type(TOKEN)
        page.press("Enter")
        page.until("document.activeElement.id === 'text'")
        assert page.playwright.locator("#login").is_hidden()


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
        assert "The server does not respond. Is homing serve still running?" in shown(page, ".end")[-1]
        with served(folder, monkeypatch, script, port=port, token="the-token-of-the-second") as client:
            page.playwright.fill("#text", "a draft")
            press_button(page, "Try again")
            page.until("document.querySelector('#why').textContent.includes('does not belong')")
            page.expect_error("401")
            page.type("the-token-of-the-second")
            page.press("Enter")
            page.until("document.activeElement.id === 'text'")
            assert page.js("document.querySelector('#text').value") == "a draft", "nothing typed is lost"
            press_button(page, "Try again")
            page.until(f"document.querySelectorAll('.said').length === 2 && {IDLE}")
            assert (shown(page, ".bubble"), shown(page, ".said")) == (["one", "two"], ["hello"] * 2)
            page.playwright.fill("#text", "")
        with served(folder, monkeypatch, script, port=port, token="the-token-of-the-third") as client:
            # The printed address, pasted into the open tab: the browser does not reload the page for it.
            page.js("window.is_same_page = true")
            page.goto(f"{client.base_url}#token=the-token-of-the-third")
            page.until("!location.hash")
            page.click("#text")
            ask(page, "three")
            assert shown(page, ".said") == ["hello"] * 3
            assert page.js("window.is_same_page")


@pytest.mark.machine
def test_failures_say_what_to_do(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = RuntimeError("out of memory")
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\\n\\n'
    with served(models / "sft", monkeypatch, script) as client, opened(browser, client) as page:
        ask(page, "one")
        assert "out of memory" in shown(page, ".end")[0]
        page.js(f"window.real = fetch; window.fetch = async () => new Response('{half}'); 0")
        press_button(page, "Try again")
        page.until(f"{IDLE} && document.querySelector('.said').textContent === 'half'")
        assert "lost before the end" in page.text(".end")
        page.js(
            "window.fetch = async () => new Response(JSON.stringify({ error: { message:"
            "'Too many requests are queued. Try again soon.' } }), { status: 503, headers: { 'retry-after': '7' } }); 0"
        )
        press_button(page, "Try again")
        page.until(f"{IDLE} && document.querySelector('.end').innerText.includes('7 seconds')")
        assert page.text(".end span") == "Too many requests are queued. Try again in 7 seconds."
        page.js("window.fetch = window.real; 0")
        script.says = "fine"
        press_button(page, "Try again")
        page.until(f"{IDLE} && document.querySelector('.said').textContent === 'fine'")
        assert shown(page, ".end") == []


@pytest.mark.machine
def test_only_the_last_message_can_be_tried_again_and_an_unknown_model_updates_the_list(
    browser: Browser, two: httpx.Client, script: Script
) -> None:
    script.says = RuntimeError("out of memory")
    with opened(browser, two) as page:
        ask(page, "one")
        script.says = "fine"
        ask(page, "two")
        assert "out of memory" in shown(page, ".end")[0]
        assert page.playwright.get_by_role("button", name="Try again").count() == 0, "it would drop the second message"
        page.js("models[0].id = 'gone'; 0")
        ask(page, "three")
        page.expect_error("404")
        page.until("model.id === 'ann'")
        assert "Unknown model 'gone'" in shown(page, ".end")[1]
        press_button(page, "Try again")
        page.until(f"{IDLE} && document.querySelectorAll('.said')[2].textContent === 'fine'")
        assert page.js("document.activeElement.id") == "text", "the focus is not lost with the button"


@pytest.mark.machine
def test_a_full_context_is_announced_and_a_new_conversation_begins(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "x" * 300
    with opened(browser, chat) as page:
        ask(page, "one")
        assert "maximum of 200 tokens" in shown(page, ".end")[0]
        is_nearly_full = int(page.text("#meter-text").split()[0]) >= 218
        assert page.playwright.locator("#notice").is_visible() is is_nearly_full
        ask(page, "two")
        assert "The context is full" in shown(page, ".end")[1]
        assert page.playwright.locator("#notice").is_visible()
        assert "context is full: 256 of 256 tokens" in page.text("#notice")
        ask(page, "three")
        page.expect_error("400")
        assert re.search(
            r"The prompt has .* must fit in the context of 256 tokens\. Start a new conv", shown(page, ".end")[2]
        )
        assert page.text("#meter-text") == "256 of 256 tokens", "the error does not empty the meter"
        press_button(page, "New conversation with this message")
        assert shown(page, ".turn") == []
        assert page.js("document.querySelector('#text').value") == "three"
        page.press("Enter")
        page.until(f"document.querySelectorAll('.said').length === 1 && {IDLE}")
    assert "one" not in script.prompt()


@pytest.mark.machine
def test_settings_are_sent_kept_and_refused_where_they_are_typed(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "xyz"
    defaults = Defaults(num_tokens=33, sampling=SamplingSettings(temperature=0.75))
    given = {"temperature": "0.25", "top_k": "7", "top_p": "0.5", "min_p": "0.1", "repetition_penalty": "1.1",
             "presence_penalty": "0.5", "frequency_penalty": "-0.5", "seed": "42", "max_tokens": "9"}  # fmt: skip
    with served(models / "sft", monkeypatch, script, defaults=defaults) as client, opened(browser, client) as page:
        ask(page, "one")
        page.click("#open-settings")
        assert page.js("document.querySelector('#set-temperature').placeholder") == "0.75"
        for name, value in given.items():
            page.playwright.fill(f"#set-{name}", value)
        page.playwright.fill("#set-stop", "y\n\\n\\n")
        page.playwright.fill("#system", "Be brief.")
        page.playwright.fill("#set-top_p", "1.5")
        assert page.text("#set-top_p-error") == "Enter a number above 0 and at most 1."
        page.press("Escape")
        page.playwright.fill("#text", "two")
        page.press("Enter")
        assert page.js("document.activeElement.id") == "set-top_p", "an invalid value is not sent, but shown"
        page.playwright.fill("#set-top_p", "0.5")
        page.press("Escape")
        page.reload()
        page.until("document.activeElement.id === 'text' && document.querySelector('#text').value === 'two'")
        page.press("Enter")
        page.until(f"document.querySelectorAll('.said').length === 2 && {IDLE}")
        assert shown(page, ".said")[1] == "x", "the answer ends before a stop string"
        assert "Be brief." in script.prompt()
        page.click("#open-settings")
        page.click("#reset")
        page.press("Escape")
        ask(page, "three")
    first, second, third = script.asked
    assert (first["temperature"], first["num_tokens"]) == (third["temperature"], third["num_tokens"]) == (0.75, 33)
    assert {name: second[name if name != "max_tokens" else "num_tokens"] for name in given} == {
        name: float(value) for name, value in given.items()
    }


@pytest.mark.machine
def test_the_keyboard_reaches_everything(browser: Browser, chat: httpx.Client, script: Script) -> None:
    script.says = "x"
    with opened(browser, chat) as page:
        page.until("document.activeElement.id === 'text'")
        page.press("Enter")
        page.type("a")
        page.press("Enter", shift=True)
        ask(page, "b")
        assert shown(page, ".bubble") == ["a\nb"]
        names = []
        page.js("document.querySelector('.skip-link').focus()")
        for _ in range(16):
            page.press("Tab")
            names.append(
                page.js("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
            )
        assert [name for name in names if name.strip()] == [
            "New conversation", "Search conversations", "a", "Rename “a”", "Export “a”", "Delete “a”", "Export all",
            "Import", "Settings", "Keyboard shortcuts", "Use dark colors", "Conversation", "Edit message",
            "Copy message", "Copy answer", "Regenerate",
        ]  # fmt: skip
        page.press("?")
        assert "Start a new line" in page.text("#help")
        page.press("Escape")
        assert page.playwright.locator("#help").is_hidden()
    assert len(script.asked) == 1, "nothing was sent where nothing was typed"


@pytest.mark.machine
def test_a_base_model_continues_one_document(
    browser: Browser, models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = " *sat*"
    with served(models / "pretrain", monkeypatch, script) as client, opened(browser, client) as page:
        assert "continues your text" in page.text("#empty")
        ask(page, "the cat")
        assert shown(page, ".document") == ["the cat *sat*"], "as it is, without Markdown"
        assert shown(page, ".document .given") == ["the cat"]
        press_button(page, "Continue")
        page.until(f"{IDLE} && document.querySelectorAll('.said').length === 2")
        ask(page, " and")
        assert shown(page, ".document") == ["the cat *sat* *sat* and *sat*"]
        assert script.prompt().endswith("the cat *sat* *sat* and")
        script.says = "x" * 300
        press_button(page, "Regenerate")
        page.until(f"{IDLE} && document.querySelector('.foot').innerText.includes('maximum reached')")
        assert shown(page, ".end") == [], "a text simply continues with Continue"
        script.says = " *sat*"
        press_button(page, "Edit the text")
        page.playwright.fill(".edit textarea", "a dog")
        page.press("Enter")
        page.until(f"{IDLE} && document.querySelector('.document').innerText === 'a dog *sat*'")
    assert "cat" not in script.prompt()


@pytest.mark.machine
def test_two_models_answer_side_by_side_and_keep_their_own_conversations(
    browser: Browser, two: httpx.Client, script: Script
) -> None:
    script.says_as = {"ann": "I am Ann.", "bob": "I am Bob."}
    with opened(browser, two) as page:
        assert shown(page, "#model option") == ["ann", "bob", "base"]
        press_button(page, "Compare")
        assert shown(page, "#other option") == ["bob"], "a base model cannot answer messages"
        ask(page, "who are you?")
        assert shown(page, ".who") == ["ann", "bob"]
        assert shown(page, ".said") == ["I am Ann.", "I am Bob."]
        assert all("tok/s" in stats for stats in shown(page, ".stats"))
        left, right = page.js("[...document.querySelectorAll('.answer')].map((each) => each.getBoundingClientRect().x)")
        assert right > left + 100
        ask(page, "and now?")
        prompts = [str(script.tokenizer.decode(each["ids"])) for each in script.asked[-2:]]
        assert sorted(("Ann" in prompt, "Bob" in prompt) for prompt in prompts) == [(False, True), (True, False)]
        page.look(390, 844, is_phone=True)
        page.until("innerWidth === 390")
        tops = page.js("[...document.querySelectorAll('.answer')].map((each) => each.getBoundingClientRect().top)")
        assert tops[1] > tops[0] + 20, "on a phone, one below the other"
        assert page.overflow_px() == 0
        page.look(1024, 768)
        page.playwright.select_option("#model", "base")
        assert "Write with base" in page.text("#empty"), "a base model begins a text"
        press_button(page, "Compare")
        assert shown(page, "#other option") == ["ann", "bob"], "but each model can continue a text"


@pytest.mark.machine
def test_a_phone_has_a_drawer_large_targets_and_no_sideways_scrolling(
    browser: Browser, chat: httpx.Client, script: Script
) -> None:
    script.says = "Donaudampfschifffahrt" * 8
    with opened(browser, chat, width=320, height=568, is_phone=True) as page:
        page.playwright.fill("#text", "y" * 50)
        page.click("#send")
        page.until(f"document.querySelector('.said') && {IDLE}")
        assert shown(page, ".said") == [script.says]
        assert page.overflow_px() == 0
        small = page.js(
            "[...document.querySelectorAll('button, input, select, textarea')]"
            ".filter((each) => each.checkVisibility({ visibilityProperty: true }))"
            ".map((each) => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])"
            ".filter(([, box]) => box.height && (box.height < 43.5 || box.width < 43.5)).map(([name]) => name)"
        )
        assert small == []
        page.press("Enter")
        page.click("#open-side")
        page.until("document.querySelector('#side').getBoundingClientRect().x === 0")
        page.click("#new")
        page.until("document.querySelector('#side').getBoundingClientRect().right <= 0")
        assert shown(page, ".turn") == []
        assert page.js("document.querySelector('.composer').getBoundingClientRect().bottom <= innerHeight")
        page.look(320, 300, is_phone=True)  # the keyboard is open
        page.until("document.querySelector('.composer').getBoundingClientRect().bottom <= 300")


@pytest.mark.machine
@pytest.mark.parametrize("is_dark", [False, True])
def test_no_state_of_the_page_has_accessibility_problems(
    browser: Browser, two: httpx.Client, script: Script, is_dark: bool
) -> None:
    script.says = (
        "# Title\n\nSome `code` and [a link](https://example.org).\n\n```python\nx = 1\n```\n\n- a\n- b\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quoted"
    )
    with browser.page(str(two.base_url), is_dark=is_dark) as page:
        page.until("document.activeElement.id === 'token'")
        assert page.axe() == [], "login"
        page.type(TOKEN)
        page.press("Enter")
        page.until("document.activeElement.id === 'text'")
        assert page.axe() == [], "empty"
        ask(page, "hello")
        assert page.axe() == [], "conversation"
        press_button(page, "Compare")
        ask(page, "both")
        assert page.axe() == [], "compare"
        page.click("#open-settings")
        page.playwright.fill("#set-top_p", "7")
        assert page.axe() == [], "settings"
        page.press("Escape")
        page.press("Tab")
        page.click("#open-help")
        assert page.axe() == [], "shortcuts"


@pytest.mark.machine
def test_colors_follow_the_system_until_the_person_chooses(browser: Browser, chat: httpx.Client) -> None:
    is_dark = "getComputedStyle(document.body).backgroundColor === 'rgb(19, 21, 23)'"
    with opened(browser, chat, is_dark=True) as page:
        assert page.js(is_dark)
        page.click("#theme")
        assert not page.js(is_dark)
        page.reload()
        page.until("document.activeElement.id === 'text'")
        assert not page.js(is_dark), "kept"
        page.click("#open-settings")
        page.playwright.select_option("#colors", "")
        assert page.js(is_dark)
