from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small import make_rl_run
from tiny import make_data

from homing.errors import DataError, UsageError
from homing.lm.data.chat.render import ChatTokens, Renderer
from homing.lm.data.chat.template import ChatTemplate
from homing.lm.generate import ChatTurns
from homing.lm.rl.prompter import Prompter, chatml
from homing.lm.rl.questions import Order, is_held_out
from homing.lm.rl.tasks import Asked, open_task
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE
from homing.wire.run_json import RlTask


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_rl_run(tmp_path / "data")
    return load_tokenizer(tmp_path / "data")


def opened(tmp_path: Path, tokenizer: Tokenizer, seed: int = 7, room: int = 400, **task: Any) -> Asked:
    prompter = Prompter(tmp_path, tokenizer)
    return open_task(RlTask(**task), 0, seed=seed, tokenizer=tokenizer, prompter=prompter, data_dir=tmp_path, room=room)


def write(path: Path, entries: list[Any]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path.name


GSM8K = [
    {"question": f"What is {n} and {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}"} for n in range(40)
]


@pytest.mark.parametrize("kind", ["arithmetic", "spelling"])
@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 5])
def test_made_up_questions_have_answers_that_are_judged_right(
    tmp_path: Path, tokenizer: Tokenizer, kind: str, difficulty: int
) -> None:
    task = opened(tmp_path, tokenizer, kind=kind, difficulty=difficulty)
    for number in range(20):
        question = task.draw(number)
        assert task.judge(f" {question.answer}.", question) == 1.0
        assert task.judge("no idea", question) == 0.0


def test_questions_follow_from_seed_and_number_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, again = (opened(tmp_path, tokenizer, kind="arithmetic", difficulty=3) for _ in range(2))
    assert [first.draw(n) for n in range(20)] == [again.draw(n) for n in reversed(range(20))][::-1]
    other = opened(tmp_path, tokenizer, seed=8, kind="arithmetic", difficulty=3)
    assert [first.draw(n).text for n in range(20)] != [other.draw(n).text for n in range(20)]
    assert first.held_out(10) == other.held_out(10)


def test_a_held_out_question_is_never_asked_in_training(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made_up = opened(tmp_path, tokenizer, kind="arithmetic")
    from_file = opened(tmp_path, tokenizer, kind="gsm8k", file=write(tmp_path / "q.jsonl", GSM8K))
    for task in (made_up, from_file):
        held_out = {question.text for question in task.held_out(50)}
        assert held_out
        assert not held_out & {task.draw(n).text for n in range(300)}
        assert all(is_held_out(text) for text in held_out)


def test_a_held_out_file_is_taken_whole_and_what_it_shares_with_training_is_left_out(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file, val_file = write(tmp_path / "a.jsonl", GSM8K[:30]), write(tmp_path / "b.jsonl", GSM8K[25:])
    task = opened(tmp_path, tokenizer, kind="gsm8k", file=file, val_file=val_file)
    assert task.num_questions == 25
    assert len(task.held_out(100)) == 15


def test_every_question_of_a_file_comes_once_before_any_comes_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = opened(tmp_path, tokenizer, kind="gsm8k", file=write(tmp_path / "q.jsonl", GSM8K))
    count = task.num_questions
    rounds = [[task.draw(n).text for n in range(start, start + count)] for start in (0, count)]
    assert set(rounds[0]) == set(rounds[1])
    assert len(set(rounds[0])) == count
    assert rounds[0] != rounds[1]


def test_prompts_may_be_text_messages_or_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    entries = [
        {"prompt": "Say yes.", "answer": "yes"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two?"}], "answer": 2},
        {"ids": [0, 5, 6], "answer": "no"},
    ]
    task = opened(tmp_path, tokenizer, kind="prompts", file=write(tmp_path / "p.jsonl", entries))
    questions = [*(task.draw(n) for n in range(task.num_questions)), *task.held_out(9)]
    by_answer = {question.answer: question for question in questions}
    assert by_answer["no"].ids == (0, 5, 6)
    assert by_answer["2"].text == "Two?"
    assert tokenizer.decode(by_answer["2"].ids) == (
        "<|endoftext|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert list(by_answer["yes"].ids) == ChatTurns(tokenizer).ask("Say yes.")


def test_what_a_question_spells_stays_text(tokenizer: Tokenizer) -> None:
    ids = chatml(tokenizer, [{"role": "user", "content": "<|im_end|>"}])
    assert ids.count(tokenizer.specials["<|im_end|>"]) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is 3 + 4?"}],
        [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "\n<|im_end|><|pad|> \u2603"}],
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Good day."},
            {"role": "user", "content": "Two?"},
        ],
    ],
)
def test_a_prompt_is_what_the_template_of_the_export_and_of_sft_gives(
    tmp_path: Path, tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<|endoftext|>"})
    rendered = Renderer(template, ChatTokens(tmp_path / "data")).prompt(messages)
    assert list(chatml(tokenizer, messages)) == rendered


def test_every_bad_line_is_named_with_its_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "answer": "b"}\nnot json\n[]\n{"prompt": "a"}\n{"answer": "b"}\n\n'
        '{"prompt": "a", "ids": [1], "answer": "b"}\n{"ids": [99999], "answer": "b"}\n'
        '{"messages": [{"role": "robot", "content": "x"}], "answer": "b"}\n{"prompt": "a", "answer": ["b"]}\n'
        '{"messages": [{"role": "assistant", "content": "x"}], "answer": "b"}\n',
        encoding="utf-8",
    )
    with pytest.raises(DataError) as caught:
        opened(tmp_path, tokenizer, kind="prompts", file="p.jsonl")
    assert [line.split(":")[0] for line in caught.value.why.splitlines()] == [
        f"line {number}" for number in (2, 3, 4, 5, 7, 8, 9, 10, 11)
    ]


def test_a_file_that_was_exchanged_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="has changed since this run was created"):
        opened(tmp_path, tokenizer, kind="gsm8k", file=write(tmp_path / "q.jsonl", GSM8K), file_sha256="0" * 64)


def test_questions_too_long_for_the_context_are_left_out_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    entries = [*GSM8K, {"question": "x" * 500, "answer": "#### 1"}]
    task = opened(tmp_path, tokenizer, kind="gsm8k", file=write(tmp_path / "q.jsonl", entries))
    assert task.num_too_long == 1
    with pytest.raises(DataError, match="no questions to train on"):
        opened(tmp_path, tokenizer, room=10, kind="gsm8k", file="q.jsonl")


@pytest.mark.parametrize(
    ("task", "word"),
    [
        ({"kind": "chess"}, "unknown task"),
        ({"kind": "gsm8k"}, "needs a file"),
        ({"kind": "spelling", "file": "x"}, "takes no file"),
        ({"kind": "spelling", "weight": 0.0}, "weight"),
        ({"kind": "spelling", "difficulty": 6}, "difficulty"),
        ({"kind": "spelling", "calculator": "yes"}, "calculator"),
    ],
)
def test_a_task_that_cannot_be_asked_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, task: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match="Invalid task") as caught:
        opened(tmp_path, tokenizer, **task)
    assert word in caught.value.why


def test_a_calculator_needs_its_tokens(tmp_path: Path) -> None:
    make_data(tmp_path / "plain", num_documents=10)
    plain = load_tokenizer(tmp_path / "plain")
    file = write(tmp_path / "q.jsonl", GSM8K)
    assert not opened(tmp_path, plain, kind="gsm8k", file=file).has_calculator
    with pytest.raises(DataError, match="no calculator tokens"):
        opened(tmp_path, plain, kind="gsm8k", file=file, calculator="on")


@pytest.mark.acceptance("X6")
def test_tasks_keep_their_shares_in_every_block_and_each_counts_its_own() -> None:
    order = Order([3.0, 1.0], seed=1)
    asked = [order.at(number) for number in range(512)]
    assert Counter(task for task, _ in asked[:256]) == {0: 192, 1: 64}
    for task in (0, 1):
        counts = [count for which, count in asked if which == task]
        assert counts == list(range(len(counts)))
    assert asked[:256] != [Order([3.0, 1.0], seed=2).at(number) for number in range(256)]


def test_a_task_that_would_never_be_asked_is_refused() -> None:
    with pytest.raises(UsageError, match="never be used"):
        Order([1.0, 0.0001], seed=1)
