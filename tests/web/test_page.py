"""The page: one file, nothing from outside, and a script that does what it says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from tests.web.rig import Script, make_model, served

HTML = files("homing.web").joinpath("page.html").read_text(encoding="utf-8")
SCRIPT = HTML.split("<script>")[1].split("</script>")[0]

# As much of a browser as the page asks for. Prints what stands in the log in the end.
BROWSER = """
const parts = {};
function part() {
  return { hidden: true, disabled: false, value: "", textContent: "", className: "", title: "",
    listeners: {}, inside: [], append(each) { this.inside.push(each); }, replaceChildren() { this.inside = []; },
    remove() { this.gone = true; },
    addEventListener(name, call) { this.listeners[name] = call; }, focus() {}, scrollIntoView() {} };
}
globalThis.document = { getElementById: (id) => parts[id] ??= part(), createElement: part, title: "" };
const kept = {};
globalThis.sessionStorage = { getItem: (key) => kept[key] ?? null, setItem: (key, value) => { kept[key] = value; } };
const [url, token, script, words] = JSON.parse(require("fs").readFileSync(0, "utf-8"));
globalThis.location = { hash: token ? "#token=" + token : "", pathname: "/" };
const addresses = [];
globalThis.history = { replaceState: (state, title, path) => addresses.push(path) };
const outside = fetch, calls = [];
globalThis.fetch = (path, options) => { calls.push(outside(url + "/" + path, options)); return calls.at(-1); };
async function until(is_so) { while (!is_so()) await new Promise((go) => setImmediate(go)); }
(async () => {
  (0, eval)(script);
  const ask = document.getElementById("ask"), send = document.getElementById("send");
  const note = document.getElementById("note");
  await until(() => note.textContent || !token);
  if (words.length > 1) document.getElementById("temperature").value = "0.5";
  for (const text of words) {
    document.getElementById("text").value = text;
    ask.listeners.submit({ preventDefault() {} });
    await until(() => !send.disabled);
  }
  const log = document.getElementById("log").inside.filter((each) => !each.gone);
  const shown = log.map((each) => [each.className, each.textContent]);
  console.log(JSON.stringify({ shown, note: note.textContent, asks: !ask.hidden, addresses, title: document.title }));
  process.exit(0);
})();
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> Iterator[httpx.Client]:
    with served(make_model(tmp_path, "sft"), monkeypatch, script) as client:
        yield client


def browse(client: httpx.Client, words: list[str], token: str | None = None) -> dict[str, object]:
    node = shutil.which("node")
    if node is None or int(subprocess.check_output([node, "-p", "process.versions.node"]).split(b".")[0]) < 18:
        pytest.skip("node 18 or newer is not here")
    token = client.headers["Authorization"].split()[1] if token is None else token
    given = json.dumps([str(client.base_url).rstrip("/"), token, SCRIPT, words])
    done = subprocess.run([node, "-e", BROWSER], input=given, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout))


def test_what_is_hidden_is_not_shown_by_another_rule() -> None:
    # A rule of the page's own beats the browser's for `hidden`, unless it says so itself.
    assert "[hidden] { display: none !important; }" in HTML


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


def test_it_talks_in_turns_and_takes_the_token_from_the_address(chat: httpx.Client, script: Script) -> None:
    script.says = "<b>Grüße</b>\n\n€"
    found = browse(chat, ["one", "two"])
    assert found["shown"] == [["turn user", "one"], ["turn model", script.says], ["turn user", "two"],
                              ["turn model", script.says]]  # fmt: skip
    assert (found["asks"], found["title"], found["addresses"]) == (True, "tiny", ["/"])
    assert script.prompt().count("Grüße") == 1, "the second question comes with the first and its answer"
    assert [script.asked[0][name] for name in ("temperature", "num_tokens")] == [0.5, 200]


def test_what_goes_wrong_is_shown(chat: httpx.Client, script: Script) -> None:
    script.says = RuntimeError("out of memory")
    (_, (kind, text)) = browse(chat, ["one"])["shown"]  # type: ignore[misc]
    assert kind == "turn error"
    assert "out of memory" in text
    found = browse(chat, [], token="wrong")
    assert found["asks"] is False
    assert "token is missing or wrong" in str(found["note"])


def test_a_base_model_goes_on_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    script.says = " sat"
    with served(make_model(tmp_path), monkeypatch, script) as client:
        found = browse(client, ["the cat"])
    assert found["shown"] == [["turn user", "the cat"], ["turn model", "the cat sat"]]
    assert "never taught to answer" in str(found["note"])
