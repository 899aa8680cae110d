"""Several models behind one address, and the time limit of a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.cli.trained import make_checkpoint
from tests.web.rig import Script, make_model, served
from tests.web.test_openai_client import HELLO, client_of

from homing.web.generation import Generation
from homing.web.worker import QueueFull, Worker


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A base model, another checkpoint of it, and a chat model with a shorter context."""
    folder, patch = tmp_path_factory.mktemp("several"), pytest.MonkeyPatch()
    base = make_model(folder)
    later = make_checkpoint(folder / "models" / "later", folder / "data", step=400, seed=5)
    chat = make_model(folder, "sft", context=64)
    with served(base, patch, also={"tiny:step-400": later, "talker": chat}) as client:
        yield client
    patch.undo()


def test_all_models_are_listed_and_the_first_is_the_default(three: httpx.Client) -> None:
    cards = three.get("/v1/models").json()["data"]
    found = [(card["id"], card["mode"], card["context"], card["phase"], card["step"]) for card in cards]
    assert found == [
        ("tiny", "completion", 256, "pretrain", 12),
        ("tiny:step-400", "completion", 32, "pretrain", 400),
        ("talker", "chat", 64, "sft", 12),
    ]
    assert three.get("/v1/models/tiny:step-400").json() == cards[1]
    body = {"prompt": "the cat", "max_tokens": 8, "seed": 1}
    texts = [
        three.post("/v1/completions", json=body | extra).json()["choices"][0]["text"]
        for extra in ({}, {"model": None}, {"model": "tiny"}, {"model": "tiny:step-400"})
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_each_model_answers_on_its_own_terms(three: httpx.Client) -> None:
    with client_of(three) as client:
        answer = client.chat.completions.create(model="talker", messages=HELLO, max_tokens=4)
        assert answer.model == "talker"
        with pytest.raises(openai.BadRequestError, match="base model"):
            client.chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="context of 64 tokens"):
            client.chat.completions.create(model="talker", messages=[{"role": "user", "content": "word " * 64}])
        vectors = [client.embeddings.create(model=name, input="the cat") for name in ("tiny", "tiny:step-400")]
        assert vectors[0].data[0].embedding != vectors[1].data[0].embedding
        assert vectors[1].model == "tiny:step-400"


def test_an_unknown_model_is_refused_with_the_names_of_all(three: httpx.Client) -> None:
    with client_of(three) as client:
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'tiny:step-400', 'talker'") as caught:
            client.completions.create(model="tiny:step-500", prompt="x")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="Unknown model 'unknown'"):
            client.models.retrieve("unknown")
        with pytest.raises(openai.NotFoundError, match="Unknown model"):
            client.embeddings.create(model="unknown", input="x")


def test_health_and_metrics_cover_all_models(three: httpx.Client) -> None:
    three.post("/v1/completions", json={"prompt": "x", "model": "tiny:step-400", "max_tokens": 3}).raise_for_status()
    assert three.get("/health").json() == {"status": "ok"}
    lines = three.get("/metrics").text.splitlines()
    for name in ("tiny", "tiny:step-400", "talker"):
        for metric in ("active_texts", "waiting_texts", "generated_tokens_total", "timed_out_requests_total"):
            assert any(line.startswith(f'homing_{metric}{{model="{name}"}}') for line in lines), (metric, name)


class EndlessBatch:
    """A batch that counts its steps once the other model has a text too. Its texts never end by themselves."""

    max_rows, num_reused = 2, 0

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.listeners, self.other = log, name, list[Any](), self

    @property
    def num_active(self) -> int:
        return len(self.listeners)

    @property
    def is_idle(self) -> bool:
        return not self.listeners

    def add(self, request: Any, listener: Any) -> None:
        self.listeners.append(listener)

    def step(self) -> None:
        self.listeners = [each for each in self.listeners if each.is_wanted]
        if self.listeners and (self.other.listeners or self.log):
            self.log.append(self.name)
        if len(self.log) >= 40:
            for each in self.listeners:
                each.generation.cancel()

    def close(self) -> None:
        self.listeners = []


class Text:
    """A listener, as the worker finds it in a generation."""

    def __init__(self, generation: Any) -> None:
        self.generation, self.is_over = generation, False

    @property
    def is_wanted(self) -> bool:
        return bool(self.generation.is_wanted)


def test_a_model_with_a_full_queue_does_not_keep_another_one_from_its_turn() -> None:
    log, both = list[str](), threading.Event()

    def prepare(name: str, generation: Any) -> list[Any]:
        both.wait(10)  # until the requests of both models are queued
        generation.choices.append(Text(generation))
        return [name]

    async def ask() -> None:
        batches: Any = [EndlessBatch(log, "busy"), EndlessBatch(log, "quiet")]
        batches[0].other, batches[1].other = batches[1], batches[0]
        worker = Worker(batches, num_waiting=4)
        for _ in range(6):
            worker.submit(Generation(partial(prepare, "busy"), num_texts=1), 0)
        with pytest.raises(QueueFull):
            worker.submit(Generation(partial(prepare, "busy"), num_texts=1), 0)
        quiet = Generation(partial(prepare, "quiet"), num_texts=1)
        worker.submit(quiet, 1)
        both.set()
        async with asyncio.timeout(60):
            await quiet.accepted()
            assert [event async for event in quiet] == []
        await asyncio.to_thread(worker.close)

    asyncio.run(ask())
    assert abs(log.count("quiet") - log.count("busy")) <= 2, "they take turns"


# --- the time limit of a request ---


class Clock:
    """A clock that jumps past the time limit as soon as `is_late` says so."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_late: Callable[[], bool] = lambda: False

    def __call__(self) -> float:
        self.num_calls += 1
        return 100.0 if self.is_late() else 0.0


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[httpx.Client, Script, Clock]]:
    script, clock = Script(monkeypatch), Clock()
    script.says = "one two three four"
    with served(make_model(tmp_path, "sft"), monkeypatch, script, request_timeout_s=60.0, clock=clock) as server:
        yield server, script, clock


def timeouts(server: httpx.Client) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("homing_timed_out_requests_total")).split()[-1])


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_ends_at_its_time_limit_with_the_text_so_far(
    late: tuple[httpx.Client, Script, Clock], is_stream: bool
) -> None:
    server, script, clock = late
    clock.is_late = lambda: script.num_made >= 4
    with client_of(server) as client:
        answer: Any = client.chat.completions.create(model="tiny", messages=HELLO, stream=is_stream)
        choices = [chunk.choices[0] for chunk in answer] if is_stream else answer.choices
    text = "".join((each.delta.content or "") if is_stream else each.message.content for each in choices)
    assert 0 < len(text) < len("one two three four")
    assert choices[-1].finish_reason == "length"
    assert timeouts(server) == 1


def test_a_request_whose_time_is_over_before_its_first_token_may_be_tried_again(
    late: tuple[httpx.Client, Script, Clock],
) -> None:
    server, script, clock = late
    clock.is_late = lambda: clock.num_calls > 1  # right after the deadline was computed
    with client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="time limit") as caught:
            client.chat.completions.create(model="tiny", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "timeout")
        assert timeouts(server) == 1
        clock.is_late = lambda: False
        script.says = "fine"
        answer = client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "fine"
    assert timeouts(server) == 1


def test_a_time_limit_in_the_body_is_refused_with_where_to_set_it(three: httpx.Client) -> None:
    response = three.post("/v1/completions", json={"prompt": "x", "timeout": 5})
    assert response.status_code == 400
    assert "--request-timeout" in response.json()["error"]["message"]


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_embeddings_have_a_time_limit_while_they_are_encoded_and_while_they_wait(
    late: tuple[httpx.Client, Script, Clock], num_calls: int
) -> None:
    server, _, clock = late
    # The clock is read for the deadline, before the encoding of each text, and before the turn of each text.
    clock.is_late = lambda: clock.num_calls > num_calls
    with client_of(server) as client, pytest.raises(openai.InternalServerError, match="time limit after") as caught:
        client.embeddings.create(model="tiny", input=["one", "two"])
    assert caught.value.code == "timeout"
    assert f"after {num_calls // 3} of its 2 embeddings" in str(caught.value)
    assert timeouts(server) == 1
