"""Evaluates generated answers to questions with known answers: GSM8K, arithmetic, spelling, or the user's own file.

    question -> the model's own chat template -> n samples -> right or wrong (graded as in `lm/rl`) -> pass@1, pass@k

With one sample per question, the answer is generated at temperature 0, and the result is the accuracy. With more
samples, pass@k is the unbiased estimate of the chance that at least one of k samples is right: 1 - C(n - right, k) /
C(n, k), averaged over questions. A question that does not fit into the context counts as wrong, and is reported.

`rl_task` builds a task from an rl phase's held-out questions, which are graded as in that phase.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from homing.errors import DataError, UsageError
from homing.lm.data.chat.render import ChatTokens, Renderer
from homing.lm.data.chat.template import find_template
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.evals.eval_result import Measured, Score, joint_sha256, share
from homing.lm.evals.task_file import Item, Open, TaskFile
from homing.lm.model import Decoder
from homing.lm.rl.calculator import Calculator
from homing.lm.rl.named_random import draws, source
from homing.lm.rl.prompter import chatml
from homing.lm.rl.questions import is_held_out, is_right_number, is_right_text
from homing.lm.rl.rl_metrics import pass_at_k
from homing.lm.rl.rollout import Sample, Sampler
from homing.lm.rl.tasks import JUDGES, MAKERS
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.tokenizer import IM_END
from homing.rl_question_files import Entry, read_entries, shorten_problems
from homing.wire.run_json import Rl, RlTask

__all__ = ["Asking", "file_of", "made_up", "measure_answers", "rl_task"]

NEW_TOKENS = 256  # default maximum length of an answer, if the context has room for it

_log = logging.getLogger(__name__)
_ROWS_AT_A_TIME = {"cuda": 256}
_ROWS_ELSEWHERE = 16
# If the longest question leaves less than 1/8 of the context for answers, half of the context is reserved for answers.
_LEAST_OF = 8
# Maximum number of questions to generate for each question needed. Only one generated question in ten is held out, and
# the others are discarded.
_TRIES = 100


@dataclass(frozen=True)
class Asking:
    """How answers are sampled."""

    pass_at: tuple[int, ...] = ()  # values of k for which pass@k is reported; pass@1 is always reported
    num_samples: int = 0  # number of samples per question; 0 means the largest k in `pass_at`
    temperature: float | None = None  # None means 0 with one sample per question, and 0.8 with several
    max_new_tokens: int | None = None  # None means NEW_TOKENS, or fewer if the context has less room
    seed: int = 0

    @property
    def samples(self) -> int:
        return self.num_samples or max(self.pass_at, default=1)

    @property
    def heat(self) -> float:
        return self.temperature if self.temperature is not None else 0.0 if self.samples == 1 else 0.8

    def check(self) -> None:
        if (largest := max(self.pass_at, default=1)) > self.samples:
            raise UsageError(
                what=f"pass@{largest} cannot be computed from {self.samples} samples per question.",
                why=f"It needs at least {largest} samples for each question.",
                fix=f"Use --samples {largest}",
            )
        if self.samples > 1 and self.heat == 0:
            raise UsageError(
                what="Several samples at temperature 0 would all be the same.",
                why=f"--temperature is 0, and --samples is {self.samples}.",
                fix="Use --temperature 0.8, or remove --pass-at and --samples.",
            )


def made_up(kind: str, difficulty: int, count: int) -> TaskFile:
    """Generate `arithmetic` or `spelling` questions that no rl phase trains on. All calls return the same questions."""
    questions: dict[str, str] = {}
    for number in range(count * _TRIES):
        text, answer = MAKERS[kind](source("eval", kind, difficulty, number), difficulty)
        if is_held_out(text):
            questions.setdefault(text, answer)
        if len(questions) == count:
            break
    items = [Open(number, text, answer, False) for number, (text, answer) in enumerate(questions.items(), 1)]
    sha256 = joint_sha256(f"{text}\t{answer}" for text, answer in questions.items())
    return TaskFile(f"{kind}:{difficulty}", kind, list(items), sha256)


def measure_answers(
    model: Decoder, tokenizer: Tokenizer, task: TaskFile, folder: Path, asking: Asking,
    *, notify: Callable[[str], None] = lambda done: None,
) -> Measured:  # fmt: skip
    """Evaluate the model's answers to a task. `folder` contains the model and its chat template."""
    asking.check()
    items = [item for item in task.items if isinstance(item, Open)]
    prompt = _prompter(folder, tokenizer)
    prompts = [prompt.ids(item.question) for item in items]
    new_tokens, notes = _new_tokens(asking, task, model.shape.context, max(map(len, prompts)))
    room = model.shape.context - new_tokens
    if room < 1:
        raise UsageError(
            what=f"Answers of up to {new_tokens:,} new tokens leave no room for a question.",
            why=f"The model's context is {model.shape.context:,} tokens.",
            fix=f"Remove --new-tokens, or lower it: --new-tokens {max(1, model.shape.context // 2)}",
        )
    asked = [number for number, ids in enumerate(prompts) if len(ids) <= room]
    if not asked:
        raise DataError(
            what=f"No question in {task.name} fits in the context.",
            why=f"The shortest has {min(map(len, prompts)):,} tokens, but the new tokens leave room for only {room:,}.",
            fix="Lower --new-tokens, or use a model with a longer context.",
        )
    right = np.zeros(len(items), dtype=np.int64)
    num_cut = 0
    # As in rl phases, the model may use the calculator only for word problems. It would answer a plain sum by merely
    # copying it into the calculator.
    may_call = [items[number].is_number for number in asked]
    asked_ids = [prompts[number] for number in asked]
    drawn = _draw(model, tokenizer, prompt.stop_ids, asked_ids, may_call, asking, new_tokens, notify)
    for number, samples in zip(asked, drawn, strict=True):
        texts = [_text(tokenizer, sample, prompt.stop_ids) for sample in samples]
        right[number] = sum(_is_right(task.form, text, items[number]) for text in texts)
        num_cut += sum(not sample.is_ended for sample in samples)
    notes += _notes(num_too_long := len(items) - len(asked), num_cut)
    counts = {"questions": len(items), "samples": asking.samples * len(items)}
    counts |= {"too_long": num_too_long, "cut_off": num_cut}
    settings = {"samples": asking.samples, "temperature": asking.heat, "new_tokens": new_tokens, "seed": asking.seed}
    scores, asked_by = _scores(asking, right), {"asked_by": prompt.name}
    return Measured(task.name, "answers", scores, counts, task.sha256, {**settings, **asked_by}, notes)


def _new_tokens(asking: Asking, task: TaskFile, context: int, longest: int) -> tuple[int, list[str]]:
    """Return the maximum answer length, and notes about it.

    This is the requested length or, failing that, the limit of the task's rl phase. Without either, it is the default,
    reduced if the context does not have that much room after the longest question.
    """
    if asked := asking.max_new_tokens or task.answer_tokens:
        return asked, []
    fitting = context - longest
    if fitting < context // _LEAST_OF:  # otherwise, one very long question would shorten the answers to all questions
        fitting = max(1, context // 2)
    if fitting >= NEW_TOKENS:
        return NEW_TOKENS, []
    return fitting, [f"The context of {context:,} tokens limits answers to {fitting} tokens."]


def _notes(num_too_long: int, num_cut: int) -> list[str]:
    notes = [f"{num_too_long} questions do not fit in the context and count as wrong."] if num_too_long else []
    return notes + ([f"{num_cut} samples were truncated at the maximum length (--new-tokens)."] if num_cut else [])


def _scores(asking: Asking, right: np.ndarray) -> list[Score]:
    n, num_questions = asking.samples, len(right)
    what = f"{num_questions:,} questions"
    if n == 1:
        return [share("acc", right > 0, what)]
    scores = []
    for k in sorted({1, *asking.pass_at}):
        chances = np.array([pass_at_k(n, int(count), k) for count in right])
        scores.append(Score(f"pass@{k}", chances, np.ones(num_questions), what, is_more_better=True))
    return scores


@dataclass(frozen=True)
class _Prompter:
    name: str
    ids: Callable[[str], list[int]]
    stop_ids: list[int]


def _prompter(folder: Path, tokenizer: Tokenizer) -> _Prompter:
    template = find_template(folder)
    stop_ids = {*tokenizer.stop_ids, tokenizer.end_of_text_id, *_marker(tokenizer)}
    if template is None:
        return _Prompter("ChatML", lambda text: [*chatml(tokenizer, [_user(text)])], sorted(stop_ids))
    renderer = Renderer(template, ChatTokens(folder))
    end_id = renderer.end_id()
    stops = sorted(stop_ids | ({end_id} if end_id is not None else set()))
    return _Prompter("the model's chat template", lambda text: renderer.prompt([_user(text)]), stops)


def _marker(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.specials[IM_END]] if IM_END in tokenizer.specials else []


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _draw(
    model: Decoder, tokenizer: Tokenizer, stop_ids: list[int], prompts: list[list[int]], may_call: list[bool],
    asking: Asking, new_tokens: int, notify: Callable[[str], None],
) -> list[list[Sample]]:  # fmt: skip
    """Sample answers to each prompt. The random draws depend on the seed and the prompt's index, not on batching."""
    n = asking.samples
    calculator = Calculator(tokenizer) if Calculator.fits(tokenizer) else None
    sampler = Sampler(
        model, stop_ids=stop_ids, calculator=calculator, max_new_tokens=new_tokens, temperature=asking.heat,
        top_k=0, graphs="auto", notify=lambda kind, text: _log.warning(text),
    )  # fmt: skip
    at_once = max(1, _ROWS_AT_A_TIME.get(model.device.type, _ROWS_ELSEWHERE) // n)
    made: list[list[Sample]] = []
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        drawn = [
            draws(new_tokens, "eval", asking.seed, start + number, sample)
            for number in range(len(part))
            for sample in range(n)
        ]
        samples = sampler.sample(part, np.stack(drawn), may_call=may_call[start : start + at_once])
        made += [samples[place : place + n] for place in range(0, len(samples), n)]
        notify(f"{len(made):,} of {len(prompts):,} questions")
    return made


def _text(tokenizer: Tokenizer, sample: Sample, stop_ids: Sequence[int]) -> str:
    ids = sample.ids[:-1] if sample.ids and sample.ids[-1] in stop_ids else sample.ids
    return tokenizer.decode(ids)


def _is_right(form: str, said: str, item: Open) -> bool:
    if form in JUDGES:
        return JUDGES[form](said, item.answer)
    return (is_right_number if item.is_number else is_right_text)(said, item.answer)


# -- held-out questions of an rl phase ---------------------------------------------------------------------------------


def file_of(task: RlTask) -> tuple[str, str]:
    """Return the path and hash of the file with the held-out questions, or ("", "") if homing generates them."""
    return (task.val_file, task.val_file_sha256) if task.val_file else (task.file, task.file_sha256)


def rl_task(rl: Rl, number: int, path: Path | None, *, at_most: int) -> tuple[TaskFile, int]:
    """Return one of the phase's tasks, and how many questions were skipped because they have more than one message.

    `path` is the file that `file_of` returned.
    """
    task = rl.tasks[number]
    if task.kind in MAKERS:
        made = made_up(task.kind, task.difficulty, at_most)
        return dataclasses.replace(made, answer_tokens=rl.max_new_tokens), 0
    assert path is not None, "questions that are not generated come from a file"
    entries, problems = read_entries(path.read_bytes(), task.kind, needs_answers=True, num_ids=None)
    if problems:
        raise DataError(
            what=f"The questions in {path} cannot be used for the task {task.kind}.",
            why="\n".join(shorten_problems(problems)),
            fix="Restore the file that the run used, or use other questions: --task FILE.jsonl",
        )
    plain = [entry for entry in entries if len(entry.messages) == 1]
    held_out = plain if task.val_file else [entry for entry in plain if is_held_out(_question(entry))]
    # Shuffle the questions, so that the first ones are a representative sample.
    order = source("val", number).permutation(len(held_out))
    chosen = [held_out[int(place)] for place in order][:at_most]
    items: list[Item] = [
        Open(line, _question(entry), entry.answer, task.kind == "gsm8k") for line, entry in enumerate(chosen, 1)
    ]
    name = path.name if task.val_file else f"{path.name}, held out"
    return TaskFile(name, task.kind, items, file_sha256(path), rl.max_new_tokens), len(entries) - len(plain)


def _question(entry: Entry) -> str:
    return entry.messages[-1]["content"]
