"""Clients that send too much or too slowly: the server refuses or closes them, and keeps answering the others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.web.dashboard_rig import Messages
from tests.web.rig import CONTEXT, Script, served

from homing.web.dashboard.dashboard_app import make_app
from homing.web.model_session import GenerationSession
from homing.web.threaded_server import Server, hosts_for, listen

TEXT = "/v1/completions"
MANY = 300


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@contextmanager
def dashboard() -> Iterator[httpx.Client]:
    source, sock = Messages(), listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = Server(make_app(source, token="t" * 20, hosts=hosts_for("127.0.0.1")), sock, source.end, "test")
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            yield client
    finally:
        server.end()


def connect(client: httpx.Client, first: bytes = b"GET /health HTTP/1.1\r\nHost: local") -> socket.socket:
    sock = socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=30)
    sock.sendall(first)
    return sock


def is_closed(sock: socket.socket, timeout_s: float) -> bool:
    """Whether the server ends the connection, with an answer or without."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.regression("slow-connections")
@pytest.mark.slow
@pytest.mark.parametrize("is_dashboard", [False, True], ids=["serve", "dashboard"])
def test_connections_that_never_finish_their_headers_are_closed_and_others_are_answered(
    is_dashboard: bool, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.web.threaded_server.HEADERS_S", 2.0, raising=False)
    with ExitStack() as stack:
        client = stack.enter_context(dashboard() if is_dashboard else served(models / "pretrain", monkeypatch))
        slow = [stack.enter_context(connect(client)) for _ in range(MANY)]
        assert client.get("/health").status_code == 200, "while they are open"
        begun = time.monotonic()
        assert all(is_closed(sock, 15.0) for sock in slow)
        assert time.monotonic() - begun < 60.0
        assert client.get("/health").status_code == 200


def test_the_next_request_on_a_connection_has_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.web.threaded_server.HEADERS_S", 0.5)
    with dashboard() as client, connect(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as sock:
        answer = b""
        while b'"ok"' not in answer:  # it may come in parts
            part = sock.recv(4096)
            assert part, answer
            answer += part
        sock.sendall(b"GET /health HTT")  # from here on the keep-alive timer no longer counts
        assert is_closed(sock, 15.0)


def test_too_many_connections_close_the_oldest_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.web.threaded_server.MOST_PER_CLIENT", 5)
    with ExitStack() as stack:
        client = stack.enter_context(dashboard())
        first = stack.enter_context(connect(client))
        assert client.get("/health").status_code == 200, "so the first was taken before the others"
        others = [stack.enter_context(connect(client)) for _ in range(5)]
        assert is_closed(first, 15.0)
        assert not any(is_closed(sock, 0.2) for sock in others[-3:])
        assert client.get("/health").status_code == 200


def long_prompt() -> str:
    return "moss grows on stones " * 180_000  # 3.8 MB


@pytest.mark.regression("serve-long-prompts")
def test_a_prompt_that_cannot_fit_is_refused_without_being_encoded(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    body = json.dumps({"prompt": long_prompt()})
    with served(models / "pretrain", monkeypatch, script) as client:
        assert client.post(TEXT, json={"prompt": "moss"}).status_code == 200
        before = time.process_time()
        found = client.post(TEXT, content=body, headers={"content-type": "application/json"})
        cpu_s = time.process_time() - before
    assert found.status_code in (400, 413)
    assert cpu_s < 0.5


@pytest.mark.regression("serve-long-prompts")
def test_prompts_are_encoded_one_at_a_time_by_the_worker(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    threads: list[str] = []
    begin = GenerationSession.begin

    def noted(session: GenerationSession, *given: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return begin(session, *given)

    monkeypatch.setattr(GenerationSession, "begin", noted)
    script.says = "ab"
    with served(models / "pretrain", monkeypatch, script) as client:
        assert client.post(TEXT, json={"prompt": "moss"}).status_code == 200
    assert threads == ["homing-serve-encoder"]


def test_what_fits_by_its_bytes_and_not_by_its_tokens_is_refused_with_its_count(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    with served(models / "pretrain", monkeypatch, script) as client:
        for is_stream in (False, True):
            found = client.post(TEXT, json={"prompt": "q " * CONTEXT, "stream": is_stream})
            assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "tokens; prompt and answer must fit in the context of 256" in found.json()["error"]["message"]
    assert not script.asked


def test_a_body_without_its_length_is_counted_as_it_comes(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    with served(models / "pretrain", monkeypatch, script) as client:
        chunks = (b"x" * 65536 for _ in range(80))
        found = client.post(TEXT, content=chunks)
    assert found.status_code == 413


def test_encoding_stops_between_two_parts_when_no_client_waits(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from homing.lm.generate import load_for_use
    from homing.web import model_session as session_module

    monkeypatch.setattr(session_module, "_FIRST_PART", 8)
    session = GenerationSession(*load_for_use(models / "pretrain", "cpu"), models / "pretrain")
    asked: list[bool] = []

    def is_wanted() -> bool:
        asked.append(True)
        return len(asked) < 2

    with pytest.raises(session_module.GivenUp):
        session.begin("moss grows on stones " * 20, is_wanted)
    assert len(asked) == 2
    whole = session.begin("moss grows on stones ", lambda: True)
    assert whole[1:] == session.tokenizer.encode("moss grows on stones ")
