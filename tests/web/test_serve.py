"""The server as a client sees it: shapes, streams, stops, refusals, hang-ups; over a real socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.web.dashboard_rig import until
from tests.web.rig import CONTEXT, TOKEN, Script, make_model, served

from homing.lm.data.chat import template as templates
from homing.sampling_settings import SamplingSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def chat(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> Iterator[httpx.Client]:
    """A model that learned turns and says what the script says."""
    with served(models / "sft", monkeypatch, script) as client:
        yield client


@pytest.fixture
def base(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A base model, with its own words."""
    with served(models / "pretrain", monkeypatch) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    """Every event, each one line and an empty one behind it."""
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.acceptance("X16")
def test_a_conversation_is_answered_in_openais_shape(chat: httpx.Client, script: Script) -> None:
    script.says = "Good day."
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Yes?", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "<|im_end|>"},
    ]
    body = chat.post(CHAT, json={"model": "tiny", "messages": turns, "user": "me"}).raise_for_status().json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    assert body["created"] > 1_700_000_000
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good day.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert script.prompt() == (
        "<|endoftext|><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = script.asked[-1]["ids"]
    assert ids.count(2) == 4, "words that spell a marker stay words"
    assert script.asked[-1]["stop_ids"] == [2, 0]
    assert body["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 9, "total_tokens": len(ids) + 9}


def test_chat_uses_the_template_stored_with_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    folder = make_model(tmp_path, "sft")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + ': ' + m.content + '<|pad|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    )
    with served(folder, monkeypatch, script) as client:
        client.post(CHAT, json={"messages": HELLO}).raise_for_status()
        assert script.prompt() == "<|im_start|>user: hello<|pad|><|im_start|>assistant: "
        assert script.asked[-1]["stop_ids"] == [3, 0]
        refused = client.post(CHAT, json={"messages": [{"role": "developer", "content": "x"}, *HELLO]})
    assert refused.status_code == 400
    assert "no system" in error(refused)["message"]


@pytest.mark.slow
def test_a_template_that_never_ends_is_the_requests_fault_each_time_and_the_next_one_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    monkeypatch.setattr(templates, "_RENDER_S", 0.5)
    folder = make_model(tmp_path, "sft")
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|pad|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    )
    script.says = "Yes."
    loop = [{"role": "user", "content": "loop"}]
    with served(folder, monkeypatch, script) as client:
        refusals = [client.post(CHAT, json={"messages": loop, "stream": number == 3}) for number in range(4)]
        client.post(CHAT, json={"messages": HELLO}).raise_for_status()
    assert [refused.status_code for refused in refusals] == [400] * 4, "after 500 a client would ask again"
    errors = [error(refused) for refused in refusals]
    assert {each["type"] for each in errors} == {"invalid_request_error"}
    assert {each["param"] for each in errors} == {"messages"}
    assert all("template" in each["message"] and "longer than 0.5 s" in each["message"] for each in errors)
    assert [each["code"] for each in errors[2:]] == ["chat_template_failed"] * 2
    assert not any(str(tmp_path) in each["message"] for each in errors), "its path is none of the client's business"


@pytest.mark.acceptance("X16")
def test_a_stream_is_the_same_text_in_chunks(chat: httpx.Client, script: Script) -> None:
    script.says = "Guten Tag, schöne Welt\n\n€"
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    response = chat.post(CHAT, json=body).raise_for_status()
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == script.says
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(script.says.encode())
    without = events(chat.post(CHAT, json={"messages": HELLO, "stream": True}))
    assert not any("usage" in chunk for chunk in without[:-1])


def test_a_chunk_is_one_line_to_every_client(chat: httpx.Client, script: Script) -> None:
    script.says = "one\u2028two\x85three"
    with chat.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]  # as httpx splits them
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == script.says


def test_a_temperature_of_nearly_nothing_takes_the_likeliest(chat: httpx.Client, script: Script) -> None:
    assert chat.post(CHAT, json={"messages": HELLO, "temperature": 1e-39}).status_code == 200
    assert script.asked[-1]["temperature"] == 0.0


def test_settings_reach_the_sampler_and_have_the_defaults_of_homing_chat(chat: httpx.Client, script: Script) -> None:
    given = {"max_completion_tokens": 7, "temperature": 0, "top_k": 3, "seed": 11}
    more = {"top_p": 0.9, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    chat.post(CHAT, json={"messages": HELLO, **given, **more, "logit_bias": {"7": -100}}).raise_for_status()
    asked = script.asked[-1]
    assert [asked[name] for name in ("num_tokens", "temperature", "top_k", "seed")] == [7, 0.0, 3, 11]
    assert {name: asked[name] for name in more} == more
    assert asked["logit_bias"] == {7: -100.0}
    chat.post(CHAT, json={"messages": HELLO, "temperature": None}).raise_for_status()
    asked = script.asked[-1]
    assert [asked[name] for name in ("num_tokens", "temperature", "top_k")] == [200, 0.8, 50]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", "one ENX two "),  # over several tokens, and its beginning is no end
        (["never", " two"], "one ENX"),
        ("o", ""),
        (["X tw", "ENX"], "one "),  # the first of them in the text, whichever is named first
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    chat: httpx.Client, script: Script, stop: str | list[str], text: str, is_stream: bool
) -> None:
    script.says = "one ENX two END three"
    response = chat.post(CHAT, json={"messages": HELLO, "stop": stop, "stream": is_stream}).raise_for_status()
    if is_stream:
        chunks = [event["choices"][0] for event in events(response)[:-1]]
        assert "".join(choice["delta"].get("content", "") for choice in chunks) == text
        assert chunks[-1]["finish_reason"] == "stop"
    else:
        (choice,) = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert script.closed.acquire(timeout=60), "the sampler is closed, for it may hold memory"
    assert script.num_made < len(script.says)


def test_a_text_that_ends_in_the_beginning_of_a_stop_string_is_whole(chat: httpx.Client, script: Script) -> None:
    script.says = "this is the EN"
    body = chat.post(CHAT, json={"messages": HELLO, "stop": "END"}).json()
    assert body["choices"][0]["message"]["content"] == script.says


def test_finish_reason_distinguishes_length_from_stop(chat: httpx.Client, script: Script) -> None:
    script.says = "abcdef"
    found = []
    for limit in (5, 6, 7):
        (choice,) = chat.post(CHAT, json={"messages": HELLO, "max_tokens": limit}).json()["choices"]
        found.append((choice["message"]["content"], choice["finish_reason"]))
    assert found == [("abcde", "length"), ("abcdef", "length"), ("abcdef", "stop")]


def test_an_answer_ends_where_the_context_is_full(chat: httpx.Client, script: Script) -> None:
    script.says = "x" * 1000
    body = chat.post(CHAT, json={"messages": HELLO, "max_tokens": 1000}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == CONTEXT


def test_a_prompt_that_is_too_long_is_refused(chat: httpx.Client, base_body: dict[str, Any]) -> None:
    found = chat.post(CHAT, json={"messages": [{"role": "user", "content": "x" * CONTEXT}]})
    assert (found.status_code, error(found)["code"]) == (400, "context_length_exceeded")
    found = chat.post(TEXT, json={**base_body, "prompt": "x" * (CONTEXT - 1)})
    assert found.status_code == 400
    assert chat.post(TEXT, json={**base_body, "prompt": "x" * (CONTEXT - 2)}).status_code == 200


@pytest.fixture
def base_body() -> dict[str, Any]:
    return {"max_tokens": 5, "seed": 3}


def test_a_base_model_completes_and_says_where_it_is_asked_to_talk(
    base: httpx.Client, base_body: dict[str, Any]
) -> None:
    body = base.post(TEXT, json={**base_body, "prompt": "the cat"}).raise_for_status().json()
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == 8
    assert 0 < body["usage"]["completion_tokens"] <= 5
    again = base.post(TEXT, json={**base_body, "prompt": ["the cat"]}).json()
    assert again["choices"] == body["choices"], "one seed, one text"
    stream = events(base.post(TEXT, json={**base_body, "prompt": "the cat", "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == body["choices"][0]["text"]
    assert stream[-1] == "[DONE]"
    assert base.post(TEXT, json=base_body).status_code == 200, "without a prompt it begins a document"
    refused = base.post(CHAT, json={"messages": HELLO})
    assert refused.status_code == 400
    assert "/v1/completions" in error(refused)["message"]
    assert base.get("/v1/models").json()["data"][0]["mode"] == "completion"


def test_the_same_text_as_homing_generate(base: httpx.Client, models: Path) -> None:
    from homing.lm.generate import complete, load_for_use

    model, tokenizer = load_for_use(models / "pretrain", "cpu")
    expected = "".join(complete(model, tokenizer, "a dog", num_tokens=20, sampling=SamplingSettings(seed=5)))
    found = base.post(TEXT, json={"prompt": "a dog", "max_tokens": 20, "seed": 5}).json()
    assert found["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1000}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, None),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"audio": {"voice": "alto"}}, "audio"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": 1}}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"\ud800": 1}, "\\ud800"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(
    chat: httpx.Client, script: Script, body: dict[str, Any], param: str | None
) -> None:
    found = chat.post(CHAT, content=json.dumps({"messages": HELLO, **body}))
    assert found.status_code == 400
    assert (error(found)["param"], error(found)["type"]) == (param, "invalid_request_error")
    assert script.asked == []


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b'{"temperature": NaN}']
)
def test_a_body_that_is_none_is_refused(chat: httpx.Client, raw: bytes) -> None:
    found = chat.post(CHAT, content=raw)
    assert found.status_code == 400
    assert error(found)["type"] == "invalid_request_error"


def test_a_body_without_end_is_not_read_to_its_end(chat: httpx.Client) -> None:
    from homing.web.app import MAX_BODY_BYTES

    assert chat.post(CHAT, content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413


@pytest.mark.parametrize("prompt", [["a", 1], [[]], 7, [], [1, -2], [1, 999_999], [True]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(base: httpx.Client, prompt: Any) -> None:
    found = base.post(TEXT, json={"prompt": prompt})
    assert (found.status_code, error(found)["param"]) == (400, "prompt")


def test_the_model_is_listed_and_no_other_is_here(chat: httpx.Client) -> None:
    (card,) = chat.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["mode"], card["context"]) == ("tiny", "model", "chat", CONTEXT)
    assert {name: card["defaults"][name] for name in ("max_tokens", "temperature", "top_k", "top_p")} == {
        "max_tokens": 200, "temperature": 0.8, "top_k": 50, "top_p": 1.0,
    }  # fmt: skip
    assert chat.get("/v1/models/tiny").json() == card
    for found in (chat.get("/v1/models/gpt-4"), chat.post(CHAT, json={"messages": HELLO, "model": "gpt-4"})):
        assert (found.status_code, error(found)["code"]) == (404, "model_not_found")


def test_nothing_is_answered_without_the_token(chat: httpx.Client, script: Script) -> None:
    for header in ("", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xe9"):
        for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", CHAT), ("POST", TEXT)):
            found = chat.request(method, path, headers={"Authorization": header.encode("latin-1")})
            assert (found.status_code, error(found)["code"]) == (401, "invalid_api_key")
            assert found.headers["www-authenticate"] == "Bearer"
    assert script.asked == []
    assert chat.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}


def test_a_page_of_others_cannot_lead_its_own_name_here(chat: httpx.Client) -> None:
    for path in ("/", "/health", "/v1/models"):
        assert chat.get(path, headers={"Host": "evil.example"}).status_code == 400
        assert chat.get(path, headers={"Host": "localhost:1234"}).status_code == 200
    assert "access-control-allow-origin" not in chat.get("/", headers={"Origin": "http://evil.example"}).headers


def test_what_is_not_there_is_said_in_the_same_shape(chat: httpx.Client) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("OPTIONS", CHAT, 405)):
        found = chat.request(method, path)
        assert (found.status_code, error(found)["type"]) == (status, "invalid_request_error")


def test_a_failed_text_is_reported_and_the_next_one_works(chat: httpx.Client, script: Script) -> None:
    script.says = RuntimeError("out of memory")
    found = chat.post(CHAT, json={"messages": HELLO})
    assert (found.status_code, error(found)["type"]) == (500, "server_error")
    assert "out of memory" in error(found)["message"]
    *_, last = events(chat.post(CHAT, json={"messages": HELLO, "stream": True}))
    assert "out of memory" in last["error"]["message"]
    script.says = "fine"
    assert chat.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_who_hangs_up_ends_the_text_at_the_next_token(chat: httpx.Client, script: Script) -> None:
    script.says = "x" * 200
    script.hold()
    with chat.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
        assert script.begun.acquire(timeout=60)
        script.step()
        received = ""
        for text in response.iter_text():
            received += text
            if '"content": "x"' in received:
                break
    # The connection is closed now, and no token comes before the server has noticed.
    assert script.closed.acquire(timeout=60)
    assert script.num_made <= 2, "at the next token, or before it"
    script.step(1000)
    assert chat.post(CHAT, json={"messages": HELLO}).status_code == 200


@contextmanager
def asked_of(chat: httpx.Client) -> Iterator[None]:
    """A request on a connection that is closed in the end, answered or not."""
    body = json.dumps({"messages": HELLO})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", chat.base_url.port or 0)) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        yield


def test_who_hangs_up_while_waiting_leaves_his_place(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "x" * 100
    script.hold()
    with served(models / "sft", monkeypatch, script, num_waiting=1) as client, asked_of(client):
        assert script.begun.acquire(timeout=60)
        with asked_of(client):
            assert all(script.queued.acquire(timeout=60) for _ in range(2))
            assert client.post(CHAT, json={"messages": HELLO}).status_code == 503
        assert script.given_up.acquire(timeout=60)
        script.step(1000)
        assert client.post(CHAT, json={"messages": HELLO}).status_code == 200
    assert len(script.asked) == 2, "the one that was given up was never begun"


def test_who_hangs_up_without_a_stream_is_noticed_too(chat: httpx.Client, script: Script) -> None:
    script.says = "x" * 200
    script.hold()
    with asked_of(chat):
        assert script.begun.acquire(timeout=60)
    assert script.closed.acquire(timeout=60)
    assert script.num_made == 1


def test_tokens_for_a_client_that_disconnects_are_counted(chat: httpx.Client, script: Script) -> None:
    script.says = "x" * 200
    script.hold()
    with asked_of(chat):
        assert script.begun.acquire(timeout=60)
        script.step(3)
        until(lambda: script.num_made == 3)
    assert script.closed.acquire(timeout=60)

    def counted() -> float:
        lines = chat.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("homing_generated_tokens_total")).split()[-1])

    until(lambda: counted() >= 2)


def test_one_text_at_a_time_and_a_full_queue_says_so(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "ab"
    script.hold()
    answers: list[httpx.Response] = []
    with served(models / "sft", monkeypatch, script, num_waiting=0) as client:
        first = threading.Thread(target=lambda: answers.append(client.post(CHAT, json={"messages": HELLO})))
        first.start()
        assert script.begun.acquire(timeout=60)
        full = client.post(CHAT, json={"messages": HELLO, "stream": True})
        assert (full.status_code, error(full)["code"]) == (503, "queue_full")
        assert full.headers["retry-after"]
        script.step(2)
        first.join(timeout=60)
        assert answers[0].json()["choices"][0]["message"]["content"] == "ab"


def test_texts_wait_for_one_another(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    script.says = "ab"
    script.hold()
    answers: list[int] = []

    def ask() -> None:
        answers.append(client.post(CHAT, json={"messages": HELLO}).status_code)

    with served(models / "sft", monkeypatch, script, num_waiting=2) as client:
        asking = [threading.Thread(target=ask) for _ in range(3)]
        for each in asking:
            each.start()
        for number in range(3):
            assert script.begun.acquire(timeout=60)
            assert len(script.asked) == number + 1, "the next one is begun when this one is closed"
            script.step(2)
            assert script.closed.acquire(timeout=60)
        for each in asking:
            each.join(timeout=60)
    assert answers == [200, 200, 200]


def test_the_end_of_the_server_ends_the_text(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    script.says = "x" * 200
    script.hold()
    answers: list[httpx.Response] = []
    with served(models / "sft", monkeypatch, script) as client:
        url, headers = str(client.base_url.join(CHAT)), dict(client.headers)
        body = {"messages": HELLO, "stream": True}

        def ask() -> None:  # by a client of its own: the other one is closed before the server
            answers.append(httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False))

        asking = threading.Thread(target=ask)
        asking.start()
        assert script.begun.acquire(timeout=60)
    asking.join(timeout=60)
    assert events(answers[0])[-1]["error"]["code"] == "server_ends"
    assert script.num_made == 1
