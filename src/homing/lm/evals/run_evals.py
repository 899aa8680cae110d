"""Runs one evaluation for `homing eval`: one model on one data set.

Subject   a loaded model folder      Text | TaskFile | Chats   a data set
measure(subject, what, how) -> Measured, for any kind of data set
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from homing.lm.evals.chat_loss import measure_conversations, measure_held_out
from homing.lm.evals.eval_result import Measured
from homing.lm.evals.generated_answers import Asking, measure_answers
from homing.lm.evals.multiple_choice import measure_choices
from homing.lm.evals.task_file import TaskFile
from homing.lm.evals.text_loss import Text, measure_text
from homing.lm.generate import Card, load_for_use, read_card
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer

__all__ = ["Chats", "How", "Subject", "What", "load_subject", "measure"]


@dataclass(frozen=True)
class Chats:
    """Chat files or, if `data_dir` is set, the conversations in it that `homing prep` held out for a chat phase."""

    patterns: list[str]
    data_dir: Path | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.patterns)


What = Text | TaskFile | Chats


@dataclass(frozen=True)
class How:
    window: int = 0  # tokens per row of text; 0 means text_loss.LARGEST_WINDOW, or the context if that is shorter
    at_most: int = 0  # number of documents or conversations; 0 for all
    asking: Asking = field(default_factory=Asking)


@dataclass(frozen=True)
class Subject:
    card: Card
    model: Decoder
    tokenizer: Tokenizer


def load_subject(folder: Path, device: str, base: Path | None = None) -> Subject:
    model, tokenizer = load_for_use(folder, device, base=base)
    return Subject(read_card(folder), model, tokenizer)


def measure(subject: Subject, what: What, how: How, *, notify: Callable[[str], None] = lambda done: None) -> Measured:
    model, tokenizer, folder = subject.model, subject.tokenizer, subject.card.folder
    if isinstance(what, Text):
        return measure_text(model, tokenizer, what, window=how.window, at_most=how.at_most, notify=notify)
    if isinstance(what, Chats) and what.data_dir is not None:
        return measure_held_out(model, tokenizer, what.data_dir, what.name, folder, at_most=how.at_most, notify=notify)
    if isinstance(what, Chats):
        return measure_conversations(model, tokenizer, what.patterns, folder, at_most=how.at_most, notify=notify)
    if what.asks_for_answers:
        return measure_answers(model, tokenizer, what, folder, how.asking, notify=notify)
    return measure_choices(model, tokenizer, what, notify=notify)
