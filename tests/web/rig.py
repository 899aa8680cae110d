"""A real server on a loopback port, with a tiny model whose answers a test can script."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cli.trained import make_checkpoint
from tests.lm.tiny import make_data, make_run

from homing.lm.generate import load_for_use
from homing.lm.generate.batching import Listener, TextRequest
from homing.lm.generate.pick_token import Picked
from homing.web import app as server_module
from homing.web.app import serving
from homing.web.generation import Generation
from homing.web.model_session import GenerationSession
from homing.web.openai_requests import Defaults
from homing.web.threaded_server import hosts_for, listen
from homing.web.worker import Worker

TOKEN = "a-token-for-tests-only"
CONTEXT = 256


class Script:
    """In place of the sampler: what the model says, when it may say it, and what became of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: str | Exception = ""
        self.says_as: dict[str, str] = {}  # what the models with these names say instead
        self.asked: list[dict[str, Any]] = []  # ids and settings of each text that was begun
        # These two where it is held: released when a text is taken into the queue, and when one is given up.
        self.queued, self.given_up = threading.Semaphore(0), threading.Semaphore(0)
        self.begun = threading.Semaphore(0)  # released when a text is begun
        self.closed = threading.Semaphore(0)  # released when one is closed, finished or not
        self.num_made = 0
        self.steps: threading.Semaphore | None = None
        self.tokenizer: Any = None
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(
            GenerationSession, "new_batch", lambda session, max_rows, **_: ScriptedBatch(self, session.name)
        )

    def hold(self) -> None:
        """From now on a token comes only when `step` lets it, and one more after a text was given up."""
        self.steps = threading.Semaphore(0)
        cancel, submit = Generation.cancel, Worker.submit

        def cancel_and_step(generation: Generation) -> None:
            cancel(generation)
            self.step()
            self.given_up.release()

        def submit_and_record(worker: Worker, generation: Generation, lane: int = 0) -> None:
            submit(worker, generation, lane)
            self.queued.release()

        self._monkeypatch.setattr(Generation, "cancel", cancel_and_step)
        self._monkeypatch.setattr(Worker, "submit", submit_and_record)

    def step(self, count: int = 1) -> None:
        assert self.steps is not None, "hold() first"
        self.steps.release(count)

    def prompt(self, number: int = -1) -> str:
        return str(self.tokenizer.decode(self.asked[number]["ids"]))


class ScriptedBatch:
    """A batch of one row that says what the script says, one token per step."""

    max_rows, num_reused = 1, 0

    def __init__(self, script: Script, name: str = "") -> None:
        self._script, self._name = script, name
        self._waiting: deque[tuple[TextRequest, Listener]] = deque()
        self._current: tuple[TextRequest, Listener] | None = None
        self._to_say: list[int] = []

    @property
    def _says(self) -> str | Exception:
        return self._script.says_as.get(self._name, self._script.says)

    @property
    def num_active(self) -> int:
        return int(self._current is not None)

    @property
    def is_idle(self) -> bool:
        return self._current is None and not self._waiting

    def add(self, request: TextRequest, listener: Listener) -> None:
        self._waiting.append((request, listener))

    def close(self) -> None:
        self._end()

    def step(self) -> None:
        if self._current is None and not self._begin():
            return
        assert self._current is not None
        request, listener = self._current
        if not listener.is_wanted:
            self._end()
        elif isinstance(self._says, Exception):
            listener.failed(self._says)
            self._end()
        elif not self._to_say:
            # The text is complete after its last token, without one more step, if it reaches its maximum length.
            listener.ended(is_stopped=True)
            self._end()
        else:
            self._say(request, listener)

    def _begin(self) -> bool:
        while self._waiting:
            request, listener = self._waiting.popleft()
            if listener.is_wanted:
                self._current = request, listener
                settings = dataclasses.asdict(request.sampling)
                self._script.asked.append({
                    "ids": list(request.prompt_ids), "num_tokens": request.num_tokens,
                    "stop_ids": list(request.stop_ids), **settings,
                })  # fmt: skip
                says = self._says
                self._to_say = [] if isinstance(says, Exception) else self._script.tokenizer.encode(says)
                self._script.begun.release()
                return True
        return False

    def _say(self, request: TextRequest, listener: Listener) -> None:
        if self._script.steps is not None:
            self._script.steps.acquire()
        self._script.num_made += 1
        wants_more = listener.picked(Picked(self._to_say.pop(0), -0.5, ((7, -0.25),)))
        num_said = len(self._script.tokenizer.encode(str(self._says))) - len(self._to_say)
        if not wants_more or num_said == request.num_tokens:
            listener.ended(is_stopped=not wants_more)
            self._end()

    def _end(self) -> None:
        if self._current is not None:
            self._current = None
            self._script.closed.release()


def make_model(folder: Path, phase: str = "pretrain", context: int = CONTEXT) -> Path:
    data = folder / "data"
    if not data.exists():
        make_data(data, num_documents=20)
    run = make_run(data)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, context=context))
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
    also: Mapping[str, Path] | None = None,
    **settings: Any,
) -> Iterator[httpx.Client]:
    """Serve the model of a folder, and those in `also` by their names."""
    monkeypatch.setattr(server_module, "NUM_WAITING", num_waiting)
    folders = {"": folder, **(also or {})}
    sessions = [GenerationSession(*load_for_use(each, "cpu"), each, name=name) for name, each in folders.items()]
    if script is not None:
        script.tokenizer = sessions[0].tokenizer
    sock = listen("127.0.0.1", port)
    assert port in (0, sock.getsockname()[1]), "another one has taken the port"
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    hosts = hosts_for("127.0.0.1")
    with (
        serving(sessions, sock, token=token, hosts=hosts, defaults=defaults or Defaults(), **settings),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False) as client,
    ):
        yield client


@contextmanager
def served_together(
    folders: Mapping[str, Path], script: Script | None = None, *, defaults: Defaults | None = None
) -> Iterator[httpx.Client]:
    """Serve several models behind one address, under the names in `folders`. The first is the default."""
    sessions = [GenerationSession(*load_for_use(each, "cpu"), each, name=name) for name, each in folders.items()]
    if script is not None:
        script.tokenizer = sessions[0].tokenizer
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    hosts = hosts_for("127.0.0.1")
    with (
        serving(sessions, sock, token=TOKEN, hosts=hosts, defaults=defaults or Defaults()),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60, trust_env=False) as client,
    ):
        yield client
