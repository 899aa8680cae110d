"""A phase of rl in the run file: what it becomes, and what is refused before anything is rented."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.config.conftest import put_data
from tests.config.weights.test_open_weights import documents
from tests.config.weights.test_open_weights import write as write_open_weights

from homing.config.load import Loaded
from homing.errors import Mistake
from homing.lm.tokenizer.tokenizer import IM_END, IM_START
from homing.rl_question_files import TURN_MARKS
from homing.wire import file_names
from homing.wire.run_json import Lora, Rl

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
        ("def rewards(p, c, a):\n    return 1\n", "defines no function named reward"),
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


@pytest.mark.parametrize(("context", "tokens"), [(128, 64), (512, 256), (4096, 256)])
def test_an_answer_may_have_half_of_a_small_context(load: Callable[..., Loaded], context: int, tokens: int) -> None:
    rl = load(RUN, f"model.context={context}", f"phases.0.batch_tokens={16 * context}").run.phases[-1].rl
    assert rl.max_new_tokens == tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("asks.jsonl", "absent.jsonl"), "does not exist"),
        (("reward: reward.py", "reward: absent.py"), "does not exist"),
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


@pytest.mark.acceptance(91)
def test_every_bad_line_of_a_question_file_is_reported_with_its_number(
    mistakes: Callable[..., list[Mistake]], folder: Path
) -> None:
    lines = ['{"prompt": "Hello?"}', "not json", '{"prompt": ""}', "", '{"ids": [9999]}', "[]"]
    (folder / "asks.jsonl").write_text("\n".join(lines))
    (mistake,) = mistakes(RUN)
    assert mistake.key == "phases.1.rl.tasks.0.file"
    assert str(folder / "asks.jsonl") in mistake.problem
    assert [number for number in range(1, 7) if f"line {number}:" in mistake.problem] == [2, 3, 6]
    put_data(folder)  # now it is known how many ids the tokenizer has
    assert "line 5: the ids are not all whole numbers below 512" in "".join(map(str, mistakes(RUN)))


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


def test_a_chat_template_next_to_the_tokenizer_is_used_for_questions(load: Callable[..., Loaded], folder: Path) -> None:
    data = put_data(folder)
    (data / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    load(RUN)


ADAPTERS = """\
name: base
model: {layers: 2, width: 64, heads: 2, context: 512}
phases:
  - {kind: pretrain, steps: 10, batch_tokens: 1024}
  - {kind: sft, method: qlora, steps: 10, batch_tokens: 1024, data: {chat: [chats.jsonl]},
     lora: {rank: 8, dropout: 0.1, targets: [q, v], rslora: true}}
  - {kind: rl, method: lora, steps: 20, rl: {tasks: [{kind: arithmetic}], samples_per_prompt: 8}}
"""


def test_rl_with_lora_continues_the_adapters_of_the_phase_before_by_default(
    load: Callable[..., Loaded], mistakes: Callable[..., list[Mistake]]
) -> None:
    run = load(ADAPTERS).run
    sft, rl = run.phases[1:]
    assert sft.lora is not None
    assert (rl.method, rl.optimizer.kind) == ("lora", "adamw")
    assert rl.lora == dataclasses.replace(sft.lora, dropout=0.0), "all but how they learn"
    assert rl.lora.alpha == 16.0
    assert run.origin["phases.2.lora.rank"] == run.origin["phases.2.lora.alpha"] == "derived from phases.1.lora"
    other = load(ADAPTERS, "phases.2.lora.rank=4").run.phases[2].lora
    assert other == Lora(rank=4, alpha=8.0, targets=["q", "v"], is_rslora=True)
    assert load(ADAPTERS, "phases.1.method=full", "phases.1.lora=null").run.phases[2].lora == Lora()
    assert any("swift does not support adapters" in str(found) for found in mistakes(ADAPTERS, "model.family=swift"))
    alone = ADAPTERS.replace("  - {kind: pretrain, steps: 10, batch_tokens: 1024}\n", "").split("  - {kind: sft")[0]
    alone += "  - {kind: rl, method: qlora, steps: 20, rl: {tasks: [{kind: arithmetic}]}}\n"
    assert any("needs trained weights, and there are none yet" in found.problem for found in mistakes(alone))


def test_open_weights_are_asked_in_their_template_once_prep_has_taken_it_apart(
    load: Callable[..., Loaded], mistakes: Callable[..., list[Mistake]], folder: Path, tmp_path: Path
) -> None:
    source = write_open_weights(tmp_path / "open", documents())
    text = f"name: base\nmodel: {{from: {source}}}\nphases:\n  - kind: rl\n    method: qlora\n    steps: 5\n"
    text += "    rl: {tasks: [{kind: arithmetic}], answer_tokens: 16}\n"
    load(text)  # nothing is prepared, and nothing can be said yet
    place = folder / "data" / "base"
    place.mkdir(parents=True)
    (place / file_names.TOKENIZER).write_bytes((source / file_names.TOKENIZER).read_bytes())
    (mistake,) = mistakes(text)
    assert (mistake.key, "homing prep" in mistake.suggestion) == ("phases.0.rl.tasks.0.kind", True)
    assert file_names.TURNS in mistake.problem
    (place / file_names.TURNS).write_text("{}")
    load(text)
