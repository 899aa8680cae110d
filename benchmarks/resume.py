"""No work is lost: kill -9 at random moments and inside saves, damage every kind of file, and compare every number.

    1. a run that is never killed
    2. the same run, killed and started again: while loading, between steps, while a checkpoint is being written
    3. its newest checkpoint damaged, one file at a time: refused by hash with a message, and the one before is used

On the CPU at a fixed thread count, losses, gradient norms, evaluations and final weights must be those of the first run
to the last bit, and no step may be missing or occur twice in metrics.jsonl.

    python benchmarks/resume.py [--quick] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "lm"), str(ROOT / "benchmarks")]
os.environ["OMP_NUM_THREADS"] = "1"

from tiny import make_data, make_run, make_run_dir  # noqa: E402

from _result import write_result  # noqa: E402
from homing.wire import file_names  # noqa: E402

CHECKPOINTS = Path(file_names.CHECKPOINTS) / "pretrain"
DEADLINE_S = 120.0
# The model is small enough for milliseconds a step and large enough that a save takes longer than one, so that many
# moments are moments inside a save.
SAVE_EVERY = 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the trainer, damage its checkpoints, compare every number.")
    parser.add_argument("--quick", action="store_true", help="4 kills, under a minute")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    num_kills, num_steps = (4, 60) if arguments.quick else (20, 300)
    begun, chance = time.monotonic(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="homing-resume-") as folder:
        whole, killed = _lay_out(Path(folder), num_steps)
        print(f"a run of {num_steps} steps, never killed ...", flush=True)
        to_the_end(whole)
        kills = _kill(killed, num_kills, num_steps, chance)
        to_the_end(killed)
        problems = differences(whole, killed, num_steps)
        damages, damage_problems = _damage(killed, Path(folder) / "hurt", chance, is_quick=arguments.quick)
    problems += damage_problems
    if kills["in_save"] < num_kills // 4:
        problems.append(f"only {kills['in_save']} of {num_kills} kills fell inside a save")
    figures: dict[str, Any] = {
        "kills": kills,
        "steps": num_steps,
        "steps_done_twice": kills.pop("steps_done_twice"),
        "damages": damages,
        "problems": problems,
        "seconds": round(time.monotonic() - begun, 1),
    }
    for problem in problems:
        print(f"problem: {problem}")
    if not arguments.quick:
        write_result("resume", figures, passed=not problems)
    print(
        f"{'FAIL' if problems else 'PASS'} kills {sum(kills.values())} (loading {kills['loading']}, training "
        f"{kills['training']}, in a save {kills['in_save']}), losses bit-identical over {num_steps} steps, "
        f"{damages['refused']} of {damages['tried']} damaged checkpoints refused, {figures['seconds']} s"
    )
    return 1 if problems else 0


def _lay_out(folder: Path, num_steps: int) -> tuple[Path, Path]:
    make_data(folder / "data")
    run = make_run(
        folder / "data", num_steps=num_steps, save_every=SAVE_EVERY, eval_every=10, keep_last=2, sample_every=25
    )
    return make_run_dir(folder / "whole", run), make_run_dir(folder / "killed", run)


def _start(run_dir: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, "-m", "homing.lm.train", str(run_dir)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def to_the_end(run_dir: Path) -> None:
    with _start(run_dir) as child:
        out, _ = child.communicate(timeout=DEADLINE_S)
    if child.returncode or "Training Complete" not in out:
        raise SystemExit(f"{out}\nFAIL the trainer ended with exit code {child.returncode}")


def _kill(run_dir: Path, num_kills: int, num_steps: int, chance: random.Random) -> dict[str, int]:
    """Kills at steps spread over the run; returns how many fell where."""
    kills = {"loading": 0, "training": 0, "in_save": 0, "steps_done_twice": 0}
    at_steps = sorted(chance.sample(range(2, num_steps - 4), num_kills))
    for number, step in enumerate(at_steps):
        how = ("in_save", "training", "in_save", "loading")[number % 4]
        with _start(run_dir) as child:
            reached = _wait_and_kill(child, run_dir, how, step, chance)
        left = [path.name for path in (run_dir / CHECKPOINTS).glob(".*-step-*")]
        where = "in_save" if left else "loading" if reached is None else "training"
        kills[where] += 1
        saved = max(
            (file_names.parse_step(path.name) or 0 for path in (run_dir / CHECKPOINTS).glob("step-*")), default=0
        )
        kills["steps_done_twice"] += max(0, (reached or saved) - saved)
        print(
            f"kill {number + 1}/{num_kills}: {where} after step {reached}, checkpoint {saved}, left {left}", flush=True
        )
    return kills


def _wait_and_kill(
    child: subprocess.Popen[str], run_dir: Path, how: str, step: int, chance: random.Random
) -> int | None:
    """SIGKILL at a random moment of that kind; returns the last step that the trainer printed, or None."""
    if how == "loading":
        time.sleep(chance.uniform(0.0, 3.0))
        child.kill()
    assert child.stdout is not None
    reached = None
    for line in child.stdout:  # ends when the killed trainer's pipe closes
        if line.startswith("step "):
            reached = int(line.split("/")[0].removeprefix("step ").replace(",", ""))
        if how != "loading" and reached is not None and reached >= step and child.poll() is None:
            if how == "in_save":
                _wait_for_save(run_dir)
            time.sleep(chance.uniform(0.0, 0.006 if how == "in_save" else 0.03))
            child.kill()
            how = "loading"
    child.wait(timeout=DEADLINE_S)
    return reached


def _wait_for_save(run_dir: Path) -> None:
    """Returns as soon as a checkpoint is being written, by looking at the disk without pause."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if any(name.startswith(".partial-") for name in os.listdir(run_dir / CHECKPOINTS)):
                return


def read_figures(run_dir: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]
    return [(m["step"], m["num_tokens"], m["loss"], m["grad_norm"], m["lr"], m["val_loss"]) for m in lines]


def _weights(run_dir: Path, num_steps: int) -> list[str]:
    folder = run_dir / CHECKPOINTS / file_names.step_dir(num_steps)
    return [
        hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (file_names.WEIGHTS, file_names.OPTIMIZER)
    ]


def differences(whole: Path, other: Path, num_steps: int, *, not_judged: frozenset[int] = frozenset()) -> list[str]:
    """`not_judged`: steps at which the trainer was asked to stop and saved without an evaluation."""
    expected, got = read_figures(whole), read_figures(other)
    expected = [
        (*a[:-1], None) if b[0] in not_judged and b[-1] is None else a for a, b in zip(expected, got, strict=False)
    ]
    problems = []
    if [line[0] for line in got] != list(range(1, num_steps + 1)):
        problems.append(f"{other.name}: steps are missing or repeated")
    problems += [f"{other.name}: {a} became {b}" for a, b in zip(expected, got, strict=False) if a != b][:3]
    if _weights(whole, num_steps) != _weights(other, num_steps):
        problems.append(f"{other.name}: the final weights or optimizer differ")
    return problems


def _damage(run_dir: Path, hurt: Path, chance: random.Random, *, is_quick: bool) -> tuple[dict[str, int], list[str]]:
    """Damages each file of the newest checkpoint; the trainer must report it and resume from the one before."""
    from homing.lm.train.loop import train

    num_steps = len(read_figures(run_dir))
    newest = file_names.step_dir(num_steps)
    counts, problems = {"tried": 0, "refused": 0}, []
    for name in sorted(path.name for path in (run_dir / CHECKPOINTS / newest).iterdir()):
        for kind in ["cut", "flip"] + ([] if is_quick else ["empty", "missing", "flip", "flip"]):
            shutil.rmtree(hurt, ignore_errors=True)
            shutil.copytree(run_dir, hurt)
            _hurt(hurt / CHECKPOINTS / newest / name, kind, chance)
            said: list[str] = []
            train(hurt, say=said.append)
            is_refused = any(f"{newest} is damaged (" in line for line in said)
            is_resumed = any(line.startswith("Resumed at step") for line in said)
            counts["tried"] += 1
            counts["refused"] += is_refused and is_resumed
            if not (is_refused and is_resumed):
                problems.append(f"{name}, {kind}: not refused with a message, or not resumed")
            problems += [f"{name}, {kind}: {problem}" for problem in differences(run_dir, hurt, num_steps)]
    return counts, problems


def _hurt(path: Path, kind: str, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(b"" if kind == "empty" else data[: chance.randrange(1, len(data))] if kind == "cut" else data)


if __name__ == "__main__":
    sys.exit(main())
