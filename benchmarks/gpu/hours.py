"""How right the time to the end is that a run tells after its first 20 steps.

    PYTHONPATH=src python benchmarks/gpu/hours.py RUN_DIR... [--out FILE]

Trains each run (a folder with run.json, as `homing train` makes it) and compares, for its first phase, the time that
was still to come by what the run itself told then (`eta_s` of its metrics) with the time that it then took. Passes when
every run is within a fifth.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _result import RESULTS, write_result

JUDGED_STEPS = 20
MOST_OFF = 0.20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for run_dir in arguments.run_dirs:
        subprocess.run([sys.executable, "-m", "homing.lm.train", str(run_dir)], check=True)
        rows[run_dir.name] = row = compare(run_dir)
        print(
            f"{run_dir.name:<16} told {row['told_s']:.1f} s, took {row['took_s']:.1f} s: {row['off']:+.1%}", flush=True
        )
    worst = max((abs(row["off"]) for row in rows.values()), default=1.0)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    write_result("hours", {"device": device, "runs": rows, "worst": worst}, passed=worst <= MOST_OFF)
    if arguments.out:
        shutil.copyfile(RESULTS / "hours.json", arguments.out)
    print(f"{'PASS' if worst <= MOST_OFF else 'FAIL'} at most {worst:.1%} off in {len(rows)} runs")
    return 0 if worst <= MOST_OFF else 1


def compare(run_dir: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["phase"] == lines[0]["phase"]]
    judged = next(line for line in lines if line["step"] >= JUDGED_STEPS and line["eta_s"])
    told_s = judged["eta_s"]
    took_s = lines[-1]["t"] - judged["t"]
    assert lines[-1]["step"] == judged["num_steps"], "it did not come to its end"
    return {
        "told_s": told_s, "took_s": took_s, "off": told_s / took_s - 1.0, "steps": judged["num_steps"],
        "judged_at": judged["step"], "tokens_per_s": judged["tokens_per_s"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
