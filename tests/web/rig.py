"""A real server on a loopback port, with a tiny model whose answers a test can script."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cli.trained import make_checkpoint
from tests.lm.tiny import make_data, make_run

from homing.lm.generate import load_for_use
from homing.web import app as server_module
from homing.web import model_session as session_module
from homing.web.app import serving
from homing.web.model_session import GenerationSession
from homing.web.openai_format import Defaults
from homing.web.threaded_server import hosts_for, listen
from homing.web.worker import Text, Worker

TOKEN = "a-token-for-tests-only"
CONTEXT = 256


class Script:
    """In the place of the sampler: what the model says, when it may say it, and what became of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: str | Exception = ""
        self.asked: list[dict[str, Any]] = []  # ids and settings of each text that was begun
        # These two where it is held: released when a text is taken into the queue, and when one is given up.
        self.queued, self.given_up = threading.Semaphore(0), threading.Semaphore(0)
        self.begun = threading.Semaphore(0)  # released when a text is begun
        self.closed = threading.Semaphore(0)  # released when one is closed, finished or not
        self.num_made = 0
        self._steps: threading.Semaphore | None = None
        self._tokenizer: Any = None
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(session_module, "generate", self._generate)

    def hold(self) -> None:
        """From now on a token comes only when `step` lets it, and one more after a text was given up."""
        self._steps = threading.Semaphore(0)
        cancel, submit = Text.cancel, Worker.submit

        def cancel_and_step(text: Text) -> None:
            cancel(text)
            self.step()
            self.given_up.release()

        def submit_and_record(worker: Worker, work: Any) -> Text:
            text = submit(worker, work)
            self.queued.release()
            return text

        self._monkeypatch.setattr(Text, "cancel", cancel_and_step)
        self._monkeypatch.setattr(Worker, "submit", submit_and_record)

    def step(self, count: int = 1) -> None:
        assert self._steps is not None, "hold() first"
        self._steps.release(count)

    def prompt(self, number: int = -1) -> str:
        return str(self._tokenizer.decode(self.asked[number]["ids"]))

    def _generate(self, model: Any, ids: list[int], *, num_tokens: int, **settings: Any) -> Iterator[int]:
        self.asked.append({"ids": ids, "num_tokens": num_tokens, **settings})
        self.begun.release()
        try:
            if isinstance(self.says, Exception):
                raise self.says
            for i in self._tokenizer.encode(self.says)[:num_tokens]:
                if self._steps is not None:
                    self._steps.acquire()
                self.num_made += 1
                yield i
        finally:
            self.closed.release()

    def speak_for(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer


def make_model(folder: Path, phase: str = "pretrain") -> Path:
    data = folder / "data"
    if not data.exists():
        make_data(data, num_documents=20)
    run = make_run(data)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, context=CONTEXT))
    return make_checkpoint(folder / "models" / phase, data, phase=phase, run=run)


def lasting_port() -> int:
    """A port for a server that comes back: below the range that the kernel assigns, so no other process takes it."""
    for port in random.sample(range(20_000, 30_000), 50):
        with listen("127.0.0.1", port) as sock:
            if sock.getsockname()[1] == port:
                return port
    raise AssertionError("fifty ports are taken")


@contextmanager
def served(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script | None = None,
    *,
    num_waiting: int = 8,
    port: int = 0,
    token: str = TOKEN,
    defaults: Defaults | None = None,
) -> Iterator[httpx.Client]:
    monkeypatch.setattr(server_module, "NUM_WAITING", num_waiting)
    model, tokenizer = load_for_use(folder, "cpu")
    if script is not None:
        script.speak_for(tokenizer)
    sock = listen("127.0.0.1", port)
    assert port in (0, sock.getsockname()[1]), "another one has taken the port"
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    hosts = hosts_for("127.0.0.1")
    with (
        serving(
            GenerationSession(model, tokenizer, folder), sock, token=token, hosts=hosts, defaults=defaults or Defaults()
        ),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False) as client,
    ):
        yield client
