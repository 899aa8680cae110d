"""Task files: common formats are read, and every fault is reported with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homing.errors import DataError
from homing.lm.evals.task_file import Choice, Open, read_task

CHOICE = {"question": "The sky is", "choices": ["blue", "loud"], "gold": 0}
CLOZE = {"context": "The sky is", "continuation": "blue"}
ANSWER = {"question": "Three and four?", "answer": "3 + 4 = 7 #### 7"}


def write(path: Path, *lines: Any) -> str:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("line", "pairs", "gold"),
    [
        (CHOICE, [("The sky is", "blue"), ("The sky is", "loud")], 0),
        ({"query": "Q", "choices": ["a b", "c"], "gold": 1}, [("Q", "a b"), ("Q", "c")], 1),
        ({"ctx": "Q", "endings": ["x", "y"], "label": "1"}, [("Q", "x"), ("Q", "y")], 1),
        ({"question": "Q", "options": ["x", "y"], "answer": "B"}, [("Q", "x"), ("Q", "y")], 1),
        ({"question": "Q", "choices": ["x", "y"], "answer": "y"}, [("Q", "x"), ("Q", "y")], 1),
        (
            {"question": "Q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
            [("Q", "x"), ("Q", "y")],
            1,
        ),
        (
            {"context_options": ["The cat", "The mat"], "continuation": "purrs", "gold": 0},
            [("The cat", "purrs"), ("The mat", "purrs")],
            0,
        ),
        (CLOZE, [("The sky is", "blue")], 0),
    ],
)
def test_the_common_forms_are_read(line: Any, pairs: list[tuple[str, str]], gold: int, tmp_path: Path) -> None:
    (item,) = read_task(write(tmp_path / "task.jsonl", line)).items
    assert item == Choice(1, pairs, gold)


def test_open_questions_are_numbers_where_they_say_so(tmp_path: Path) -> None:
    task = read_task(write(tmp_path / "a.jsonl", ANSWER, {"prompt": "Capital of France?", "answer": "Paris"}))
    assert task.form == "answers"
    assert task.items == [
        Open(1, "Three and four?", "3 + 4 = 7 #### 7", True),
        Open(2, "Capital of France?", "Paris", False),
    ]


def test_blank_lines_count_in_the_numbers_and_a_part_is_the_first_part(tmp_path: Path) -> None:
    task = read_task(write(tmp_path / "a.jsonl", CLOZE, b"", CLOZE, CLOZE), at_most=2)
    assert [item.line for item in task.items] == [1, 3]


def without(name: str, line: dict[str, Any] = CHOICE) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != name}


FAULTS: list[tuple[dict[str, Any], Any, str]] = [
    (CHOICE, b'{"question": "cut off", "choi', "not JSON"),
    (CHOICE, b'{"question": "\xff"}', "not UTF-8"),
    (CHOICE, b'{"question": "Q", "question": "R", "choices": ["a", "b"], "gold": 0}', "duplicate key"),
    (CHOICE, b"[" * 100_000, "JSON"),
    (CHOICE, [1, 2], "expected an object, found a list"),
    (CHOICE, "text", "expected an object, found text"),
    (CHOICE, without("question"), "no question or query"),
    (CHOICE, without("gold"), "no gold or label"),
    (CHOICE, without("choices"), "no choices, continuation or answer"),
    (CHOICE, {**CHOICE, "choices": ["only"]}, "at least 2"),
    (CHOICE, {**CHOICE, "choices": "blue, loud"}, "not a list"),
    (CHOICE, {**CHOICE, "choices": ["blue", 7]}, "item 2 is a number, not text"),
    (CHOICE, {**CHOICE, "choices": ["blue", " "]}, "item 2 is empty"),
    (CHOICE, {**CHOICE, "choices": ["blue", "blue"]}, "appears twice"),
    (CHOICE, {**CHOICE, "gold": 2}, "numbered from 0"),
    (CHOICE, {**CHOICE, "gold": -1}, "numbered from 0"),
    (CHOICE, {**CHOICE, "gold": True}, "not the number, letter or text of a choice"),
    (CHOICE, {**CHOICE, "gold": "green"}, "not the number, letter or text of a choice"),
    (CHOICE, {**CHOICE, "label": 1}, "keep one"),
    (CHOICE, {**CHOICE, "question": None}, "null, not text"),
    (CHOICE, CLOZE, "in the cloze format"),
    (CHOICE, {**CHOICE, "choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}, "3 labels for 2"),
    (CLOZE, {**CLOZE, "continuation": ""}, "is empty"),
    (CLOZE, without("context", CLOZE), "no context"),
    (ANSWER, {**ANSWER, "answer": "seven ####"}, "no number after"),
    (ANSWER, {**ANSWER, "answer": "+"}, "no letters or digits"),
    (ANSWER, {**ANSWER, "answer": ["7"]}, "neither text nor a number"),
    (ANSWER, {**ANSWER, "question": "  "}, "is empty"),
]


@pytest.mark.acceptance(100)
@pytest.mark.parametrize(("good", "bad", "said"), FAULTS, ids=[said for _, _, said in FAULTS])
def test_a_fault_is_reported_with_its_line_and_nothing_else_is(good: Any, bad: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "task.jsonl", good, good, bad, good)
    with pytest.raises(DataError) as refused:
        read_task(path)
    assert refused.value.why.count("\n") == 0
    assert refused.value.why.startswith(f"{path}:3: ")
    assert said in refused.value.why


def test_all_faults_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    lines = [CHOICE, *(bad for good, bad, _ in FAULTS if good is CHOICE)]
    path = write(tmp_path / "task.jsonl", *lines)
    with pytest.raises(DataError) as refused:
        read_task(path)
    messages = refused.value.why.splitlines()
    assert [line.split(":")[1] for line in messages[:20]] == [str(number) for number in range(2, 22)]
    assert f"{len(lines) - 1} lines are invalid" in refused.value.what
    assert messages[20] == f"and {len(lines) - 21} more."


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no lines"):
        read_task(write(tmp_path / "blank.jsonl", b"", b""))
    with pytest.raises(DataError, match="does not exist"):
        read_task(str(tmp_path / "nowhere.jsonl"))
