"""Code as people write it with OpenAI's client: async, streams that are left early, raw responses, retries, parsing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.web.rig import TOKEN, Script, make_model, served
from tests.web.test_openai_client import HELLO, client_of

from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE

Found = TypeVar("Found")
USED: Any = {"include_usage": True}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("usual")
    for phase in ("pretrain", "sft"):
        make_model(folder, phase, context=1024)
    (folder / "models" / "sft" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder / "models"


@pytest.fixture(scope="module")
def servers(folders: Path) -> Iterator[dict[str, httpx.Client]]:
    """With models that say what they say: a base model and a chat model."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NO_PROXY", "127.0.0.1")
    with served(folders / "pretrain", patch) as base, served(folders / "sft", patch) as chat:
        yield {"base": base, "chat": chat}
    patch.undo()


@pytest.fixture
def scripted(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[httpx.Client, Script]]:
    """A chat model that says what the script says."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    script = Script(monkeypatch)
    with served(folders / "sft", monkeypatch, script) as server:
        yield server, script


@asynccontextmanager
async def async_client(server: httpx.Client, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        **{"base_url": f"{server.base_url}/v1", "api_key": TOKEN, "max_retries": 0, **settings}
    ) as it:
        yield it


def with_client(server: httpx.Client, use: Callable[[AsyncOpenAI], Awaitable[Found]], **settings: Any) -> Found:
    async def run() -> Found:
        async with async_client(server, **settings) as client:
            return await use(client)

    return asyncio.run(run())


# --- async, each route ---


def test_async_chat_whole_and_streamed_are_the_same(servers: dict[str, httpx.Client]) -> None:
    async def use(client: AsyncOpenAI) -> tuple[Any, list[Any]]:
        settings: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 3}
        whole = await client.chat.completions.create(**settings)
        stream = await client.chat.completions.create(**settings, stream=True, stream_options=USED)
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_client(servers["chat"], use)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_async_completions_whole_and_streamed_are_the_same(servers: dict[str, httpx.Client]) -> None:
    async def use(client: AsyncOpenAI) -> tuple[Any, list[Any]]:
        settings: Any = {"model": "tiny", "prompt": "the cat", "max_tokens": 12, "seed": 3}
        whole = await client.completions.create(**settings)
        return whole, [chunk async for chunk in await client.completions.create(**settings, stream=True)]

    whole, chunks = with_client(servers["base"], use)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_async_embeddings_and_models(servers: dict[str, httpx.Client]) -> None:
    async def use(client: AsyncOpenAI) -> None:
        listed = [model async for model in await client.models.list()]
        assert [await client.models.retrieve(model.id) for model in listed] == listed
        one, both = await asyncio.gather(
            client.embeddings.create(model="tiny", input="the cat"),
            client.embeddings.create(model="tiny", input=["a dog", "the cat"]),
        )
        assert both.data[1].embedding == one.data[0].embedding != both.data[0].embedding
        assert [each.index for each in both.data] == [0, 1]

    with_client(servers["base"], use)


def test_the_async_streaming_helper(scripted: tuple[httpx.Client, Script]) -> None:
    server, script = scripted
    script.says = "one two three"

    async def use(client: AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            return deltas, await stream.get_final_completion()

    deltas, final = with_client(server, use)
    assert "".join(deltas) == final.choices[0].message.content == "one two three"
    assert len(deltas) > 1


def test_twenty_requests_at_once_of_all_kinds(servers: dict[str, httpx.Client]) -> None:
    async def use(client: AsyncOpenAI) -> list[Any]:
        def complete(seed: int) -> Any:
            return client.completions.create(model="tiny", prompt="the cat", max_tokens=10, seed=seed)

        asked = [complete(seed) for seed in range(10)] * 1
        asked += [client.embeddings.create(model="tiny", input=f"text {number}") for number in range(5)]
        asked += [complete(seed) for seed in range(5)]
        return [*await asyncio.gather(*asked)]

    found = with_client(servers["base"], use)
    assert len(found) == 20
    assert [each.choices[0].text for each in found[:5]] == [each.choices[0].text for each in found[15:]]


def test_twenty_streams_at_once_do_not_mix(servers: dict[str, httpx.Client]) -> None:
    async def stream(client: AsyncOpenAI, seed: int) -> str:
        chunks = await client.completions.create(model="tiny", prompt="a dog", max_tokens=20, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def use(client: AsyncOpenAI) -> list[str]:
        return [*await asyncio.gather(*[stream(client, seed % 10) for seed in range(20)])]

    found = with_client(servers["base"], use)
    assert found[:10] == found[10:]


def test_a_break_out_of_an_async_stream_ends_the_text(scripted: tuple[httpx.Client, Script]) -> None:
    server, script = scripted
    script.says = "x" * 200
    script.hold()

    async def use(client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        async with stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
                script.step()

    with_client(server, use)
    assert script.closed.acquire(timeout=60)
    assert script.num_made < 5


def test_a_cancelled_task_ends_the_text(scripted: tuple[httpx.Client, Script]) -> None:
    server, script = scripted
    script.says = "x" * 200
    script.hold()

    async def use(client: AsyncOpenAI) -> None:
        task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO))
        assert await asyncio.to_thread(script.begun.acquire, True, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_client(server, use)
    assert script.closed.acquire(timeout=60)


# --- options of the client ---


def test_with_raw_response_on_each_route(servers: dict[str, httpx.Client]) -> None:
    with client_of(servers["base"]) as base, client_of(servers["chat"]) as chat:
        raw: list[Any] = [
            base.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=2),
            base.embeddings.with_raw_response.create(model="tiny", input="x"),
            base.models.with_raw_response.list(),
            chat.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=2),
        ]
    assert [each.status_code for each in raw] == [200] * 4
    assert {each.headers["content-type"] for each in raw} == {"application/json"}
    assert [each.parse().object for each in raw] == ["text_completion", "list", "list", "chat.completion"]


def test_with_options_timeout_ends_the_request_here_and_there(scripted: tuple[httpx.Client, Script]) -> None:
    server, script = scripted
    script.says = "x" * 200
    script.hold()
    with client_of(server) as client, pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=HELLO)
    assert script.closed.acquire(timeout=60), "the server stops generating what no one waits for"


def test_a_status_of_503_is_tried_again(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the client does by default; here without its pause."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    script = Script(monkeypatch)
    script.says = "ab"
    script.hold()
    refused = threading.Event()

    def pause(client: OpenAI, *_: Any, **__: Any) -> None:
        refused.set()
        assert script.closed.acquire(timeout=60)  # in place of Retry-After: until the first request is done

    monkeypatch.setattr(OpenAI, "_sleep_for_retry", pause)
    answers: list[str] = []
    with (
        served(folders / "sft", monkeypatch, script, num_waiting=0) as server,
        client_of(server, max_retries=2) as client,
    ):

        def ask() -> None:
            answer = client.chat.completions.create(model="tiny", messages=HELLO)
            answers.append(answer.choices[0].message.content or "")

        first = threading.Thread(target=ask)
        first.start()
        assert script.begun.acquire(timeout=60)
        second = threading.Thread(target=ask)
        second.start()
        assert refused.wait(60)
        script.step(1000)
        first.join(60)
        second.join(60)
    assert answers == ["ab", "ab"]


def test_extra_headers_and_query_do_not_matter(servers: dict[str, httpx.Client]) -> None:
    with client_of(servers["base"], default_headers={"x-request-source": "test"}) as client:
        answer = client.completions.create(
            model="tiny", prompt="x", max_tokens=2, extra_headers={"x-trace": "1"}, extra_query={"a": "b"}, user="me"
        )
    assert answer.choices[0].finish_reason in ("length", "stop")


# --- structured answers and tools ---


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parse_returns_an_object_of_pydantic(servers: dict[str, httpx.Client], seed: int) -> None:
    with client_of(servers["chat"]) as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Person, max_tokens=400, seed=seed
        )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert 0 <= parsed.age <= 99


def test_async_parse(servers: dict[str, httpx.Client]) -> None:
    async def use(client: AsyncOpenAI) -> list[Any]:
        asked = [
            client.chat.completions.parse(
                model="tiny", messages=HELLO, response_format=Person, max_tokens=400, seed=seed
            )
            for seed in range(4)
        ]
        return [answer.choices[0].message.parsed for answer in await asyncio.gather(*asked)]

    assert all(isinstance(each, Person) for each in with_client(servers["chat"], use))


def test_a_streamed_answer_is_parsed_at_its_end(servers: dict[str, httpx.Client]) -> None:
    settings: Any = {"model": "tiny", "messages": HELLO, "response_format": Person, "max_tokens": 400, "seed": 5}
    with client_of(servers["chat"]) as client, client.chat.completions.stream(**settings) as stream:
        assert "content.done" in [event.type for event in stream]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_a_loop_with_tools_ends_with_an_answer(scripted: tuple[httpx.Client, Script]) -> None:
    """Ask, call what the model asks for, send the result back: until it answers in words."""
    server, script = scripted
    tool: Any = openai.pydantic_function_tool(Person, name="remember")
    del tool["function"]["strict"]
    messages: list[Any] = [*HELLO]
    said = ['<tool_call>{"name": "remember", "arguments": {"name": "Moss", "age": 9}}</tool_call>', "I know Moss now."]
    remembered: list[Person] = []
    with client_of(server) as client:
        for text in said:
            script.says = text
            choice = client.chat.completions.create(model="tiny", messages=messages, tools=[tool]).choices[0]
            messages.append(choice.message)
            for call in choice.message.tool_calls or []:
                assert call.type == "function"
                remembered.append(Person.model_validate_json(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"ok": True})})
    assert remembered == [Person(name="Moss", age=9)]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "I know Moss now."


# --- streams ---


@pytest.mark.parametrize("is_chat", [True, False])
def test_logprobs_in_a_stream_are_those_of_the_whole_answer(servers: dict[str, httpx.Client], is_chat: bool) -> None:
    with client_of(servers["chat" if is_chat else "base"]) as client:
        if is_chat:
            settings: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "seed": 2, "logprobs": True}
            settings["top_logprobs"] = 3
            create: Any = client.chat.completions.create
        else:
            settings = {"model": "tiny", "prompt": "the cat", "max_tokens": 9, "seed": 2, "logprobs": 3}
            create = client.completions.create
        whole = create(**settings).choices[0].logprobs
        chunks = [each.choices[0].logprobs for each in create(**settings, stream=True) if each.choices[0].logprobs]
    if is_chat:
        assert [token for chunk in chunks for token in chunk.content] == whole.content
    else:
        assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
        assert [value for chunk in chunks for value in chunk.token_logprobs] == whole.token_logprobs


def test_n_answers_in_a_stream_are_told_apart_by_their_index(servers: dict[str, httpx.Client]) -> None:
    with client_of(servers["chat"]) as client:
        settings: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "seed": 2, "n": 3}
        whole = client.chat.completions.create(**settings)
        texts, endings = [""] * 3, [""] * 3
        for chunk in client.chat.completions.create(**settings, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            endings[choice.index] = choice.finish_reason or endings[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert endings == [choice.finish_reason for choice in whole.choices]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_character_of_several_tokens_is_never_cut_in_a_stream(
    scripted: tuple[httpx.Client, Script], is_async: bool
) -> None:
    server, script = scripted
    script.says = "Grüße 👩‍🚀 日本語 €"
    assert len(script.tokenizer.encode(script.says)) > len(script.says), "characters span several tokens"

    async def use(client: AsyncOpenAI) -> list[str]:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        return [chunk.choices[0].delta.content or "" async for chunk in stream]

    if is_async:
        pieces = with_client(server, use)
    else:
        with client_of(server) as client:
            stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == script.says
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_is_read_line_by_line_without_the_client(servers: dict[str, httpx.Client]) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "stream_options": USED}
    with servers["base"].stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] <= 3
