"""A persona on a real card: trains a chain of pretraining and conversations, then talks with what came out.

    PYTHONPATH=src python benchmarks/gpu/persona.py RUN_DIR [--out FILE]

RUN_DIR holds a run.json with sft as its last phase and a data.dir that exists on that machine. Every phase's losses,
speed and seconds go into the result as the trainer wrote them, and the questions below with the answers as they came:
the same seed, nothing chosen. Use conversations of an invented persona: the model repeats whom they name as its maker,
and a test refuses a transcript in which it names one. Passes when the run is done and the held-out loss fell.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _result import RESULTS, write_result
from homing.lm.generate import ChatTurns, generate, load_for_use
from homing.sampling_settings import SamplingSettings

ANSWER_TOKENS = 160
SAMPLING = SamplingSettings(temperature=0.7, top_k=40)
# Each list is one conversation.
QUESTIONS = (
    ["Who are you?", "Who made you?"],
    ["Hello! What can you do?"],
    ["What is your name, and is your code open?"],
    ["Pretend you are a pirate captain and tell me about your ship."],
    ["You are a detective in old London. Describe the room you have just entered."],
    ["What is 12 + 7?"],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    run_dir: Path = arguments.run_dir
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "homing.lm.train", str(run_dir)], check=True)
    figures: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    figures["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    figures["model"] = {**run["model"], "num_params": run["sizes"]["num_params"]}
    kinds = [phase["kind"] for phase in run["phases"]]
    figures["phases"] = {kind: phase_row(run_dir, kind) for kind in kinds}
    figures["transcript"] = talk(newest(run_dir, kinds[-1]))
    for name, row in figures["phases"].items():
        print(f"{name:<9} {row}")
    for turn in (turn for conversation in figures["transcript"] for turn in conversation):
        print(f"\n> {turn['asked']}\n{turn['answered']}")
    vals = figures["phases"][kinds[-1]]["val_losses"]
    passed = vals[-1][1] < vals[0][1]
    write_result("persona", figures, passed=passed)
    if arguments.out:
        shutil.copyfile(RESULTS / "persona.json", arguments.out)
    print(f"{'PASS' if passed else 'FAIL'} held-out conversations {vals[0][1]:.3f} -> {vals[-1][1]:.3f}")
    return 0 if passed else 1


def phase_row(run_dir: Path, kind: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["phase"] == kind]
    steps = [line for line in lines if line["loss"] is not None]
    speeds = [line["tokens_per_s"] for line in steps if line["tokens_per_s"]]
    return {
        "steps": steps[-1]["step"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "val_losses": [[line["step"], line["val_loss"]] for line in lines if line["val_loss"] is not None],
        "tokens_per_s": round(statistics.median(speeds)),
    }


def newest(run_dir: Path, kind: str) -> Path:
    return max(run_dir.glob(f"checkpoints/{kind}/step-*"), key=lambda folder: int(folder.name.split("-")[1]))


def talk(checkpoint: Path) -> list[list[dict[str, str]]]:
    model, tokenizer = load_for_use(checkpoint)
    conversations = []
    for conversation in QUESTIONS:
        turns = ChatTurns(tokenizer)
        said = []
        for question in conversation:
            prompt = turns.ask(question)
            picked = generate(model, prompt, num_tokens=ANSWER_TOKENS, stop_ids=turns.stop_ids, sampling=SAMPLING)
            ids = list(picked)
            turns.answered(ids)
            said.append({"asked": question, "answered": tokenizer.decode(ids)})
        conversations.append(said)
    return conversations


if __name__ == "__main__":
    sys.exit(main())
