"""The trainer on a real card, from source: trains RUN_DIR, stops and resumes it, and says how fast and how exact.

    PYTHONPATH=src python benchmarks/gpu/first_run.py RUN_DIR --out result.json

RUN_DIR holds a run.json with a data.dir that exists on that machine (homing train makes such a folder; copy it and its
data). Passes when the run ends done on CUDA, every loss is finite and falls, and a copy of the run that was killed with
SIGKILL after its first checkpoint and started again gives, with train.deterministic and not compiled, the same losses
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("FAIL no CUDA device")
        return 1
    straight = copy_of(arguments.run_dir, "straight", is_deterministic=False)
    seconds = train(straight)
    fast = metrics(straight)
    exact, killed = (copy_of(arguments.run_dir, name, is_deterministic=True) for name in ("exact", "killed"))
    train(exact)
    kill_after_first_checkpoint(killed)
    train(killed)
    figures = summary(straight, fast, seconds)
    figures["is_resume_exact"] = losses(metrics(exact)) == losses(metrics(killed))
    passed = figures["is_falling"] and figures["is_resume_exact"]
    result = {
        "schema": "homing.result/1",
        "name": "gpu-first-run",
        "passed": passed,
        "figures": figures,
        "machine": {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "python": sys.version.split()[0]},
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, value in figures.items():
        print(f"{name:<24} {value}")
    speed = f"{figures['tokens_per_s']:,.0f} tok/s, mfu {figures['mfu']:.1%}"
    print(f"{'PASS' if passed else 'FAIL'} {speed}, resume exact: {figures['is_resume_exact']}")
    return 0 if passed else 1


def copy_of(run_dir: Path, name: str, *, is_deterministic: bool) -> Path:
    target = run_dir.with_name(f"{run_dir.name}-{name}")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    run: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    run["train"].update(is_deterministic=is_deterministic, needs_gpu=True)
    if is_deterministic:
        run["train"]["compile"] = "off"  # three more compilations would take longer than the training
    (target / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return target


def train(run_dir: Path) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "homing.lm.train", str(run_dir)], check=True)
    return time.monotonic() - began


def kill_after_first_checkpoint(run_dir: Path) -> None:
    with subprocess.Popen([sys.executable, "-m", "homing.lm.train", str(run_dir)]) as child:
        deadline = time.monotonic() + 300
        while not list(run_dir.glob("checkpoints/*/step-*/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(lines: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["val_loss"]) for line in lines]


def summary(run_dir: Path, lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    steps = [line for line in lines if line["loss"] is not None]
    speeds = sorted(line["tokens_per_s"] for line in steps if line["tokens_per_s"])
    mfus = sorted(line["mfu"] for line in steps if line["mfu"])
    vals = [line for line in lines if line["val_loss"] is not None]
    return {
        "run": run["name"],
        "num_params": run["sizes"]["num_params"],
        "steps": steps[-1]["step"],
        "batch_tokens": run["phases"][0]["batch_tokens"],
        "tokens_per_s": speeds[len(speeds) // 2],
        "mfu": mfus[len(mfus) // 2],
        "seconds": round(seconds, 1),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "val_loss": vals[-1]["val_loss"],
        "val_bits_per_byte": vals[-1]["val_bits_per_byte"],
        "is_falling": steps[-1]["loss"] < steps[0]["loss"],
    }


if __name__ == "__main__":
    sys.exit(main())
