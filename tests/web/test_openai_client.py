"""OpenAI's own client against the server: what its users call, and the exceptions that they catch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.web.rig import CONTEXT, TOKEN, Script, served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def client_of(server: httpx.Client, **settings: Any) -> OpenAI:
    return OpenAI(**{"base_url": f"{server.base_url}/v1", "api_key": TOKEN, "max_retries": 0, **settings})


@pytest.fixture
def chat(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> Iterator[OpenAI]:
    """Of a model that learned turns and says what the script says."""
    with served(models / "sft", monkeypatch, script) as server, client_of(server) as client:
        yield client


@pytest.fixture
def base(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAI]:
    """Of a base model, with its own words."""
    with served(models / "pretrain", monkeypatch) as server, client_of(server) as client:
        yield client


@pytest.mark.acceptance("X16")
def test_two_variables_are_all_it_needs(models: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    script.says = "good morning"
    with served(models / "sft", monkeypatch, script) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.base_url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
        with OpenAI() as client:
            (model,) = client.models.list()
            assert client.models.retrieve(model.id) == model
            answer = client.chat.completions.create(model=model.id, messages=HELLO)
    assert answer.choices[0].message.content == "good morning"


def test_an_answer_is_the_same_whole_and_streamed(chat: OpenAI, script: Script) -> None:
    script.says = "Grüße, €\nand all"
    whole = chat.chat.completions.create(model="tiny", messages=HELLO)
    chunks = [*chat.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )]  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == script.says
    assert whole.choices[0].message.content == script.says
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_the_streaming_helper_puts_the_answer_together(chat: OpenAI, script: Script) -> None:
    script.says = "one two three"
    with chat.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == script.says
    assert kinds.count("content.delta") > 1
    assert kinds[-1] == "content.done"


def test_its_own_answer_may_be_part_of_the_next_question(chat: OpenAI, script: Script) -> None:
    script.says = "fine"
    answer = chat.chat.completions.create(model="tiny", messages=HELLO).choices[0].message
    parts: list[Any] = [{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}]
    chat.chat.completions.create(model="tiny", messages=[*HELLO, answer, {"role": "user", "content": parts}])
    assert "fine" in script.prompt()
    assert "and now?" in script.prompt()


def test_limits_stops_and_settings_are_kept_to(chat: OpenAI, script: Script) -> None:
    script.says = "one two three"
    ask = chat.chat.completions.create
    cut = ask(model="tiny", messages=HELLO, max_completion_tokens=3).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "one")
    assert ask(model="tiny", messages=HELLO, max_tokens=3).choices[0] == cut
    stopped = ask(model="tiny", messages=HELLO, stop=["three", " two"]).choices[0]
    assert (stopped.finish_reason, stopped.message.content) == ("stop", "one")
    ask(model="tiny", messages=HELLO, temperature=0, seed=7, n=1, top_p=1.0, user="me", extra_body={"top_k": 3})
    assert {name: script.asked[-1][name] for name in ("temperature", "seed", "top_k")} == {
        "temperature": 0.0, "seed": 7, "top_k": 3,
    }  # fmt: skip


def test_a_base_model_completes_and_a_seed_says_the_same_again(base: OpenAI) -> None:
    texts = [base.completions.create(model="tiny", prompt="the", max_tokens=20, seed=seed) for seed in (3, 3, 4)]
    assert texts[0].choices[0].text == texts[1].choices[0].text != texts[2].choices[0].text
    chunks = base.completions.create(model="tiny", prompt="the", max_tokens=20, seed=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0].choices[0].text


def test_each_refusal_is_the_exception_that_its_users_catch(chat: OpenAI, base: OpenAI, script: Script) -> None:
    ask = chat.chat.completions.create
    with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
        chat.with_options(api_key="another").models.list()
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as no_model:
        ask(model="gpt-4", messages=HELLO)
    assert no_model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=f"must fit in the context of {CONTEXT} tokens") as too_long:
        ask(model="tiny", messages=[{"role": "user", "content": "word " * CONTEXT}])
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="does not support functions"):
        ask(model="tiny", messages=HELLO, functions=[{"name": "f"}])
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        ask(model="tiny", messages=HELLO, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="Use /v1/completions"):
        base.chat.completions.create(model="tiny", messages=HELLO)
    assert script.asked == []


def test_a_part_of_the_api_that_is_not_here_is_said_with_what_is(chat: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/responses: Not Found.*POST /v1/chat/completions"):
        chat.responses.create(model="tiny", input="hello")
    without_v1 = str(chat.base_url).removesuffix("v1/")
    with pytest.raises(openai.NotFoundError, match=r"GET /models: Not Found.*GET /v1/models"):
        chat.with_options(base_url=without_v1).models.list()


def test_what_fails_in_the_middle_is_no_whole_answer(chat: OpenAI, script: Script) -> None:
    script.says = RuntimeError("out of memory")
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        chat.chat.completions.create(model="tiny", messages=HELLO)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(chat.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_raw_answers_have_their_headers(chat: OpenAI, script: Script) -> None:
    script.says = "raw"
    raw = chat.chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.parse().choices[0].message.content == "raw"
    with chat.chat.completions.with_streaming_response.create(model="tiny", messages=HELLO, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert [*response.iter_lines()][-2:] == ["data: [DONE]", ""]


def test_two_at_a_time_are_both_answered(chat: OpenAI, script: Script) -> None:
    script.says = "both"

    async def ask_two() -> list[Any]:
        async with AsyncOpenAI(base_url=str(chat.base_url), api_key=TOKEN, max_retries=0) as client:
            asked = [client.chat.completions.create(model="tiny", messages=HELLO) for _ in range(2)]
            return [*await asyncio.gather(*asked)]

    assert [answer.choices[0].message.content for answer in asyncio.run(ask_two())] == ["both"] * 2


def test_leaving_a_stream_cancels_the_text_and_a_timeout_is_reported(chat: OpenAI, script: Script) -> None:
    script.says = "x" * 200
    script.hold()
    with chat.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        script.step()
        assert next(chunk for chunk in stream if chunk.choices[0].delta.content)
    assert script.closed.acquire(timeout=60)
    with pytest.raises(openai.APITimeoutError):
        chat.with_options(timeout=0.2).chat.completions.create(model="tiny", messages=HELLO)
    assert script.num_made < 5


def test_a_full_queue_is_an_error_after_which_it_waits_and_asks_again(
    models: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    script.says = "ab"
    script.hold()
    answers: list[Any] = []
    with served(models / "sft", monkeypatch, script, num_waiting=0) as server, client_of(server) as client:

        def ask() -> None:
            answers.append(client.chat.completions.create(model="tiny", messages=HELLO))

        first = threading.Thread(target=ask)
        first.start()
        assert script.begun.acquire(timeout=60)
        with pytest.raises(openai.InternalServerError, match="Too many requests are queued") as full:
            ask()
        assert full.value.response.headers["retry-after"] == "5", "for this long, where it may try again"
        script.step(1000)
        first.join(timeout=60)
    assert [answer.choices[0].message.content for answer in answers] == ["ab"]
