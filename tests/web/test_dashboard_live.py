"""The feed and its streams: all at first, then what is new, over a real socket; no reader that left is waited for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.web.dashboard_rig import HERE, Messages, served, until

from homing.web.dashboard import dashboard_app as app_module
from homing.web.dashboard.access_check import OPEN
from homing.web.dashboard.section_feed import Feed


def test_a_reader_gets_everything_once_and_then_only_updates() -> None:
    feed = Feed()
    feed.put("head", {"step": 1})
    feed.add("points", [1, 2])
    place, parts = feed.since({})
    assert parts == [{"section": "head", "value": {"step": 1}}, {"section": "points", "is_new": True, "items": [1, 2]}]
    assert feed.since(place)[1] == []
    feed.put("head", {"step": 1})
    assert feed.since(place)[1] == [], "the same again is nothing new"
    feed.put("head", {"step": 2})
    feed.add("points", [3])
    place, parts = feed.since(place)
    assert parts == [{"section": "head", "value": {"step": 2}}, {"section": "points", "is_new": False, "items": [3]}]
    feed.renew("points", [1, 9])
    assert feed.since(place)[1] == [{"section": "points", "is_new": True, "items": [1, 9]}]
    assert feed.whole() == {"head": {"step": 2}, "points": [1, 9]}


def test_a_section_forgets_its_beginning_and_no_reader_misses_or_repeats_an_item() -> None:
    feed, place, seen = Feed(), {}, []
    for number in range(10):
        feed.add("log", [2 * number, 2 * number + 1], most=5)
        place, parts = feed.since(place)
        seen += parts[0]["items"]
    assert seen == list(range(20))
    assert feed.whole()["log"] == [15, 16, 17, 18, 19]
    slow, _ = feed.since({})
    feed.add("log", range(20, 40), most=5)
    assert feed.since(slow)[1][0]["items"] == [35, 36, 37, 38, 39], "one who was away for long gets what there is"


@pytest.fixture
def source() -> Messages:
    return Messages()


@pytest.fixture
def client(source: Messages) -> Iterator[httpx.Client]:
    with served(source, source.end) as client:
        yield client


def parts_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_a_stream_tells_what_is_added_while_it_is_read(client: httpx.Client, source: Messages) -> None:
    source.one.add("log trainer", ["one\u2028line\x85still"])
    with client.stream("GET", f"/api/runs/{HERE}/live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = parts_of(response)
        assert next(parts) == {"section": "log trainer", "is_new": True, "items": ["one\u2028line\x85still"]}
        source.one.add("log trainer", ["two"])
        assert next(parts) == {"section": "log trainer", "is_new": False, "items": ["two"]}
        source.one.put("head", {"state": "done"})
        assert next(parts) == {"section": "head", "value": {"state": "done"}}


def test_compared_runs_share_one_stream_without_their_logs(client: httpx.Client, source: Messages) -> None:
    source.one.add("log trainer", ["one"])
    source.one.add("events", [{"kind": "resumed"}])  # the charts of a comparison show no events
    source.one.put("head", {"state": "done"})
    with client.stream("GET", f"/api/compare/live?run={HERE}&run={HERE}") as response:
        parts = parts_of(response)
        assert next(parts) == {"run": HERE, "section": "head", "value": {"state": "done"}}
        source.one.add("log trainer", ["two"])
        source.one.add("points", [[1]])
        assert next(parts) == {"run": HERE, "section": "points", "is_new": True, "items": [[1]]}
    assert client.get("/api/compare/live").status_code == 400
    too_many = client.get("/api/compare/live?run=" + "&run=".join(map(str, range(21))))
    assert too_many.status_code == 400
    assert "1 to 20 runs, but 21 were selected" in too_many.text
    assert client.get(f"/api/compare/live?run={HERE}&run=unknown").status_code == 404
    until(lambda: source.num_open == 0)


def test_a_disconnected_reader_is_noticed_and_the_others_continue(
    client: httpx.Client, source: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    real = source._counted

    class Counted:
        def __init__(self, feed: Feed) -> None:
            self.inner = real(feed)

        def __enter__(self) -> Feed:
            return self.inner.__enter__()

        def __exit__(self, *args: Any) -> None:
            self.inner.__exit__(*args)
            left.set()

    monkeypatch.setattr(source, "_counted", Counted)
    source.all.put("money", 1)
    with client.stream("GET", "/api/runs/live") as stays:
        parts = parts_of(stays)
        assert next(parts)["value"] == 1
        with (
            httpx.Client(base_url=client.base_url, headers=client.headers, trust_env=False) as other,
            other.stream("GET", "/api/runs/live") as leaves,
        ):
            reference = parts_of(leaves)  # held: when it goes the connection goes
            next(reference)
            assert source.num_open == 2
        assert left.wait(30)
        assert source.num_open == 1
        source.all.put("money", 2)
        assert next(parts)["value"] == 2


def test_an_idle_stream_sends_keepalives(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "_QUIET_S", 0.0)
    with client.stream("GET", "/api/runs/live") as response:
        lines = response.iter_lines()
        assert next(lines) == ": homing"
        assert next(line for line in lines if line) == ": nothing new"


def test_the_server_ends_while_streams_are_read(source: Messages) -> None:
    source.all.put("money", 1)
    ended = threading.Event()
    with served(source, source.end) as client:
        response = client.send(client.build_request("GET", "/api/runs/live"), stream=True)
        parts = parts_of(response)
        next(parts)

        def read_on() -> None:
            assert list(parts) == []
            ended.set()

        reader = threading.Thread(target=read_on)
        reader.start()
        source.end()
        assert ended.wait(30), "the end of the stream, and not the end of the connection in its middle"
        reader.join()
        response.close()


def test_an_unknown_run_and_an_unknown_path_get_a_message(client: httpx.Client) -> None:
    for path in ("/api/runs/moss", "/api/runs/moss/live"):
        answer = client.get(path)
        assert (answer.status_code, "homing runs" in answer.json()["error"]["message"]) == (404, True)
    assert client.get("/api/nothing").json() == {"error": {"message": "Not Found."}}
    assert client.get(f"/api/runs/{HERE}").json() == {"schema": "homing.dashboard-run/2"}
    assert client.get("/api/runs").json() == {"schema": "homing.dashboard-runs/2"}


def test_a_silent_store_gets_a_message_and_does_not_delay_shutdown(
    client: httpx.Client, source: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.one.is_reported.clear()
    monkeypatch.setattr(app_module, "_FIRST_S", 0.0)
    answer = client.get(f"/api/runs/{HERE}")
    assert (answer.status_code, "No data" in answer.json()["error"]["message"]) == (504, True)
    monkeypatch.setattr(app_module, "_FIRST_S", 1e9)
    answers: list[httpx.Response] = []
    asker = threading.Thread(target=lambda: answers.append(client.get(f"/api/runs/{HERE}")))
    asker.start()
    until(lambda: source.num_open == 1)
    source.end()
    asker.join(30)
    assert answers[0].status_code == 503
    assert answers[0].json() == {"error": {"message": "The dashboard is shutting down."}}


def test_the_page_and_its_files_ask_for_nothing_outside(client: httpx.Client) -> None:
    page = client.get("/").text
    assert '<script src="page.js"></script>' in page
    scripts, styles = re.findall(r'<script src="(.*?)">', page), re.findall(r'stylesheet" href="(.*?)"', page)
    assert {f"/{name}" for name in (*scripts, *styles)} == set(OPEN) - {"/", "/health"}
    answers = {name: client.get(f"/{name}") for name in (*scripts, *styles)}
    for name, answer in answers.items():
        kind = "text/javascript" if name in scripts else "text/css"
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind), name
    own = page + "".join(answer.text for name, answer in answers.items() if not name.startswith("uplot"))
    addresses = [word for word in own.split("http")[1:] if word.startswith(("://", "s://"))]
    assert all(address.startswith("://www.w3.org/2000/svg") for address in addresses), addresses
    assert "innerHTML" not in own
    assert "insertAdjacentHTML" not in own
    assert "enforces no limits and destroys no instances" in page
