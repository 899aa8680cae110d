"""Takes the pictures of the pages in the docs: docs/images/chat-light.png, chat-dark.png and chat-phone.png.

    python tools/take_screenshots.py chat             writes the pictures in docs/images
    python tools/take_screenshots.py chat --all DIR   also photographs every state of the page, to look at

It needs chromium. A scripted model gives the answers, because no model that a test can train writes such a table. The
browser of the tests takes the pictures, so the page also passes their checks: no error on its console, and no request
to another server.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.web.browser import Browser, Page, running_browser  # noqa: E402
from tests.web.rig import TOKEN, Script, make_model, served_together  # noqa: E402

from homing.web.openai_requests import Defaults  # noqa: E402

FOLDER = ROOT / "docs" / "images"
CONTEXT = 2048
TOKENS_PER_S = 300  # fast, so that the pictures take seconds
DONE = "!document.body.classList.contains('is-running')"
QUESTIONS = {
    "How do I count the words of a text in Python?": """\
`Counter` from the standard library does it in **three lines**:

```python
from collections import Counter

text = "to be or not to be"
counts = Counter(text.split())
print(counts.most_common(3))
```

In *Hamlet*'s best known line, these are the most frequent words:

| word | count | share |
|---|--:|--:|
| to | 2 | 33% |
| be | 2 | 33% |
| or | 1 | 17% |
""",
    "Why is my small model so sure of itself?": """\
A small model has no way to say *I do not know*. Three things help:

1. **Lower the temperature** to 0.3 or less.
2. Add examples with honest answers to your chat data:
   - "I have not read that book."
   - "I am not sure."
3. Check the answers with `homing eval`.
""",
}
TEXT = """ a miller who had three sons, a mill, a donkey and a cat. The sons ground the corn, the donkey carried \
the sacks, and the cat caught the mice."""
POEM = {
    "walter-sft": """\
The sea is **wide**, the sea is old,
it keeps the sun when nights are cold.
It hums a song without an end
and calls each passing cloud a friend.""",
    "walter-rl": """\
*Grey water*, and a line of foam:
the gulls are shouting, far from home.

I stand and count the waves that break.
None of them knows what it will take.""",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=["chat"])
    parser.add_argument("--all", type=Path, metavar="DIR", help="a folder for pictures of all states")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        running_browser(Path(folder) / "browser") as browser,
    ):
        models = {phase: make_model(Path(folder), phase, CONTEXT) for phase in ("sft", "pretrain")}
        script = Script(patch)
        script.steps = Pace()
        for look, name in (("light", "chat-light"), ("dark", "chat-dark"), ("phone", "chat-phone")):
            with served_together({"walter": models["sft"]}, script, defaults=Defaults(1000)) as client:
                photograph_chat(browser, script, str(client.base_url), look, FOLDER / f"{name}.png")
        if arguments.all:
            arguments.all.mkdir(parents=True, exist_ok=True)
            for look in ("light", "dark", "phone"):
                photograph_all(browser, script, models, look, arguments.all)
    for path in sorted(FOLDER.glob("chat-*.png")):
        print(f"Wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} KB")
    return 0


def shape(look: str) -> dict[str, int | bool]:
    if look == "phone":
        return {"width": 390, "height": 844, "is_phone": True}
    return {"width": 1280, "height": 800, "is_dark": look == "dark"}


def photograph_chat(browser: Browser, script: Script, url: str, look: str, path: Path) -> None:
    questions = list(QUESTIONS.items()) if look == "dark" else list(reversed(QUESTIONS.items()))
    with browser.page(f"{url}#token={TOKEN}", **shape(look)) as page:
        for question, answer in questions:
            ask(page, script, question, answer)
            if question != questions[-1][0]:
                page.js("start_conversation()")
        save(page, path)


def ask(page: Page, script: Script, question: str, answer: str) -> None:
    script.says = answer
    page.until("document.title !== 'homing'")
    page.playwright.fill("#text", question)
    page.click("#send")
    page.until(f"document.querySelector('.said, .document') && {DONE}")


def photograph_all(browser: Browser, script: Script, models: dict[str, Path], look: str, folder: Path) -> None:
    def photograph(page: Page, name: str) -> None:
        page.screenshot(folder / f"{name}-{look}.png")

    together = {"walter-sft": models["sft"], "walter-rl": models["sft"]}
    with served_together(together, script, defaults=Defaults(1000)) as client:
        with browser.page(str(client.base_url), **shape(look)) as page:
            page.until("!document.querySelector('#login').hidden")
            photograph(page, "login")
        with browser.page(f"{client.base_url}#token={TOKEN}", **shape(look)) as page:
            page.until("document.title !== 'homing'")
            photograph(page, "empty")
            for question, answer in QUESTIONS.items():
                ask(page, script, question, answer)
            photograph(page, "long")
            page.js("document.querySelector('#log').scrollTop = 100")
            page.js("new Promise((done) => setTimeout(done, 100))")
            photograph(page, "scrolled")
            page.click("#open-settings")
            page.playwright.fill("#set-top_p", "2")
            photograph(page, "settings")
            page.playwright.fill("#set-top_p", "")
            page.press("Escape")
            page.js("document.querySelector('#help').showModal()")
            photograph(page, "help")
            page.press("Escape")
            if look == "phone":
                page.click("#open-side")
                photograph(page, "side")
                page.click("#new")
            else:
                page.click("#new")
            page.click("#compare")
            script.says_as = POEM
            ask(page, script, "Write a short poem about the sea.", "")
            script.says_as = {}
            photograph(page, "compare")
    with (
        served_together({"walter-base": models["pretrain"]}, script, defaults=Defaults(1000)) as client,
        browser.page(f"{client.base_url}#token={TOKEN}", **shape(look)) as page,
    ):
        page.until("document.title !== 'homing'")
        photograph(page, "base-empty")
        ask(page, script, "Once upon a time, there was", TEXT)
        photograph(page, "base")


class Pace(threading.Semaphore):
    """Lets the scripted model say its tokens at a steady rate."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        time.sleep(1 / TOKENS_PER_S)
        return True


def save(page: Page, path: Path) -> None:
    """Save a picture with 256 colors, which is a third of the size."""
    page.screenshot(path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main())
