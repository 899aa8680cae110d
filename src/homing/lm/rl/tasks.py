"""Opens the tasks of an rl phase (gsm8k, arithmetic, spelling, custom prompts) and grades answers.

    open_task(task, number) -> draw(n): the n-th training question; held_out(n): questions never used in training

Questions from a file are reshuffled in each pass. Generated questions never run out. Both depend only on (seed, task,
n). `Judging` turns samples into rewards, with a built-in rule or the user's reward.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from homing.errors import DataError, UsageError
from homing.lm.rl.calculator import Calculator
from homing.lm.rl.named_random import source
from homing.lm.rl.prompter import Prompter
from homing.lm.rl.questions import (
    Question,
    arithmetic,
    is_held_out,
    is_right_letters,
    is_right_number,
    is_right_text,
    read_questions,
    spelling,
)
from homing.lm.rl.rollout import Sample
from homing.lm.rl.user_reward import OwnReward
from homing.lm.tokenizer import Tokenizer
from homing.wire.run_json import Rl, RlTask

__all__ = ["KINDS", "Asked", "Judging", "open_task"]

JUDGES: dict[str, Callable[[str, str], bool]] = {
    "arithmetic": is_right_number,
    "gsm8k": is_right_number,
    "prompts": is_right_text,
    "spelling": lambda said, answer: (is_right_letters if " " in answer else is_right_number)(said, answer),
}
MAKERS = {"arithmetic": arithmetic, "spelling": spelling}
KINDS = tuple(JUDGES)
_MOST_TRIES = 1000


class Asked:
    """A task of an rl phase. Prompts with more than `room` tokens are skipped and counted in `num_too_long`."""

    def __init__(
        self, task: RlTask, number: int, *, seed: int, tokenizer: Tokenizer, prompter: Prompter, data_dir: Path,
        room: int,
    ) -> None:  # fmt: skip
        self.task, self._number, self._seed, self._tokenizer = task, number, seed, tokenizer
        self._prompter = prompter
        self.name = task.kind
        self.has_calculator = _has_calculator(task, tokenizer)
        self.num_too_long = 0
        self._room, self._data_dir = room, data_dir
        self._train: list[Question] = []
        self._val: list[Question] = []
        if task.kind not in MAKERS:
            self._read()

    @property
    def num_questions(self) -> int:
        """The number of training questions in the file; 0 if questions are generated."""
        return len(self._train)

    def draw(self, count: int) -> Question:
        """Return training question number `count`, counting from 0."""
        if self.task.kind in MAKERS:
            return self._made("train", count)
        round_number, place = divmod(count, len(self._train))
        order = source("order", self._seed, self._number, round_number).permutation(len(self._train))
        return self._train[int(order[place])]

    def held_out(self, count: int) -> list[Question]:
        """Return at most `count` held-out questions, which are the same for every seed."""
        if self.task.kind not in MAKERS:
            return self._val[:count]
        made = {question.text: question for number in range(4 * count) if (question := self._made("val", number))}
        return list(made.values())[:count]

    def judge(self, completion: str, question: Question) -> float:
        return float(JUDGES[self.task.kind](completion, question.answer))

    def _made(self, split: str, count: int) -> Question:
        # Held-out questions do not depend on the run's seed, so that all runs are evaluated on the same questions.
        seed = self._seed if split == "train" else 0
        make = MAKERS[self.task.kind]
        for attempt in range(_MOST_TRIES):
            drawn = source(split, seed, self.task.kind, self.task.difficulty, self._number, count, attempt)
            text, answer = make(drawn, self.task.difficulty)
            if is_held_out(text) == (split == "val"):
                break
        else:
            raise AssertionError(f"no {split} question of {self.task.kind} in {_MOST_TRIES} tries")
        ids = self._prompter.ids([{"role": "user", "content": text}])
        if len(ids) > self._room:
            raise DataError(
                what=f"A question from the task {self.task.kind} does not fit in the context.",
                why=f"{text!r} has {len(ids)} tokens, but answer_tokens leaves only {self._room}.",
                fix="Lower answer_tokens or the difficulty, or increase model.context.",
            )
        return Question(text, ids, answer)

    def _read(self) -> None:
        task = self.task
        questions = self._fitting(task.file, task.file_sha256)
        if task.val_file:
            self._train, self._val = questions, self._fitting(task.val_file, task.val_file_sha256)
            seen = {question.text for question in self._val}
            self._train = [question for question in questions if question.text not in seen]
        else:
            self._train = [question for question in questions if not is_held_out(question.text)]
            self._val = [question for question in questions if is_held_out(question.text)]
        if not self._train:
            raise DataError(
                what=f"The task {task.kind} has no questions to train on.",
                why=f"Of the questions in {task.file}, {self.num_too_long} are too long for the context"
                f" and {len(self._val)} are held out.",
                fix="Add questions, or lower answer_tokens.",
            )
        # Shuffle the held-out questions, so that the first ones are a fair sample.
        order = source("val", self._number).permutation(len(self._val))
        self._val = [self._val[int(place)] for place in order]

    def _fitting(self, name: str, sha256: str) -> list[Question]:
        path = Path(name) if Path(name).is_absolute() else self._data_dir / name
        needs_answers = not self.task.reward
        found = read_questions(
            path, self.task.kind, self._tokenizer, self._prompter, sha256=sha256, needs_answers=needs_answers
        )
        fitting = [question for question in found if len(question.ids) <= self._room]
        self.num_too_long += len(found) - len(fitting)
        return fitting


def open_task(
    task: RlTask, number: int, *, seed: int, tokenizer: Tokenizer, prompter: Prompter, data_dir: Path, room: int
) -> Asked:
    problems = []
    if task.kind not in KINDS:
        problems.append(f"unknown task {task.kind!r}; known tasks: {', '.join(KINDS)}")
    if (task.kind in MAKERS) == bool(task.file):
        problems.append(f"{task.kind} {'generates its questions and takes no file' if task.file else 'needs a file'}")
    if not (np.isfinite(task.weight) and task.weight > 0):
        problems.append(f"weight must be greater than 0, not {task.weight}")
    if not 1 <= task.difficulty <= 5:
        problems.append(f"difficulty must be from 1 to 5, not {task.difficulty}")
    if task.calculator not in ("auto", "on", "off"):
        problems.append(f"calculator must be auto, on or off, not {task.calculator!r}")
    if problems:
        raise UsageError(
            what=f"Invalid task {task.kind} in the rl phase.",
            why="\n".join(problems),
            fix=f"Correct rl.tasks[{number}] in the rl phase.",
        )
    return Asked(task, number, seed=seed, tokenizer=tokenizer, prompter=prompter, data_dir=data_dir, room=room)


def _has_calculator(task: RlTask, tokenizer: Tokenizer) -> bool:
    if task.calculator == "on":
        Calculator(tokenizer)  # raises if the tokenizer lacks the tool tokens
        return True
    return task.calculator == "auto" and task.kind == "gsm8k" and Calculator.fits(tokenizer)


class Judging:
    """Grades samples. It is a context manager, because it starts and stops a separate process for each reward.py."""

    def __init__(
        self, tasks: Sequence[Asked], rl: Rl, *, tokenizer: Tokenizer, stop_ids: Sequence[int], data_dir: Path,
        notify: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._tasks, self._tokenizer, self._stop_ids = tasks, tokenizer, frozenset(stop_ids)
        self._open = contextlib.ExitStack()
        self._own: dict[int, OwnReward] = {}
        for number, asked in enumerate(tasks):
            if asked.task.reward:
                self._own[number] = OwnReward(
                    data_dir / asked.task.reward, sha256=asked.task.reward_sha256, timeout_s=rl.reward_timeout_s,
                    memory_bytes=rl.reward_memory_bytes, notify=notify,
                )  # fmt: skip

    def __enter__(self) -> Judging:
        with contextlib.ExitStack() as opening:  # if one reward fails to open, close those that are already open
            for own in self._own.values():
                opening.enter_context(own)
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def judge(self, asked: Sequence[tuple[int, Question]], samples: Sequence[Sample]) -> list[float | None]:
        """Return each sample's reward, or None if its reward.py failed. `asked` holds (task number, question) pairs."""
        texts = [self._text(sample) for sample in samples]
        rewards: list[float | None] = [
            None if task in self._own else self._tasks[task].judge(text, question)
            for (task, question), text in zip(asked, texts, strict=True)
        ]
        for number, own in self._own.items():
            places = [place for place, (task, _) in enumerate(asked) if task == number]
            given = own.judge([(asked[at][1].text, texts[at], asked[at][1].answer) for at in places])
            for place, reward in zip(places, given, strict=True):
                rewards[place] = reward
        return rewards

    def _text(self, sample: Sample) -> str:
        """Return the sample's text, including the names of tool tokens, but not the stop token."""
        ids = sample.ids[:-1] if sample.ids and sample.ids[-1] in self._stop_ids else sample.ids
        return self._tokenizer.decode(ids)
