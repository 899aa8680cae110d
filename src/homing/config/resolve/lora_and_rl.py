"""Resolve a phase's `lora` and `rl` sections. Keys that would have no effect are reported as mistakes."""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path
from typing import Any

from homing.config.parse.check import Trace
from homing.config.parse.key_suggestions import nearest
from homing.config.parse.source import KeyPath
from homing.config.prepared_data import sha256_of, tokenizer_specials, tokenizer_vocab_size
from homing.config.schema.phase import PhaseLora, PhaseRl, RlTask
from homing.config.weights.open_weights import chat_template_in
from homing.errors import DataError
from homing.rl_question_files import NO_LINES, TURN_MARKS, read_entries, shorten_problems
from homing.wire import run_json as wire_run
from homing.wire.run_json import Lora, Rl

__all__ = ["LORA_TARGETS", "resolve_lora", "resolve_rl"]

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
_READS_A_FILE = ("gsm8k", "prompts")
_ANSWER_TOKENS = 256  # default answer length, if it fits in half of the context
_IS_MADE_UP = ("arithmetic", "spelling")


def resolve_lora(trace: Trace, number: int) -> Lora:
    """Resolve the `lora` section of a phase whose method is lora or qlora."""
    at, wire = ("phases", number, "lora"), f"phases.{number}.lora"
    phase = trace.file.phases[number]
    has_weights = number > 0 or phase.init_from or getattr(trace.file.model, "from")
    if not has_weights and trace.is_sound(("phases", number, "init_from"), ("model", "from")):
        problem = f"{phase.method} needs trained weights, and there are none yet."
        trace.wrong(("phases", number, "method"), problem, "Set model.from or init_from, or use method: full.")
    if trace.file.model.family == "swift":
        trace.wrong(
            ("phases", number, "method"), "swift does not support adapters.", "Use method: full, or family: stock."
        )
    before = _written(trace, number - 1) if _continues_adapters(trace, number) else {}
    why = f"derived from phases.{number - 1}.lora" if before else "default"

    def take(name: str, key: str) -> Any:
        """Return a setting. It defaults to the previous phase's value, so that training continues the same adapters."""
        path = (*at, key)
        return trace.take(f"{wire}.{name}", path, before.get(key, trace.value(path)), why)

    rank = take("rank", "rank")
    is_as_before = bool(before) and rank == before["rank"]
    alpha, alpha_why = (before["alpha"], why) if is_as_before else (2.0 * rank, f"derived from {wire}.rank")
    return Lora(
        rank=rank,
        alpha=float(trace.take(f"{wire}.alpha", (*at, "alpha"), alpha, alpha_why)),
        dropout=trace.plain(f"{wire}.dropout", (*at, "dropout")),
        targets=_targets(trace, (*at, "targets"), take("targets", "targets")),
        is_rslora=take("is_rslora", "rslora"),
        is_dora=take("is_dora", "dora"),
    )


def _continues_adapters(trace: Trace, number: int) -> bool:
    """Return True if the phase continues to train the previous phase's adapters."""
    if number == 0 or trace.file.phases[number].init_from:
        return False
    return all(phase.method != "full" for phase in trace.file.phases[number - 1 : number + 1])


def _written(trace: Trace, number: int) -> dict[str, Any]:
    """Return the adapter settings of a phase without recording origins, because this run may not train that phase."""
    before = _written(trace, number - 1) if _continues_adapters(trace, number) else {}
    found: dict[str, Any] = {}
    for name in PhaseLora.model_fields:
        path = ("phases", number, "lora", name)
        found[name] = trace.value(path) if trace.is_given(path) else before.get(name, trace.value(path))
    if not trace.is_given(("phases", number, "lora", "alpha")) and found["rank"] != before.get("rank"):
        found["alpha"] = 2.0 * found["rank"]
    return found


def _targets(trace: Trace, path: KeyPath, given: list[str]) -> list[str]:
    typed = [name.removesuffix("_proj") for name in given]
    for place, name in enumerate(typed):
        if name not in (*LORA_TARGETS, "all"):
            near = nearest(name, [*LORA_TARGETS, "all"])
            hint = f"Did you mean {near}? " if near else ""
            trace.wrong(
                (*path, place), f"{name!r} is not a block matrix.", f"{hint}Use {', '.join(LORA_TARGETS)} or all."
            )
    if not typed:
        trace.wrong(path, "lists no matrix.", f"Use some of {', '.join(LORA_TARGETS)}, or all.")
    return list(LORA_TARGETS) if "all" in typed else [name for name in LORA_TARGETS if name in typed]


def resolve_rl(trace: Trace, number: int, context: int, tokenizer: Path | None, turns: Path | None = None) -> Rl:
    """Resolve the `rl` section of a phase of kind rl.

    `tokenizer`: tokenizer file for the questions; None if there is none yet. `turns`: file that describes how the chat
    template of open weights formats a question; None if it is not prepared, or the run does not use open weights.
    """
    at, wire = ("phases", number, "rl"), f"phases.{number}.rl"
    rl = trace.file.phases[number].rl
    if not rl.tasks:
        trace.wrong((*at, "tasks"), "rl has no tasks.", "For example rl: {tasks: [{kind: arithmetic}]}")
    for name in ("clip_low", "clip_high"):
        if trace.is_given((*at, name)) and rl.updates_per_rollout == 1:
            trace.wrong(
                (*at, name), "has no effect with one update per rollout.", "Raise updates_per_rollout, or delete it."
            )
    # By default, the answer takes up to half of the context, which leaves the other half for the question.
    by_default = min(_ANSWER_TOKENS, max(1, context // 2))
    num_new = trace.take(
        f"{wire}.max_new_tokens", (*at, "answer_tokens"), by_default, f"derived from model.context {context}"
    )
    if num_new > context - 8 and trace.is_sound((*at, "answer_tokens"), ("model", "context")):
        problem = f"{num_new} answer tokens leave no room for a question in a context of {context}."
        trace.wrong((*at, "answer_tokens"), problem, f"Allowed: at most {context - 8}.")
    units = {"reward_timeout": "reward_timeout_s", "reward_memory": "reward_memory_bytes"}
    plain: dict[str, Any] = {
        units.get(name, name): trace.plain(f"{wire}.{units.get(name, name)}", (*at, name))
        for name in PhaseRl.model_fields
        if name not in ("tasks", "answer_tokens")
    }
    tasks = [_task(trace, (*at, "tasks", place), task) for place, task in enumerate(rl.tasks)]
    _check_questions(trace, (*at, "tasks"), tasks, tokenizer, turns)
    return Rl(tasks=tasks, max_new_tokens=num_new, **plain)


def _task(trace: Trace, at: KeyPath, task: RlTask) -> wire_run.RlTask:
    wire = ".".join(str(part) for part in at)
    for name in ("file", "val_file"):
        if getattr(task, name) and task.kind not in _READS_A_FILE:
            trace.wrong((*at, name), f"{task.kind} reads no file.", "Delete it, or use kind: prompts.")
    if task.kind in _READS_A_FILE and not task.file and trace.is_sound((*at, "file")):
        trace.wrong((*at, "file"), f"{task.kind} needs a file of JSON lines.", "For example file: gsm8k/train.jsonl")
    if trace.is_given((*at, "difficulty")) and task.kind not in _IS_MADE_UP:
        trace.wrong((*at, "difficulty"), f"has no effect on {task.kind}.", "Delete it.")
    if trace.is_given((*at, "calculator")) and task.kind not in ("gsm8k", "arithmetic"):
        trace.wrong((*at, "calculator"), f"has no effect on {task.kind}.", "Delete it.")
    taken = {name: trace.plain(f"{wire}.{name}", (*at, name)) for name in RlTask.model_fields}
    made = wire_run.RlTask(**taken)
    for name in ("file", "val_file", "reward"):
        if typed := getattr(made, name):
            path = Path(typed).expanduser().absolute()
            if not path.is_file():
                trace.wrong((*at, name), f"{typed} does not exist.", "Fix the path.")
                continue
            if name == "reward":
                _check_reward(trace, (*at, name), path)
            found: dict[str, Any] = {name: str(path), f"{name}_sha256": sha256_of(path)}
            made = dataclasses.replace(made, **found)
            trace.note(f"{wire}.{name}_sha256", f"derived from {wire}.{name}")
    return made


def _check_questions(
    trace: Trace, at: KeyPath, tasks: list[wire_run.RlTask], tokenizer: Path | None, turns: Path | None
) -> None:
    """Check every line as the trainer does. On an instance, an invalid line would end the run at its first step."""
    specials, num_ids = list[str](), None
    if tokenizer is not None:
        try:
            specials, num_ids = tokenizer_specials(tokenizer), tokenizer_vocab_size(tokenizer)
        except DataError as exc:
            trace.wrong(at, f"{exc.what} {exc.why}", "Run homing prep RUN again.")
    missing = [mark for mark in TURN_MARKS if num_ids is not None and mark not in specials]
    has_template = tokenizer is not None and bool(chat_template_in(tokenizer.parent))
    missing = [] if has_template else missing  # the template has its own turn tokens
    for place, task in enumerate(tasks):
        is_in_turns = task.kind in _IS_MADE_UP
        for name in ("file", "val_file"):
            if not getattr(task, f"{name}_sha256"):  # not set, or the file is missing, which is already reported
                continue
            path = Path(getattr(task, name))
            sha256 = getattr(task, f"{name}_sha256")
            has_turns, problems = _looked_through(path, sha256, task.kind, not task.reward, num_ids)
            is_in_turns |= has_turns
            if problems:
                fix = "Use a file with questions." if problems == [NO_LINES] else "Fix these lines or remove them."
                trace.wrong((*at, place, name), f"{path}: {'; '.join(shorten_problems(problems))}.", fix)
        if has_template and is_in_turns and turns is not None and not turns.is_file():
            trace.wrong(
                (*at, place, "kind"),
                f"needs chat turns, but {turns}, which describes the chat template of the weights, does not exist.",
                "Run homing prep RUN to create it. If that fails, write the prompts as token ids.",
            )
        if missing and is_in_turns:
            trace.wrong(
                (*at, place, "kind"),
                f"needs chat turns, but {tokenizer} has no {' and no '.join(missing)} and no chat template.",
                "Prepare with tokenizer.specials: standard, or write the prompts as token ids.",
            )


@functools.lru_cache(maxsize=64)
def _looked_through(
    path: Path, sha256: str, kind: str, needs_answers: bool, num_ids: int | None
) -> tuple[bool, list[str]]:
    """Return whether any question is a chat turn, and a list of the problems found in the lines.

    The result is cached by content, because one command may read the run file several times.
    """
    entries, problems = read_entries(path.read_bytes(), kind, needs_answers=needs_answers, num_ids=num_ids)
    return any(not entry.ids for entry in entries), problems


def _check_reward(trace: Trace, at: KeyPath, path: Path) -> None:
    """Parse the reward file without running it, so that a typo is found before anything is rented."""
    form = "It needs: def reward(prompt, completion, answer)"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as exc:
        line = f", line {exc.lineno}" if isinstance(exc, SyntaxError) else ""
        trace.wrong(at, f"{path}{line}: {getattr(exc, 'msg', exc)}.", "Fix the file.")
        return
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names |= {target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
              if isinstance(target, ast.Name)}  # fmt: skip
    names |= {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              for alias in node.names}  # fmt: skip
    if "reward" not in names and "*" not in names:
        trace.wrong(at, f"{path} defines no function named reward.", form)
