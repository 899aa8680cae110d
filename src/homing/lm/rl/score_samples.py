"""Turns samples into rewards, by a built-in rule or with the user's reward.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from homing.lm.rl.questions import Question
from homing.lm.rl.reward import OwnReward
from homing.lm.rl.rollout import Sample
from homing.lm.rl.tasks import Asked
from homing.lm.tokenizer import Tokenizer
from homing.wire.run_json import Rl

__all__ = ["Judging"]


class Judging:
    """Grades samples. A context manager, because a reward.py runs in a separate process."""

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
        with contextlib.ExitStack() as opening:  # if a later one fails to open, close those already open
            for own in self._own.values():
                opening.enter_context(own)
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def judge(self, asked: Sequence[tuple[int, Question]], samples: Sequence[Sample]) -> list[float | None]:
        """Return a reward per sample, given its task and question; None if a reward.py failed."""
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
        """Return the sample's text, with tool tokens by name and without the token that ended it."""
        ids = sample.ids[:-1] if sample.ids and sample.ids[-1] in self._stop_ids else sample.ids
        return self._tokenizer.decode(ids)
