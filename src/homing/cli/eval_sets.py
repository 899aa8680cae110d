"""What `homing eval` is asked to measure on: flags to sets, opened and checked before any model is loaded.

--text FILE...                         any text
--chat FILE.jsonl                      held-out conversations
--task FILE.jsonl | gsm8k[:FILE] | arithmetic[:DIFFICULTY] | spelling[:DIFFICULTY]
(none of them)                         what the last phase is about (its conversations, its tasks of rl), and the text
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from homing.cli import talk
from homing.config import home
from homing.errors import DataError, UsageError

if TYPE_CHECKING:
    from homing.lm.evals.measure import Chats, What
    from homing.lm.evals.task_file import TaskFile
    from homing.lm.generate import Card
    from homing.wire.run import PhaseData, Rl

__all__ = ["open_sets"]

MADE_UP = ("arithmetic", "spelling")
NUM_MADE_UP = 200  # unless --at-most says otherwise


def open_sets(
    card: Card, texts: list[str], tasks: list[str], chats: list[str], *, text_field: str, at_most: int
) -> list[What]:
    from homing.lm.evals.any_text import text_in_files
    from homing.lm.evals.measure import Chats
    from homing.text_sources import find_sources

    sets: list[What] = [text_in_files([text], text_field=text_field) for text in texts]
    for pattern in chats:
        find_sources([pattern], key="chat")
        sets.append(Chats([pattern]))
    sets += [_open_task(task, card, at_most) for task in tasks]
    return sets or _held_out(card, at_most)


def _open_task(task: str, card: Card, at_most: int) -> TaskFile:
    from homing.lm.evals.answers import made_up
    from homing.lm.evals.task_file import read_task

    kind, _, rest = task.partition(":")
    if Path(task).expanduser().exists():
        return read_task(task, at_most=at_most)
    if kind in MADE_UP:
        if rest and rest not in ("1", "2", "3", "4", "5"):
            raise UsageError(f"{task}: the difficulty is 1 to 5.", why=f"It is {rest!r}.", fix=f"--task {kind}:1")
        return made_up(kind, int(rest or 1), at_most or NUM_MADE_UP)
    if kind == "gsm8k":
        return read_task(rest or _gsm8k_of(card), form="answers", at_most=at_most)
    if "." not in task and "/" not in task:
        raise UsageError(
            what=f"There is no task {task!r}.",
            why=f"Known by name: gsm8k, {', '.join(MADE_UP)}; everything else is a file.",
            fix="--task FILE.jsonl; its forms are told in docs/eval.md",
        )
    return read_task(task, at_most=at_most)


def _gsm8k_of(card: Card) -> str:
    """The file that the run's own phase of rl holds out, where it names one."""
    phases = card.run.phases if card.run is not None else []
    tasks = [task for phase in phases if phase.rl is not None for task in phase.rl.tasks if task.kind == "gsm8k"]
    for task in tasks:
        for folder in _data_dirs(card):
            if task.val_file and (folder / task.val_file).is_file():
                return str(folder / task.val_file)
    raise UsageError(
        what="Where are the questions of GSM8K?",
        why="They are not part of homing, and the run names no file of its own that holds them out.",
        fix="Fetch test.jsonl of openai/gsm8k from the Hub, then: --task gsm8k:test.jsonl",
    )


def _held_out(card: Card, at_most: int) -> list[What]:
    """What the phase that made it is about, then the text that the run held out."""
    if card.run is None:
        raise UsageError(
            what=f"{card.folder} does not say what text was held out for it.",
            why="It is no checkpoint of a run here, so there is no held-out text to take by default.",
            fix="Name some: --text FILE, --task FILE.jsonl or --chat FILE.jsonl",
        )
    phase = next((phase for phase in card.run.phases if phase.kind == card.phase), None)
    sets: list[What] = []
    if phase is not None and phase.rl is not None:
        sets += _rl_tasks(card, phase.rl, at_most)
    elif phase is not None and phase.data is not None and phase.data.kind == "chat":
        if phase.data.num_val_tokens:
            sets.append(_held_out_chats(card, phase.kind, phase.data))
        else:
            talk.say(f"The phase {phase.kind} held out no conversations: measured on the text that the run held out.")
    return sets + _held_out_text(card, is_alone=not sets)


def _held_out_text(card: Card, *, is_alone: bool) -> list[What]:
    from homing.lm.evals.any_text import has_data, held_out_text

    assert card.run is not None, "only a run has data"
    sha256 = card.run.data.manifest_sha256
    folders = _data_dirs(card)
    if sha256 and not card.run.data.num_val_tokens:
        if not is_alone:
            return []
        raise DataError(
            what=f"{card.run.name} held out no text: all of it was learned from.",
            why="Measured on what it has read, a model seems better than it is.",
            fix="Name text that it has not read: --text FILE",
        )
    for folder in (*folders, *_of_other_names(sha256)):
        if has_data(folder, sha256):
            return [held_out_text(folder, card.run.name)]
    if not is_alone:
        if sha256:
            talk.say(f"The text that {card.run.name} held out is not here, and is not measured on.")
        return []
    looked = ", ".join(map(str, dict.fromkeys(folders)))
    raise DataError(
        what=f"The text that {card.run.name} held out is not here.",
        why=f"Looked for the run's own data in {looked} and the other folders of data.",
        fix="Call from the folder where `homing prep` was run, or name other text: --text FILE",
    )


def _rl_tasks(card: Card, rl: Rl, at_most: int) -> list[What]:
    """A task that eval cannot judge, or that holds out no question, is left out aloud; a missing file is an error."""
    from homing.lm.evals.rl_tasks import file_of, rl_task

    sets: list[What] = []
    for number, task in enumerate(rl.tasks):
        if task.reward:
            talk.say(f"{task.kind} is judged by {Path(task.reward).name}, which eval does not run: left out.")
            continue
        name, sha256 = file_of(task)
        path = _questions_of(card, name, sha256) if name else None
        one, num_others = rl_task(rl, number, path, at_most=at_most or NUM_MADE_UP)
        if num_others:
            talk.say(f"{one.name}: {num_others} come as several messages or as ids, which eval does not ask: left out.")
        if one.items:
            sets.append(one)
        else:
            talk.say(f"{one.name}: no question was held out, so it is left out.")
    return sets


def _questions_of(card: Card, name: str, sha256: str) -> Path:
    """The file of a task as it was then; a relative name starts at the data folder."""
    from homing.lm.shards.read import file_sha256

    named = Path(name).expanduser()
    places = [named] if named.is_absolute() else [folder / named for folder in _data_dirs(card)]
    for place in dict.fromkeys(places):
        if place.is_file() and (not sha256 or file_sha256(place) == sha256):
            return place
    raise DataError(
        what=f"The questions of {Path(name).name}, which the phase rl learned from, are not here.",
        why=f"Looked for the file, as it was then, at {', '.join(map(str, dict.fromkeys(places)))}.",
        fix="Call from the folder where `homing prep` was run, or name others: --task FILE.jsonl, --text FILE",
    )


def _held_out_chats(card: Card, kind: str, data: PhaseData) -> Chats:
    from homing.lm.evals.any_text import has_data
    from homing.lm.evals.measure import Chats

    assert card.run is not None, "only a run has data"
    folders = [*_places(card, data.dir), Path("data", card.run.name, kind)]
    for folder in (*folders, *_of_other_names(data.manifest_sha256, kind)):
        if has_data(folder, data.manifest_sha256):
            return Chats([card.run.name], folder)
    looked = ", ".join(map(str, dict.fromkeys(folders)))
    raise DataError(
        what=f"The conversations that {card.run.name} held out are not here.",
        why=f"Looked for the data of its phase {kind}, as it was then, in {looked} and the other folders of data.",
        fix="Call from the folder where `homing prep` was run, or name others: --chat FILE.jsonl",
    )


def _data_dirs(card: Card) -> list[Path]:
    """Where a run's data may lie: at home in the folder of prep, on a machine in the run directory."""
    assert card.run is not None, "only a run has data"
    return [*_places(card, card.run.data.dir), Path("data", card.run.name)]


def _of_other_names(sha256: str, kind: str = "") -> list[Path]:
    """A run under another name than its file's (`launch --name`) was made from the data of that file. Only its hash
    tells, so there must be one."""
    return [folder / kind for folder in sorted(Path("data").glob("*"))] if sha256 else []


def _places(card: Card, folder: str) -> list[Path]:
    assert card.run is not None, "only a run has data"
    named = Path(folder).expanduser()
    if named.is_absolute():
        return [named]
    beside = [*card.folder.absolute().parents[:3], home() / "runs" / card.run.id]
    return [Path(os.path.normpath(parent / named)) for parent in beside]
