"""A trainer of a few lines: writes what the real one writes, and misbehaves as configured.

    python trainer.py RUN_DIR [name=value ...]

steps, step_s      how long it runs           save_every   a checkpoint every N steps, and at the end
crash_at           exits 1 at this step       crashes      how often (counted in RUN_DIR/../crashes); default always
hang_at            sleeps for ever, once      deaf=1       obeys neither control.json nor SIGTERM
silent=1           writes no metrics          bad_exit     outcome.json says failed and final at this step
lost_at            from this step on the loss is no number
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.event_lines import Event, Metric, Outcome


def write_checkpoint(run_dir: Path, phase: str, step: int, *, is_final: bool = False, size: int = 2000) -> Path:
    """Write a complete checkpoint with made-up content, as the real trainer does: manifest last, then rename."""
    folder = run_dir / file_names.CHECKPOINTS / phase
    temporary = folder / f".partial-{step}"
    temporary.mkdir(parents=True, exist_ok=True)
    files = []
    for name in (
        file_names.WEIGHTS,
        file_names.OPTIMIZER,
        file_names.STATE,
        file_names.RUN,
        file_names.TOKENIZER,
        "config.json",
    ):
        data = f"{name} {phase} {step} ".encode() * size
        (temporary / name).write_bytes(data)
        files.append(FileHash(name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    manifest = CheckpointManifest(
        run_name="amber", run_id="amber-1", phase=phase, step=step, num_tokens=step * 10, is_final=is_final,
        config_sha256="", seed=1, files=files, made_at=time.time(),
    )  # fmt: skip
    (temporary / file_names.MANIFEST).write_text(codec.dumps(manifest, indent=1))
    temporary.rename(folder / file_names.step_dir(step))
    for name in (file_names.LATEST, file_names.BEST):
        (folder / f"{name}.tmp").write_text(codec.dumps(Pointer(step=step)))
        (folder / f"{name}.tmp").rename(folder / name)
    return folder / file_names.step_dir(step)


def main() -> int:
    run_dir = Path(sys.argv[1])
    messages = {"steps": 20.0, "step_s": 0.02, "save_every": 5.0}
    messages.update({name: float(value) for name, value in (word.split("=") for word in sys.argv[2:])})
    signals: list[int] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if messages.get("deaf") else lambda number, _: signals.append(number))
    steps = [file_names.parse_step(p.name) for p in (run_dir / file_names.CHECKPOINTS / "pretrain").glob("step-*")]
    begun = max((step for step in steps if step is not None), default=0)

    def say(kind: str, text: str) -> None:
        with open(run_dir / file_names.EVENTS, "a") as file:
            file.write(codec.dumps(Event(t=time.time(), source="trainer", kind=kind, text=text)) + "\n")

    def end(state: str, code: int, step: int, *, is_final: bool = False) -> int:
        reason = f"double trainer: {state}"
        outcome = Outcome(state, reason, code, "pretrain", step, time.time(), is_final=is_final)
        (run_dir / file_names.OUTCOME).write_text(codec.dumps(outcome))
        return code

    say("resumed" if begun else "phase_started", f"from step {begun}")
    for step in range(begun + 1, int(messages["steps"]) + 1):
        time.sleep(messages["step_s"])
        if step == messages.get("hang_at") and not (run_dir.parent / "hung").exists():
            (run_dir.parent / "hung").touch()
            time.sleep(600)
        if step == messages.get("crash_at"):
            counter = run_dir.parent / "crashes"
            count = int(counter.read_text()) + 1 if counter.exists() else 1
            counter.write_text(str(count))
            if count <= messages.get("crashes", 1e9):
                return 1
        if step == messages.get("bad_exit"):
            return end("failed", 1, step, is_final=True)
        if not messages.get("silent"):
            loss = 3.0 if step < messages.get("lost_at", 1e9) else None
            # More than steps alone would take: it saves too, and once more at the end.
            times = {"step_s": messages["step_s"], "eta_s": (messages["steps"] - step) * messages["step_s"] + 1.0}
            metric = Metric(time.time(), "pretrain", step, int(messages["steps"]), step * 10, loss, **times)
            with open(run_dir / file_names.METRICS, "a") as file:
                file.write(codec.dumps(metric) + "\n")
        is_last = step == messages["steps"]
        try:
            is_stop = bool(json.loads((run_dir / file_names.CONTROL).read_text())["stop"])
        except (OSError, ValueError):
            is_stop = False
        is_stop = (is_stop or bool(signals)) and not messages.get("deaf")
        if is_last or is_stop or step % messages["save_every"] == 0:
            write_checkpoint(run_dir, "pretrain", step, is_final=is_last)
            say("checkpoint_saved", f"step {step}")
        if is_stop and not is_last:
            return end("stopped", file_names.EXIT_STOPPED, step)
    return end("done", file_names.EXIT_DONE, int(messages["steps"]), is_final=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
