"""A phase of rl in the run file: what it becomes, and what is refused before anything is rented."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from homing.config import Loaded
from homing.errors import Mistake
from homing.lm.tokenizer.specials import IM_END, IM_START
from homing.questions import TURN_MARKS
from homing.wire.run import Rl

from .conftest import put_data

RUN = """\
name: base
model: {layers: 2, width: 64, heads: 2, context: 512}
phases:
  - kind: pretrain
    steps: 10
    batch_tokens: 1024
  - kind: rl
    steps: 20
    rl:
      tasks:
        - {kind: prompts, file: asks.jsonl, reward: reward.py, weight: 2}
        - {kind: arithmetic, difficulty: 3}
      samples_per_prompt: 8
      reward_timeout: 30s
      reward_memory: 1GiB
"""
GOOD = "def reward(prompt, completion, answer):\n    return 1.0\n"


@pytest.fixture(autouse=True)
def files(folder: Path) -> Path:
    (folder / "asks.jsonl").write_text('{"prompt": "Hello?"}\n')
    (folder / "reward.py").write_text(GOOD)
    return folder


def test_tasks_and_settings_arrive_with_the_hashes_of_their_files(load: Callable[..., Loaded], folder: Path) -> None:
    phase = load(RUN).run.phases[1]
    assert phase.rl is not None
    first, second = phase.rl.tasks
    assert (first.kind, first.weight, second.kind, second.difficulty) == ("prompts", 2.0, "arithmetic", 3)
    assert first.reward == str(folder / "reward.py")
    assert first.reward_sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert first.file_sha256 == hashlib.sha256(b'{"prompt": "Hello?"}\n').hexdigest()
    assert (phase.rl.samples_per_prompt, phase.rl.reward_timeout_s, phase.rl.reward_memory_bytes) == (8, 30.0, 2**30)
    assert (phase.num_steps, phase.batch_tokens, phase.optimizer.weight_decay) == (20, 16 * 8 * 256, 0.0)


def test_the_defaults_of_the_run_file_are_those_of_the_trainer(load: Callable[..., Loaded]) -> None:
    bare = load(RUN.split("      tasks:")[0] + "      tasks: [{kind: arithmetic}]\n").run.phases[1].rl
    assert bare is not None
    assert bare == dataclasses.replace(Rl(tasks=bare.tasks))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def reward(prompt, completion:\n", "line 1"),
        ("x = 1\n\nreturn = 2\n", "line 3"),
        ("def rewards(p, c, a):\n    return 1\n", "defines no reward"),
    ],
)
def test_a_reward_with_a_slip_of_the_pen_is_refused_with_its_line(
    mistakes: Callable[..., list[Mistake]], folder: Path, text: str, words: str
) -> None:
    (folder / "reward.py").write_text(text)
    (mistake,) = mistakes(RUN)
    assert words in mistake.problem


@pytest.mark.parametrize("text", ["from rules import reward\n", "reward = lambda p, c, a: 1.0\n", GOOD])
def test_a_reward_may_come_about_in_any_way(load: Callable[..., Loaded], folder: Path, text: str) -> None:
    (folder / "reward.py").write_text(text)
    load(RUN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("asks.jsonl", "absent.jsonl"), "not there"),
        (("reward: reward.py", "reward: absent.py"), "not there"),
        (("samples_per_prompt: 8", "clip_low: 0.1"), "no effect with one update"),
        (("samples_per_prompt: 8", "answer_tokens: 510"), "no room for a question"),
        (("samples_per_prompt: 8", "samples_per_prompt: 1"), "at least 2"),
        (("difficulty: 3", "file: asks.jsonl"), "reads no file"),
        (("difficulty: 3", "difficulty: 9"), "at most 5"),
        (("    steps: 20\n", "    tokens: 1M\n"), "no effect in rl"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(
    mistakes: Callable[..., list[Mistake]], change: tuple[str, str], words: str
) -> None:
    assert any(words in str(mistake) for mistake in mistakes(RUN.replace(*change)))


def test_every_bad_line_of_a_file_is_told_with_its_number(mistakes: Callable[..., list[Mistake]], folder: Path) -> None:
    lines = ['{"prompt": "Hello?"}', "not json", '{"prompt": ""}', "", '{"ids": [9999]}', "[]"]
    (folder / "asks.jsonl").write_text("\n".join(lines))
    (mistake,) = mistakes(RUN)
    assert mistake.key == "phases.1.rl.tasks.0.file"
    assert str(folder / "asks.jsonl") in mistake.problem
    assert [number for number in range(1, 7) if f"line {number}:" in mistake.problem] == [2, 3, 6]
    put_data(folder)  # now it is known how many ids the tokenizer has
    assert "line 5: its ids are not all whole numbers below 512" in "".join(map(str, mistakes(RUN)))


def test_a_tokenizer_without_the_marks_of_turns_is_refused_before_anything_is_rented(
    load: Callable[..., Loaded], mistakes: Callable[..., list[Mistake]], folder: Path
) -> None:
    load(RUN)  # nothing is prepared, and nothing can be said yet
    path = put_data(folder) / "tokenizer.json"
    assert {mistake.key for mistake in mistakes(RUN)} == {"phases.1.rl.tasks.0.kind", "phases.1.rl.tasks.1.kind"}
    (folder / "asks.jsonl").write_text('{"ids": [1, 2]}\n')
    (mistake,) = mistakes(RUN)  # the sums are still asked in turns
    assert "no <|im_start|> and no <|im_end|>" in mistake.problem
    document = json.loads(path.read_text())
    document["added_tokens"] = [{"id": 510, "content": IM_START}, {"id": 511, "content": IM_END}]
    path.write_text(json.dumps(document))
    load(RUN)


def test_the_marks_are_those_of_the_trainer() -> None:
    assert TURN_MARKS == (IM_START, IM_END)
