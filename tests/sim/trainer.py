"""A trainer of a few lines for the simulation: writes what the real one writes, and misbehaves as configured.

    argv: trainer RUN_DIR name=value ...
    steps, step_s, save_every, keep      as in a run          crash_at, crashes    exits 1 there, this many times
    hang_at                              once, for ever       deaf=1               obeys neither control nor SIGTERM
    save_s                               a save takes so long nan_at=N             says failed and final there
    exit_s                               between its outcome and its exit, so that the outcome is pushed before the
                                         agent has amended it

It lands as the real one does: near `land_by` it saves and is done early.
"""

from __future__ import annotations

import hashlib
import json
import signal as signals
from typing import TYPE_CHECKING

from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.event_lines import Event, Metric, Outcome

if TYPE_CHECKING:
    from tests.sim.world import SimWorld

PHASE = "pretrain"
_FILES = (file_names.WEIGHTS, file_names.OPTIMIZER, file_names.STATE)


class Trainer:
    def __init__(self, world: SimWorld, argv: list[str]) -> None:
        self.world, self.dir = world, argv[0]
        self.messages = {"steps": 20.0, "step_s": 5.0, "save_every": 5.0, "keep": 2.0, "save_s": 0.5}
        self.messages.update({name: float(value) for name, value in (word.split("=") for word in argv[1:])})
        self.is_signalled = False

    def run(self) -> int:
        world, messages = self.world, self.messages
        if not messages.get("deaf"):
            world.proc.handlers[signals.SIGTERM] = self._on_term
        else:
            world.proc.handlers[signals.SIGTERM] = lambda number: None
        world.mkdir(f"{self.dir}/{file_names.CHECKPOINTS}/{PHASE}")
        begun = max(self._steps(), default=0)
        world.sim.truth.trainer_begins(world.proc, begun)  # type: ignore[attr-defined]
        self._say("resumed" if begun else "phase_started", f"from step {begun}")
        num_steps = int(messages["steps"])
        for step in range(begun + 1, num_steps + 1):
            world.sleep(messages["step_s"])
            code = self._mishap(step)
            if code is not None:
                return code
            left_s = (num_steps - step) * messages["step_s"] + 2 * messages["save_s"]
            metric = Metric(
                world.now(), PHASE, step, num_steps, step * 10, 3.0, step_s=messages["step_s"], eta_s=left_s
            )
            world.append(f"{self.dir}/{file_names.METRICS}", (codec.dumps(metric) + "\n").encode())
            is_stop, land_by = self._control()
            is_landing = land_by is not None and self._clock() + min(left_s, 2 * messages["step_s"]) > land_by
            is_last = step == num_steps
            if is_last or is_stop or is_landing or step % int(messages["save_every"]) == 0:
                self._save(step, is_final=is_last)
            if is_stop and not is_last:
                return self._end("stopped", file_names.EXIT_STOPPED, step)
            if is_landing and not is_last:
                return self._end("done", file_names.EXIT_DONE, step)
        return self._end("done", file_names.EXIT_DONE, num_steps)

    def _on_term(self, number: int) -> None:
        self.is_signalled = True

    def _mishap(self, step: int) -> int | None:
        world, messages = self.world, self.messages
        if step == messages.get("hang_at") and not world.exists(f"{self.dir}/.hung"):
            world.write(f"{self.dir}/.hung", b"")
            while True:
                world.sleep(600)
        if step == messages.get("crash_at"):
            path = f"{self.dir}/.crashes"
            count = int(world.read(path)) + 1 if world.exists(path) else 1
            world.write(path, str(count).encode())
            if count <= messages.get("crashes", 1e9):
                return 1
        if step == messages.get("nan_at"):
            return self._end("failed", file_names.EXIT_FAILED, step, is_final=True)
        return None

    def _control(self) -> tuple[bool, float | None]:
        try:
            body = json.loads(self.world.read(f"{self.dir}/{file_names.CONTROL}"))
        except (OSError, ValueError):
            body = {}
        is_stop = (bool(body.get("stop")) or self.is_signalled) and not self.messages.get("deaf")
        return is_stop, None if self.messages.get("deaf") else body.get("land_by")

    def _clock(self) -> float:
        return self.world.boottime()

    def _steps(self) -> list[int]:
        found = [
            file_names.parse_step(name) for name in self.world.listdir(f"{self.dir}/{file_names.CHECKPOINTS}/{PHASE}")
        ]
        return sorted(step for step in found if step is not None)

    def _save(self, step: int, *, is_final: bool) -> None:
        world, folder = self.world, f"{self.dir}/{file_names.CHECKPOINTS}/{PHASE}"
        temporary = f"{folder}/.partial-{step}"
        world.rmtree(temporary)
        world.mkdir(temporary)
        files = []
        for name in _FILES:
            data = f"{name} {PHASE} {step} ".encode() * 20
            world.write(f"{temporary}/{name}", data)
            files.append(FileHash(name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        world.sleep(self.messages["save_s"])
        manifest = CheckpointManifest("moss", "?", PHASE, step, step * 10, is_final, "", 1, files, world.now())
        world.write(f"{temporary}/{file_names.MANIFEST}", codec.dumps(manifest, indent=1).encode())
        if not world.exists(f"{folder}/{file_names.step_dir(step)}"):
            world.rename(temporary, f"{folder}/{file_names.step_dir(step)}")
        for name in (file_names.LATEST, file_names.BEST):
            world.write(f"{folder}/{name}", codec.dumps(Pointer(step=step)).encode())
        self._say("checkpoint_saved", f"step {step}", step)
        for old in self._steps()[: -int(self.messages["keep"])]:
            world.rmtree(f"{folder}/{file_names.step_dir(old)}")

    def _say(self, kind: str, text: str, step: int | None = None) -> None:
        event = Event(t=self.world.now(), source="trainer", kind=kind, text=text, phase=PHASE, step=step)
        self.world.append(f"{self.dir}/{file_names.EVENTS}", (codec.dumps(event) + "\n").encode())

    def _end(self, state: str, code: int, step: int, *, is_final: bool = False) -> int:
        outcome = Outcome(state, f"stand-in: {state}", code, PHASE, step, self.world.now(), is_final=is_final)
        self.world.write(f"{self.dir}/{file_names.OUTCOME}", codec.dumps(outcome).encode())
        self.world.sleep(self.messages.get("exit_s", 0.0))
        return code
