"""Open and check the evaluation sets of `homing eval` before any model is loaded.

--text FILE...                         any text
--chat FILE.jsonl                      held-out conversations
--task FILE.jsonl | gsm8k[:FILE] | arithmetic[:DIFFICULTY] | spelling[:DIFFICULTY]
(none of them)                         held-out data of the last phase (conversations or rl tasks), and held-out text
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from homing.api import notices
from homing.config.home_and_run_files import home
from homing.errors import DataError, UsageError

if TYPE_CHECKING:
    from homing.lm.evals.run_evals import Chats, What
    from homing.lm.evals.task_file import TaskFile
    from homing.lm.generate import Card
    from homing.wire.run_json import PhaseData, Rl

__all__ = ["open_sets"]

MADE_UP = ("arithmetic", "spelling")
NUM_MADE_UP = 200  # unless --at-most is given


def open_sets(
    card: Card, texts: list[str], tasks: list[str], chats: list[str], *, text_field: str, at_most: int
) -> list[What]:
    from homing.find_source_files import find_sources
    from homing.lm.evals.run_evals import Chats
    from homing.lm.evals.text_loss import text_in_files

    sets: list[What] = [text_in_files([text], text_field=text_field) for text in texts]
    for pattern in chats:
        find_sources([pattern], key="chat")
        sets.append(Chats([pattern]))
    sets += [_open_task(task, card, at_most) for task in tasks]
    return sets or _held_out(card, at_most)


def _open_task(task: str, card: Card, at_most: int) -> TaskFile:
    from homing.lm.evals.generated_answers import made_up
    from homing.lm.evals.task_file import read_task

    kind, _, rest = task.partition(":")
    if Path(task).expanduser().exists():
        return read_task(task, at_most=at_most)
    if kind in MADE_UP:
        if rest and rest not in ("1", "2", "3", "4", "5"):
            raise UsageError(
                f"{task}: the difficulty must be 1 to 5.", why=f"Got {rest!r}.", fix=f"For example: --task {kind}:1"
            )
        return made_up(kind, int(rest or 1), at_most or NUM_MADE_UP)
    if kind == "gsm8k":
        return read_task(rest or _gsm8k_of(card), form="answers", at_most=at_most)
    if "." not in task and "/" not in task:
        raise UsageError(
            what=f"Unknown task: {task!r}.",
            why=f"Built-in tasks: gsm8k, {', '.join(MADE_UP)}; anything else is a file.",
            fix="Pass --task FILE.jsonl (formats: docs/guides/eval.md)",
        )
    return read_task(task, at_most=at_most)


def _gsm8k_of(card: Card) -> str:
    """Return the held-out GSM8K file of the run's own rl phase. Raises UsageError if the run has none."""
    phases = card.run.phases if card.run is not None else []
    tasks = [task for phase in phases if phase.rl is not None for task in phase.rl.tasks if task.kind == "gsm8k"]
    for task in tasks:
        for folder in _data_dirs(card):
            if task.val_file and (folder / task.val_file).is_file():
                return str(folder / task.val_file)
    raise UsageError(
        what="The GSM8K questions were not found.",
        why="They are not part of homing, and the run has no held-out file with them.",
        fix="Download test.jsonl of openai/gsm8k from the Hub, then: --task gsm8k:test.jsonl",
    )


def _held_out(card: Card, at_most: int) -> list[What]:
    """Return the held-out data of the phase that made the model, then the run's held-out text."""
    if card.run is None:
        raise UsageError(
            what=f"{card.folder} does not record its held-out text.",
            why="It is not a checkpoint of a local run, so there is no default evaluation text.",
            fix="Pass --text FILE, --task FILE.jsonl or --chat FILE.jsonl",
        )
    phase = next((phase for phase in card.run.phases if phase.kind == card.phase), None)
    sets: list[What] = []
    if phase is not None and phase.rl is not None:
        sets += _rl_tasks(card, phase.rl, at_most)
    elif phase is not None and phase.data is not None and phase.data.kind == "chat":
        if phase.data.num_val_tokens:
            sets.append(_held_out_chats(card, phase.kind, phase.data))
        else:
            notices.say(f"The {phase.kind} phase held out no conversations; evaluating on the run's held-out text.")
    return sets + _held_out_text(card, is_alone=not sets)


def _held_out_text(card: Card, *, is_alone: bool) -> list[What]:
    from homing.lm.evals.text_loss import has_data, held_out_text

    assert card.run is not None, "only a run has data"
    sha256 = card.run.data.manifest_sha256
    folders = _data_dirs(card)
    if sha256 and not card.run.data.num_val_tokens:
        if not is_alone:
            return []
        raise DataError(
            what=f"{card.run.name} has no held-out text: it was trained on all of it.",
            why="On the text it was trained on, a model looks better than it is.",
            fix="Pass text it was not trained on: --text FILE",
        )
    for folder in (*folders, *_of_other_names(sha256)):
        if has_data(folder, sha256):
            return [held_out_text(folder, card.run.name)]
    if not is_alone:
        if sha256:
            notices.say(f"Skipped: the held-out text of {card.run.name} was not found.")
        return []
    looked = ", ".join(map(str, dict.fromkeys(folders)))
    raise DataError(
        what=f"The held-out text of {card.run.name} was not found.",
        why=f"Looked for the run's data in {looked} and the other data folders.",
        fix="Run this in the folder where `homing prep` ran, or pass other text: --text FILE",
    )


def _rl_tasks(card: Card, rl: Rl, at_most: int) -> list[What]:
    """Return the run's rl tasks.

    A task that eval cannot score, or that has no held-out questions, is skipped with a notice. A missing file is an
    error.
    """
    from homing.lm.evals.generated_answers import file_of, rl_task

    sets: list[What] = []
    for number, task in enumerate(rl.tasks):
        if task.reward:
            notices.say(f"Skipped {task.kind}: it is scored by {Path(task.reward).name}, which eval does not run.")
            continue
        name, sha256 = file_of(task)
        path = _questions_of(card, name, sha256) if name else None
        one, num_others = rl_task(rl, number, path, at_most=at_most or NUM_MADE_UP)
        if num_others:
            notices.say(
                f"{one.name}: skipped {num_others} of its questions; eval does not support questions that are given as"
                " several messages or as token ids."
            )
        if one.items:
            sets.append(one)
        else:
            notices.say(f"Skipped {one.name}: it has no held-out questions.")
    return sets


def _questions_of(card: Card, name: str, sha256: str) -> Path:
    """Find the file of questions used in training, and check by its hash that it is unchanged.

    A relative name is relative to the data folder.
    """
    from homing.lm.data.shards.read_shards import file_sha256

    named = Path(name).expanduser()
    places = [named] if named.is_absolute() else [folder / named for folder in _data_dirs(card)]
    for place in dict.fromkeys(places):
        if place.is_file() and (not sha256 or file_sha256(place) == sha256):
            return place
    raise DataError(
        what=f"The questions in {Path(name).name}, which the rl phase trained on, were not found.",
        why=f"Looked for the file, unchanged since training, at {', '.join(map(str, dict.fromkeys(places)))}.",
        fix="Run this in the folder where `homing prep` ran, or pass other data: --task FILE.jsonl, --text FILE",
    )


def _held_out_chats(card: Card, kind: str, data: PhaseData) -> Chats:
    from homing.lm.evals.run_evals import Chats
    from homing.lm.evals.text_loss import has_data

    assert card.run is not None, "only a run has data"
    folders = [*_places(card, data.dir), Path("data", card.run.name, kind)]
    for folder in (*folders, *_of_other_names(data.manifest_sha256, kind)):
        if has_data(folder, data.manifest_sha256):
            return Chats([card.run.name], folder)
    looked = ", ".join(map(str, dict.fromkeys(folders)))
    raise DataError(
        what=f"The held-out conversations of {card.run.name} were not found.",
        why=f"Looked for the data of its {kind} phase, unchanged since training, in {looked} and other data folders.",
        fix="Run this in the folder where `homing prep` ran, or pass other conversations: --chat FILE.jsonl",
    )


def _data_dirs(card: Card) -> list[Path]:
    """Return the folders where a run's data may be: where prep wrote it, or an instance's run directory."""
    assert card.run is not None, "only a run has data"
    return [*_places(card, card.run.data.dir), Path("data", card.run.name)]


def _of_other_names(sha256: str, kind: str = "") -> list[Path]:
    """Return all data folders, because a run renamed by `launch --name` used the data folder of its run file.

    Only the hash identifies the right folder, so the list is empty if there is no hash.
    """
    return [folder / kind for folder in sorted(Path("data").glob("*"))] if sha256 else []


def _places(card: Card, folder: str) -> list[Path]:
    assert card.run is not None, "only a run has data"
    named = Path(folder).expanduser()
    if named.is_absolute():
        return [named]
    parents = [*card.folder.absolute().parents[:3], home() / "runs" / card.run.id]
    return [Path(os.path.normpath(parent / named)) for parent in parents]
