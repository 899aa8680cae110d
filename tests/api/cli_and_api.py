"""A place that is laid out twice: once to type a verb in, and once to call the function that the verb calls.

Both sides find the same files at the same path, so that only the side itself can make a difference. A set-up that takes
long (a finished run) is made once and copied; one with a live instance is made for each side.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.api.left_behind import Left, look
from tests.cli.control_rig import RUN_FILE
from tests.cloud.rig import MOSS, TRAINER, Said, clear, forget, homing, look_more_often, make_data, trainer_argv
from tests.contracts.owners import owner_for

from homing.api import FUNCTIONS
from homing.cloud.home import Home
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.providers.base import wait_until
from homing.cloud.providers.fake.cloud import Settings
from homing.cloud.providers.fake.faults import Faults
from homing.cloud.providers.fake.provider import KEY_ENV, URL_ENV
from homing.cloud.providers.fake.server import Server
from homing.store import run_key
from homing.wire import file_names
from homing.world import World

__all__ = ["Bench", "Scenario", "Trial", "function_of"]

Function = Callable[..., Any]

# Waits in step 3 until it is asked to stop, so that every live run is at the same step when a verb finds it.
_WAITING = TRAINER.replace(
    "    time.sleep(step_s)\n",
    '    while how == "wait" and step == 3 and not ask().get("stop"):\n        time.sleep(0.02)\n',
)
assert _WAITING != TRAINER

_TURNS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "On stones."}]
_CHATS = f"{json.dumps({'messages': _TURNS})}\n" * 20
_TINY = """
name: tiny
data: {text: [text/*.txt]}
tokenizer: {vocab_size: 272}
model: {arch: llama, layers: 1, width: 32, heads: 2, head_size: 16, ffn_width: 64, context: 32, tied: true}
phases:
  - {kind: pretrain, steps: 2, batch_tokens: 128, lr: 0.01, warmup_steps: 1}
train: {device: cpu, threads: 1, log_every: 1}
"""


@dataclass(frozen=True)
class Scenario:
    """The same request twice: as a person types it, and as a program makes it."""

    argv: str  # what stands after `homing VERB`; with --json the document is compared with the result
    call: Callable[[Function], object]
    place: str = "project"  # one of the set-ups of Trial
    providers: tuple[str, ...] = ("",)  # the providers on which it is tried; "" where none plays a role
    is_reading: bool = False  # it leaves everything as it was
    stdin: str = ""
    arrange: Callable[[Trial], None] | None = None  # doubles of what is not here
    marks: tuple[pytest.MarkDecorator, ...] = ()


def function_of(verb: str) -> Function:
    module, _, name = FUNCTIONS[verb].partition(":")
    found: Function = getattr(importlib.import_module(module), name)
    return found


class Bench:
    """What the trials of one module share: a folder, the copies of set-ups in it, and a fake cloud."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._cloud: Server | None = None

    @property
    def cloud(self) -> Server:
        if self._cloud is None:
            settings = Settings(settle_s=0.0, boot_s=0.0)
            self._cloud = Server(self.base / "cloud", World(), settings=settings, faults=Faults(), seed=0, port=0)
            threading.Thread(target=self._cloud.serve, args=(600.0,), daemon=True).start()
        return self._cloud

    def end(self) -> None:
        if self._cloud is not None:
            self._cloud.is_leaving = True


class Trial:
    """One verb on one provider. `by_command_line` and `by_library` lay out the same set-up and return what is left."""

    def __init__(
        self,
        bench: Bench,
        place: str,
        provider: str,
        monkeypatch: pytest.MonkeyPatch,
        capture: pytest.CaptureFixture[str],
    ) -> None:
        self.base, self.place, self.provider = bench.base, place, provider
        self.here = self.base / "here"
        self.home, self.project = self.here / "home", self.here / "project"
        self.store = f"file:{self.project}/store"
        self.monkeypatch, self._capture = monkeypatch, capture
        self.other_home = self.here / "elsewhere"
        self.outside: Callable[[], object] | None = None  # what a double of the outside holds after a verb
        self.doubles = ExitStack()
        self.before_each: Callable[[], None] = lambda: None
        self._is_waiting = False
        monkeypatch.setenv("HOMING_HOME", str(self.home))
        look_more_often(monkeypatch)
        monkeypatch.setattr("tests.cloud.rig.TRAINER", _WAITING)
        monkeypatch.setattr("homing.cloud.machine_setup.boot_files.trainer_argv", self._trainer_argv)
        if provider == "fake":
            monkeypatch.setenv(URL_ENV, f"http://127.0.0.1:{bench.cloud.port}")
            monkeypatch.setenv(KEY_ENV, bench.cloud.api_key)

    def by_command_line(self, words: str, stdin: str = "") -> tuple[Left, Left]:
        """Type `homing WORDS`. Return what was there before, and what is left after it."""
        self._lay_out()
        before = self._look([])
        said = self.type(*shlex.split(words.replace("{store}", self.store)), stdin=stdin)
        assert said.code == 0, said.err
        self._settle()
        answer = [json.loads(line) for line in said.out.splitlines()] if "--json" in words else []
        for each in answer:
            each.pop("schema")
        return before, self._look(answer)

    def by_library(self, call: Callable[[], object], *, with_answer: bool = False) -> Left:
        """Call a function and return what is left after it. It must print nothing, on whatever way."""
        self._lay_out()
        self._capture.readouterr()
        result = call()
        assert self._capture.readouterr() == ("", ""), "the library prints nothing"
        self._settle()
        answer = result.to_dict() if hasattr(result, "to_dict") else result
        answers = answer if isinstance(answer, list) else [answer]
        return self._look(json.loads(json.dumps(answers, default=str)) if with_answer else [])

    def type(self, *argv: str, stdin: str = "") -> Said:
        given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        self.monkeypatch.setattr(sys, "stdin", given)
        return homing(self._capture, self.monkeypatch, *argv)

    def end(self) -> None:
        """End what is alive, and the doubles."""
        self._clear()
        self.doubles.close()

    # --- set-ups: one method each ---

    def lay_text(self) -> None:
        (self.project / "moss.txt").write_bytes(MOSS * 50)

    def lay_project(self) -> None:
        """A run file and its prepared data."""
        (self.project / "runs").mkdir()
        cloud = f"cloud: {{providers: [{self.provider}]}}\n" if self.provider else ""
        (self.project / "runs/moss.yaml").write_text(RUN_FILE + cloud)
        (self.project / "moss.txt").write_bytes(MOSS)
        make_data(self.project / "data/moss")

    def lay_unprepared(self) -> None:
        """A run file, its text, and conversations with a tokenizer for them."""
        from tests.lm.data.chat.kit import make_tokenizer

        make_tokenizer(self.project / "tokenizer")
        (self.project / "runs").mkdir()
        (self.project / "runs/tiny.yaml").write_text(_TINY)
        (self.project / "text").mkdir()
        (self.project / "text/moss.txt").write_bytes(MOSS * 400)
        (self.project / "chats.jsonl").write_text(_CHATS)

    def lay_prepared(self) -> None:
        self._lay("unprepared")
        self._do("prep", "tiny")

    def lay_model(self) -> None:
        """A tiny model with random weights."""
        from tests.cli.trained import make_checkpoint

        make_checkpoint(self.project / "models/tiny", self.project / "data/tiny")

    def lay_export(self) -> None:
        folder = self.project / "exported"
        folder.mkdir()
        (folder / "export.json").write_text(json.dumps({"schema": "homing.export/1", "kind": "hf"}))
        (folder / "README.md").write_text("a card")
        (folder / "model.safetensors").write_bytes(b"w" * 150_000)

    def lay_finished(self) -> None:
        """A run that was launched, is done and is not fetched."""
        self.lay_project()
        self._launch()
        self._settle()

    def lay_ended(self) -> None:
        """A run that ended while no one looked: the ledger still says that it is live."""
        self.lay_project()
        self._launch()
        provider = Home(self.home, World()).provider(self.provider)
        assert wait_until(lambda: not provider.list_owned(), timeout_s=30, every_s=0.05, world=World())

    def lay_fetched(self) -> None:
        self._lay("finished")
        self._do("fetch", "moss")

    def lay_live(self) -> None:
        """A run that waits in its third step."""
        self.lay_project()
        self._is_waiting = True
        self._launch()
        self._is_waiting = False
        home = self._opened()
        (row,) = home.ledger.unfinished_runs()
        store, key = home.store_of(row), run_key(row.id, file_names.HEARTBEAT)
        assert wait_until(lambda: b'"step": 2' in store.read(key), timeout_s=30, every_s=0.05, world=World())

    def lay_live_hung(self) -> None:
        """A run whose machine hangs, so that nothing but the verb changes anything."""
        self.lay_live()
        for process, _ in World().marked(file_names.MARK_ENV, owner_prefix(self._opened().owner)):
            os.kill(process.pid, signal.SIGSTOP)

    def lay_live_over_limit(self) -> None:
        """A run that has spent more than its limit, as its ledger says."""
        self.lay_live_hung()
        home = self._opened()
        home.ledger.update(home.ledger.lines()[-1].mark, spend_usd="0.9999")

    def lay_live_forgotten(self) -> None:
        """An instance of ours that the ledger does not know."""
        self.lay_live_hung()
        forget(self.home)

    def lay_live_elsewhere(self) -> None:
        """A run of another home, whose store is here."""
        self.monkeypatch.setenv("HOMING_HOME", str(self.other_home))
        self.other_home.mkdir(mode=0o700)
        (self.other_home / "owner").write_text(owner_for(f"{__name__} elsewhere"))
        self.lay_live_hung()
        self.monkeypatch.setenv("HOMING_HOME", str(self.home))

    # --- helpers ---

    def _clear(self) -> None:
        for home in (self.home, self.other_home):
            if self.provider and (home / "owner").exists():
                clear(home, self.provider)

    def _look(self, answer: list[Any]) -> Left:
        outside = {} if self.outside is None else {"outside": self.outside()}
        return look(self.home, self.project, self.other_home, documents={"answer": answer, **outside})

    def _lay_out(self) -> None:
        """Lay out the set-up, in place of what an earlier one left."""
        self._clear()
        self.before_each()
        self.monkeypatch.chdir(self.base)
        shutil.rmtree(self.here, ignore_errors=True)
        self._is_waiting = False
        self.project.mkdir(parents=True)
        self.home.mkdir(mode=0o700)
        # The same owner on both sides, and none that a test in another process has.
        (self.home / "owner").write_text(owner_for(__name__))
        self.monkeypatch.chdir(self.project)
        self._lay(self.place)

    def _lay(self, place: str) -> None:
        """Copy a set-up; the first time, make it."""
        kept = self.base / "kept" / f"{place} {self.provider}"
        if kept.is_dir():
            shutil.copytree(kept, self.here, dirs_exist_ok=True)
            return
        getattr(self, f"lay_{place.replace(' ', '_')}")()
        if not place.startswith("live"):
            shutil.copytree(self.here, kept)

    def _launch(self) -> None:
        self._do("launch", "moss", "--spend-limit", "1", "--yes", "--set", f"store={self.store}")

    def _opened(self) -> Home:
        return Home(Path(os.environ["HOMING_HOME"]), World())

    def _do(self, *argv: str) -> None:
        said = self.type(*argv)
        assert said.code == 0, said.err

    def _trainer_argv(self, python: str, work_dir: object) -> list[str]:
        how = "wait" if self._is_waiting else "ok"
        return trainer_argv(self.base, str(work_dir), steps=12, step_s=0.0, how=how)

    def _settle(self) -> None:
        """Wait for the end of runs that will end, so that both sides are looked at in the same state."""
        if self.place.startswith("live") or not (self.home / "ledger.sqlite").exists():
            return
        for row in Home(self.home, World()).ledger.unfinished_runs():
            self.type("watch", row.id)
