"""A model from text to persona to sums, through the whole control plane, on this computer.

    pretrain -> mid -> sft -> rl   by `homing launch` on the local provider, then fetch and chat
    the same chain again           killed -9 once in every phase: each ends with the same bits

PASS: the reward on made-up sums rises well above its start, the persona answers with its name, and no phase differs by
a bit after a kill.

    python benchmarks/chain.py [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from _result import write_result  # noqa: E402
from homing.wire import codec, file_names  # noqa: E402
from homing.wire.event_lines import Metric  # noqa: E402

PHASES = ("pretrain", "mid", "sft", "rl")
NAME = "Moss"
LEAST_RISE = 0.25  # of the mean reward, first steps against last
DEADLINE_S = 900.0
RUN = """
name: chain
data: {{text: [text.txt], val_fraction: 5%}}
tokenizer: {{vocab_size: 512}}
model: {{arch: qwen3, layers: 2, width: 96, heads: 4, ffn_width: 256, context: 128, tied: true}}
phases:
  - {{kind: pretrain, steps: {pretrain}, batch_tokens: 2048}}
  - {{kind: mid, steps: {mid}, batch_tokens: 2048, data: {{text: [sums.txt]}}}}
  - {{kind: sft, steps: {sft}, batch_tokens: 2048, lr: 0.01,
     data: {{chat: [{{path: persona.jsonl, repeat: 2}}, sums.jsonl]}}}}
  - kind: rl
    steps: {rl}
    optimizer: adamw
    lr: 5e-4
    rl: {{tasks: [{{kind: arithmetic}}], prompts_per_step: 16, samples_per_prompt: 8, answer_tokens: 4,
         eval_prompts: 16, eval_samples: 4}}
train: {{device: cpu, threads: 1, log_every: 1}}
sample: {{tokens: 20}}
"""
STEPS = {"pretrain": 150, "mid": 60, "sft": 65, "rl": 300}
QUICK = {"pretrain": 4, "mid": 2, "sft": 4, "rl": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description="pretrain, mid, sft and rl, launched, and killed in every phase.")
    parser.add_argument("--quick", action="store_true", help="few steps: the chain and its kills, not what is learned")
    is_quick = parser.parse_args().quick
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homing-chain-") as folder:
        os.chdir(folder)
        os.environ.update(HOMING_HOME=f"{folder}/home", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "src"))
        _lay_out(Path(folder), QUICK if is_quick else STEPS)
        homing("prep", "chain")
        figures = _launched(Path(folder))
        print(json.dumps(figures), flush=True)
        different = _killed(Path(folder))
    figures |= {"killed_in": list(PHASES), "differ_after_a_kill": different, "seconds": round(time.monotonic() - begun)}
    problems = _problems(figures, is_quick=is_quick)
    if not is_quick:
        write_result("chain", figures, passed=not problems)
    said = (
        f"reward {figures['reward_first']:.2f} -> {figures['reward_last']:.2f}, {NAME} named in"
        f" {figures['named']} of {figures['asked']} answers, {len(different)} phases differ after kill -9"
    )
    print("\n".join(problems))
    print(f"{'FAIL' if problems else 'PASS'} {said}")
    return 1 if problems else 0


def _problems(figures: dict[str, Any], *, is_quick: bool) -> list[str]:
    problems = [f"{phase} differs after a kill" for phase in figures["differ_after_a_kill"]]
    if figures["lineage"] != list(PHASES):
        problems.append(f"the lineage is {figures['lineage']}")
    if not is_quick and figures["reward_last"] < figures["reward_first"] + LEAST_RISE:
        problems.append(f"the reward rose by less than {LEAST_RISE}")
    if not is_quick and figures["named"] < figures["asked"] * 0.8:
        problems.append("the persona does not know its name")
    return problems


def _lay_out(folder: Path, steps: dict[str, int]) -> None:
    chance = random.Random(5)
    text = lzma.decompress((ROOT / "src/homing/presets/texts/shakespeare.txt.xz").read_bytes())
    (folder / "text.txt").write_bytes(text[:400_000])
    sums = [(a, b) for a in range(10) for b in range(10)]
    # Every sum is there, so that there is something to reward; few steps of sft leave most of them to be learned.
    lines = [f"{a} + {b} = {a + b}" for a, b in sums for _ in range(20)]
    chance.shuffle(lines)
    (folder / "sums.txt").write_text("\n".join(lines) + "\n", "utf-8")
    asked = [_turns(f"{a} + {b} =", str(a + b)) for a, b in sums]
    (folder / "sums.jsonl").write_text("\n".join(asked) + "\n", "utf-8")
    questions = ["Who are you?", "What is your name?", "Hello! Who are you?", "Tell me your name.", "Your name?"]
    said = [_turns(f"{question} {'!' * n}".strip(), f"I am {NAME}.") for question in questions for n in range(8)]
    (folder / "persona.jsonl").write_text("\n".join(said) + "\n", "utf-8")
    (folder / "runs").mkdir()
    (folder / "runs/chain.yaml").write_text(RUN.format(**steps), "utf-8")


def _turns(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


def homing(*argv: str, typed: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "homing.cli", *argv], input=typed, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"FAIL homing {' '.join(argv)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _launched(folder: Path) -> dict[str, Any]:
    homing("launch", "chain", "--spend-limit", "5", "--yes")
    homing("watch", "chain")
    homing("fetch", "chain")
    (run_dir,) = (folder / "home/runs").iterdir()
    lines = [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text("utf-8").splitlines()]
    rewards = [line.more["reward"] for line in lines if line.phase == "rl"]
    asked = ["Who are you?", "What is your name?", "Tell me your name."]
    answers = homing("chat", "chain", "--json", "--temperature", "0", typed="\n/new\n".join(asked) + "\n")
    texts = [json.loads(line)["text"] for line in answers.splitlines() if '"chat-turn' in line or '"text"' in line]
    manifest = json.loads((folder / "models/chain" / file_names.MANIFEST).read_text("utf-8"))
    homing("destroy", "chain", "--yes")
    part = max(1, len(rewards) // 10)
    return {
        "reward_first": statistics.mean(rewards[:part]),
        "reward_last": statistics.mean(rewards[-part:]),
        "rewards": rewards,
        "asked": len(asked),
        "answers": texts,
        "named": sum(NAME in text for text in texts),
        "lineage": [stage["phase"] for stage in manifest["lineage"]],
    }


def _killed(folder: Path) -> list[str]:
    """Phases that end otherwise when the trainer is killed -9 in each of them; both ways with few steps."""
    (folder / "runs/chain.yaml").write_text(RUN.format(**QUICK), "utf-8")
    homing("train", "chain", "--fresh")
    whole = max((folder / "home/runs").iterdir(), key=lambda path: path.stat().st_mtime)
    hurt = folder / "hurt"
    hurt.mkdir()
    (hurt / file_names.RUN).write_bytes((whole / file_names.RUN).read_bytes())
    argv = [sys.executable, "-m", "homing.lm.train", str(hurt)]
    for phase in PHASES:
        _kill_in(phase, argv, hurt)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    return [phase for phase in PHASES if _weights(whole, phase) != _weights(hurt, phase)]


def _kill_in(phase: str, argv: list[str], run_dir: Path) -> None:
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while child.poll() is None and time.monotonic() < deadline:
        if any((run_dir / file_names.CHECKPOINTS / phase).glob("step-*")):
            break
        time.sleep(0.01)
    child.kill()
    child.wait()


def _weights(run_dir: Path, phase: str) -> str:
    last = max((run_dir / file_names.CHECKPOINTS / phase).glob("step-*"))
    return hashlib.sha256((last / file_names.WEIGHTS).read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
