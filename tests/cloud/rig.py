"""A run, its data and a trainer of a few lines: enough for the whole life of a run in a second or two.

The trainer keeps the run directory's promises (metrics, events, checkpoints with manifest, control.json, exit codes)
and learns nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft
from homing.cloud.providers.base import Needs
from homing.wire import codec
from homing.wire.run_json import Cloud, Data, Limits, Model, Optimizer, Phase, Run, Sampling, Schedule, Sizes, Train
from homing.wire.shard_manifest import DataManifest, Shard, SourceFile, Split
from homing.world import World

TRAINER = """
import hashlib, json, os, sys, time
run_dir, num_steps, step_s, how = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
steps_dir = os.path.join(run_dir, "checkpoints", "pretrain")

def line(name, **document):
    with open(os.path.join(run_dir, name), "a") as file:
        file.write(json.dumps(document) + "\\n")

def write(path, data):
    with open(path + ".tmp", "wb") as file:
        file.write(data)
    os.replace(path + ".tmp", path)

def save(step, is_final):
    folder = os.path.join(steps_dir, "step-%08d" % step)
    os.makedirs(folder, exist_ok=True)
    files = {
        "model.safetensors": b"weights at %d" % step,
        "state.json": b"{}",
        "run.json": open(os.path.join(run_dir, "run.json"), "rb").read(),
        "tokenizer.json": open(os.path.join(run_dir, "..", "data", "tokenizer.json"), "rb").read(),
    }
    hashes = []
    for name, data in files.items():
        write(os.path.join(folder, name), data)
        hashes.append({"name": name, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {"schema": "homing.checkpoint/1", "run_name": "moss", "run_id": json.loads(files["run.json"])["id"],
                "phase": "pretrain", "step": step, "num_tokens": step * 64, "is_final": is_final,
                "config_sha256": "", "seed": 0, "files": hashes}
    write(os.path.join(folder, "manifest.json"), json.dumps(manifest).encode())
    write(os.path.join(steps_dir, "latest.json"), json.dumps({"schema": "homing.pointer/1", "step": step}).encode())
    line("events.jsonl", t=time.time(), source="trainer", kind="checkpoint_saved", text="Checkpoint saved.", step=step)

def ask():
    try:
        return json.load(open(os.path.join(run_dir, "control.json")))
    except (OSError, ValueError):
        return {}

def end(state, reason, code, step):
    outcome = {"schema": "homing.outcome/1", "state": state, "reason": reason, "exit_code": code, "phase": "pretrain",
               "step": step, "t": time.time()}
    write(os.path.join(run_dir, "outcome.json"), json.dumps(outcome).encode())
    sys.exit(code)

os.makedirs(steps_dir, exist_ok=True)
os.makedirs(os.path.join(run_dir, "samples"), exist_ok=True)
done = sorted(int(name[5:]) for name in os.listdir(steps_dir) if name.startswith("step-"))
first = done[-1] + 1 if done else 1
line("events.jsonl", t=time.time(), source="trainer", kind="phase_started", text="Phase started.", step=first - 1)
print("trainer begins at step", first, flush=True)
for step in range(first, num_steps + 1):
    time.sleep(step_s)
    line("metrics.jsonl", t=time.time(), phase="pretrain", step=step, num_steps=num_steps, num_tokens=step * 64,
         loss=5.0 / step, tokens_per_s=6400.0, step_s=max(step_s, 0.001), mfu=0.41,
         eta_s=2.0 * (num_steps - step) * step_s)
    print("step", step, flush=True)
    if ask().get("stop"):
        save(step, False)
        end("stopped", ask().get("reason", "stopped"), 75, step)
    if step % 5 == 0:
        save(step, False)
        write(os.path.join(run_dir, "samples", "pretrain-%08d.txt" % step), b"once upon a time")
    if how == "fail" and step == 3:
        print("Traceback: boom", file=sys.stderr, flush=True)
        end("failed", "The loss is not finite.", 1, step)
save(num_steps, True)
end("done", "All steps are done.", 0, num_steps)
"""


MOSS = b"moss grows on stones\n"  # moss.txt, which the shards claim to hold


def make_data(folder: Path) -> str:
    """Writes placeholder shards and returns the hash of their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "tokenizer.json": b'{"version": "1.0"}',
        "train-00000.bin": bytes(range(256)) * 8,
        "train-00000.idx": b"\0" * 16,
        "val-00000.bin": bytes(range(64)),
        "val-00000.idx": b"\0" * 16,
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    sha = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}

    def split(name: str) -> Split:
        file, index = f"{name}-00000.bin", f"{name}-00000.idx"
        size = len(contents[file])
        return Split(size // 2, 1, size, [Shard(file, index, size // 2, 1, size, sha[file], sha[index])])

    manifest = DataManifest(
        dtype="uint16",
        vocab_size=512,
        tokenizer_sha256=sha["tokenizer.json"],
        specials=["<|endoftext|>"],
        splits={"train": split("train"), "val": split("val")},
        source=[SourceFile("moss.txt", len(MOSS), hashlib.sha256(MOSS).hexdigest())],
        source_sha256="0" * 64,
    )
    text = codec.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def make_run(tmp_path: Path, name: str = "moss", *, limits: Limits | None = None) -> Run:
    manifest_sha256 = make_data(tmp_path / "data")
    optimizer = Optimizer("adamw", 1e-3, 1e-3, 1e-3, 1e-3, 0.0)
    schedule = Schedule("wsd", 1, 2, 0.0)
    phase = Phase("pretrain", "full", 20, 64, 1, optimizer, schedule, 0, 64, 5, 0.0, 0, 2)
    return Run(
        name=name,
        seed=0,
        model=Model("stock", "llama", 2, 64, 4, 4, 16, 128, 64, 512, True),
        sizes=Sizes(100_000, 90_000, 600_000.0),
        data=Data(str(tmp_path / "data"), manifest_sha256, "", 1024, 32),
        phases=[phase],
        train=Train(),
        sampling=Sampling(),
        limits=limits or Limits(),
        cloud=Cloud(),
        store=f"file:{tmp_path}/store",
        run_file_sha256="f" * 64,
    )


def trainer_argv(tmp_path: Path, work_dir: str, *, steps: int = 12, step_s: float = 0.01, how: str = "ok") -> list[str]:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    return [sys.executable, str(script), f"{work_dir}/run", str(steps), str(step_s), how]


def make_draft(
    home: Home,
    tmp_path: Path,
    *,
    name: str = "moss",
    limit: str | None = "1.00",
    steps: int = 12,
    step_s: float = 0.01,
    how: str = "ok",
    resume: bool = False,
    is_prepared: bool = True,
    limits: Limits | None = None,
    provider: str = "local",
) -> Draft:
    order = LaunchOrder(
        run=make_run(tmp_path, name, limits=limits),
        run_file_text=f"name: {name}\n",
        is_prepared=is_prepared,
        offer=home.provider(provider).offers(Needs())[0],
        spend_limit_usd=None if limit is None else Decimal(limit),
        resume=resume,
    )
    ready = draft(order, home)
    work_dir = home.provider(provider).place(ready.mark).work_dir
    argv = tuple(trainer_argv(tmp_path, work_dir, steps=steps, step_s=step_s, how=how))
    return dataclasses.replace(ready, order=dataclasses.replace(ready.order, trainer_argv=argv, heartbeat_s=0.2))


def marked_now(home: Home) -> list[tuple[int, str]]:
    """Every live process that carries a mark of this home, from the process table."""
    return [(process.pid, mark) for process, mark in World().marked("HOMING_MARK", f"homing-{home.owner}-")]


def clear(home_path: Path, provider: str = "local") -> None:
    """Destroys what a test left running. Opens the home again, since the test may have patched its own to refuse."""
    opened = Home(home_path, World()).provider(provider)
    for instance in opened.list_owned():
        opened.destroy(instance.id)


def forget(home_path: Path) -> None:
    """Deletes the ledger, its backup and the launch documents; live instances are then known by their mark alone."""
    for path in [*home_path.glob("ledger.sqlite*"), *home_path.glob("backup/*"), *home_path.glob("runs/*/launch.json")]:
        path.unlink()


def look_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.cloud.watch.follow._POLL_S", 0.1)
    monkeypatch.setattr("homing.cloud.guard.change_limit_or_stop._STOP_EVERY_S", 0.1)
    monkeypatch.setattr("homing.cloud.watch.run_output._EVERY_S", 0.1)
    monkeypatch.setattr("homing.cloud.machine_setup.startup_script._PAUSE_S", 0.3)
    monkeypatch.setattr("homing.cloud.launch.run_documents._heartbeat_s", lambda store: 0.2)
    # Agents ignore SIGTERM at first, so an instance made of processes is gone only after this grace period.
    monkeypatch.setattr("homing.cloud.providers.simulated_machine._TERM_GRACE_S", 0.1)
    # The real probe loads torch; this one prints a fixed result.
    monkeypatch.setattr("homing.cloud.plan.speed._PROBE", "print(2e10)")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        body = json.loads(self.out)
        assert isinstance(body, dict)
        return body


def homing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> Said:
    """`homing ARGV` in this process, as a script would see it."""
    from homing.cli import main, output

    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["homing", *argv])
    with pytest.raises(SystemExit) as left:
        main.main()
    output.configure(loudness=0, is_json=False)
    said = capsys.readouterr()
    return Said(int(left.value.code or 0), said.out, said.err)


def read_json(path: Path) -> dict[str, object]:
    body = json.loads(path.read_bytes())
    assert isinstance(body, dict)
    return body
