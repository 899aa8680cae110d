"""The held-out questions of an rl phase as evaluation tasks: generated ones, or from its files.

RlTask -> the same held-out questions as the trainer's -> TaskFile, graded as in the phase
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from homing.errors import DataError
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.evals.question_sets import made_up
from homing.lm.evals.task_file import Item, Open, TaskFile
from homing.lm.rl.named_random import source
from homing.lm.rl.questions import is_held_out
from homing.lm.rl.tasks import MAKERS
from homing.questions import Entry, read_entries, shorten_problems
from homing.wire.run_json import Rl, RlTask

__all__ = ["file_of", "rl_task"]


def file_of(task: RlTask) -> tuple[str, str]:
    """Return the file with the held-out questions, and its hash; ("", "") if they are generated."""
    return (task.val_file, task.val_file_sha256) if task.val_file else (task.file, task.file_sha256)


def rl_task(rl: Rl, number: int, path: Path | None, *, at_most: int) -> tuple[TaskFile, int]:
    """Return a task of the phase, and how many of its questions are skipped because they are not a single user message.

    `path`: the file that `file_of` names.
    """
    task = rl.tasks[number]
    if task.kind in MAKERS:
        made = made_up(task.kind, task.difficulty, at_most)
        return dataclasses.replace(made, answer_tokens=rl.max_new_tokens), 0
    assert path is not None, "questions that are not made up lie in a file"
    entries, problems = read_entries(path.read_bytes(), task.kind, needs_answers=True, num_ids=None)
    if problems:
        raise DataError(
            what=f"{path} cannot be used as questions of the task {task.kind}.",
            why="\n".join(shorten_problems(problems)),
            fix="Restore the file that the run used, or use other questions: --task FILE.jsonl",
        )
    plain = [entry for entry in entries if len(entry.messages) == 1]
    held_out = plain if task.val_file else [entry for entry in plain if is_held_out(_question(entry))]
    # Shuffled, so that the first ones are a fair sample.
    order = source("val", number).permutation(len(held_out))
    chosen = [held_out[int(place)] for place in order][:at_most]
    items: list[Item] = [
        Open(line, _question(entry), entry.answer, task.kind == "gsm8k") for line, entry in enumerate(chosen, 1)
    ]
    name = path.name if task.val_file else f"{path.name}, held out"
    return TaskFile(name, task.kind, items, file_sha256(path), rl.max_new_tokens), len(entries) - len(plain)


def _question(entry: Entry) -> str:
    return entry.messages[-1]["content"]
