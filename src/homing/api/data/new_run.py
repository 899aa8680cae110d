"""Write a new run file to ./runs. Implements `homing new`.

new_run("first", preset="tiny")                          from a preset; with `chat`, followed by an sft phase
new_run("first", preset="hf:OWNER/NAME", chat=[...])     fine-tune open weights on conversations with adapters
list_presets()                                           the presets and their sizes
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.api.data.new_run_data import (
    changes_for_chats,
    check_chats,
    is_open_weights,
    measure_chats,
    with_chats,
    write_open,
    written_atomically,
    yaml_list,
    yaml_name,
)
from homing.errors import HomingError, UsageError

if TYPE_CHECKING:
    from homing.config.load import Loaded

__all__ = ["NewRun", "list_presets", "new_run", "preset_names"]

SIZES = "{sizes}"
_PROMPT_WORDS = 3  # number of words of the text to use as the prompt for samples
_MOST_PROMPT = 40  # in characters, because some scripts have no spaces between words
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True)
class NewRun:
    """The run file that `new_run` wrote."""

    name: str
    file: Path
    source: str  # the preset, or the open weights
    loaded: Loaded | None = None  # None for open weights, because only `prep` reads them
    changes: list[str] = field(default_factory=list)  # numbers of the preset that differ because of the conversations

    @property
    def absent(self) -> list[str]:
        """The configured text paths that do not exist yet."""
        from homing.find_source_files import is_in_store

        text = self.loaded.prep.text if self.loaded is not None else []
        return [path for path in text if not is_in_store(path) and not glob.glob(path, recursive=True)]


def new_run(
    name: str | None,
    preset: str | None,
    *,
    text: list[str] | None = None,
    validation: list[str] | None = None,
    chat: list[str] | None = None,
    force: bool = False,
) -> NewRun:
    """Write runs/NAME.yaml from a preset or from open weights."""
    from homing.config.load import load_run

    typed = _typed({"--text": text, "--validation": validation})
    if not name or not _NAME.fullmatch(name):
        raise _misnamed(name or "", f" --from {shlex.quote(preset or 'tiny')}{typed}{_typed({'--chat': chat})}")
    target = Path("runs") / f"{name}.yaml"
    if preset and is_open_weights(preset):
        _refuse_text(typed, name, preset)
        _refuse_to_overwrite(name, target, force)
        return NewRun(name, target, write_open(name, preset, chat or [], target))
    _refuse_bare_folder(preset, name, f"{typed}{_typed({'--chat': chat})}")
    source = _find(preset, name, typed)
    call = f"homing new {name} --from {source.stem}"
    if chat:
        _refuse_chat_without_text(text, chat, call)
        check_chats(chat, f"{call}{typed}")
    for flag, paths in (("--text", text), ("--validation", validation)):
        for path in paths or []:
            _check_text(path, flag, call)
    _refuse_to_overwrite(name, target, force)
    loaded = _write(source, target, name, text or [], validation or [], chat or [])
    changes = changes_for_chats(load_run(str(source), is_for_prep=True).run, loaded.run) if chat else []
    return NewRun(name, target, source.stem, loaded, changes)


def list_presets() -> list[dict[str, Any]]:
    """Return the presets with their sizes, smallest first."""
    from homing.config.home_and_run_files import preset_dir
    from homing.config.load import load_run

    rows = []
    for preset in preset_names():
        path = preset_dir() / f"{preset}.yaml"
        run = load_run(str(path), is_for_prep=True).run
        about = path.read_text(encoding="utf-8").splitlines()[0].removeprefix(f"# {preset}: ")
        rows.append({"preset": preset, "num_params": run.sizes.num_params, "num_layers": run.model.num_layers,
                     "width": run.model.width, "context": run.model.context, "vocab_size": run.model.vocab_size,
                     "about": about})  # fmt: skip
    return rows


def _typed(flags: dict[str, list[str] | None]) -> str:
    """Return these path options as the user would type them, quoted for the shell."""
    return "".join(f" {flag} {shlex.quote(path)}" for flag, paths in flags.items() for path in paths or [])


def _misnamed(name: str, behind: str) -> UsageError:
    from homing.config.parse.key_suggestions import tidy_name

    return UsageError(
        what=f"Invalid run name: {name!r}." if name else "The run needs a name.",
        why="Every provider must accept the name: use a-z, 0-9 and -, at most 32 characters.",
        fix=f"homing new {tidy_name(name) or 'first'}{behind}",
    )


def preset_names() -> list[str]:
    from homing.config.home_and_run_files import preset_dir

    return sorted((path.stem for path in preset_dir().glob("*.yaml")), key=lambda stem: _size_of(stem))


def _size_of(stem: str) -> int:
    from homing.config.home_and_run_files import preset_dir
    from homing.config.load import load_run

    return load_run(str(preset_dir() / f"{stem}.yaml"), is_for_prep=True).run.sizes.num_params


def _presets() -> str:
    return f"Presets: {', '.join(preset_names())}. Show their sizes: homing new --list"


def _refuse_bare_folder(preset: str | None, name: str, typed: str) -> None:
    if preset and preset not in preset_names() and Path(preset).is_dir():
        raise UsageError(
            what=f"Unknown preset: {preset!r}.",
            why="There is a folder with that name; to use open weights from a folder, give its path.",
            fix=f"homing new {name} --from ./{shlex.quote(preset)}{typed}",
        )


def _find(preset: str | None, name: str, typed: str) -> Path:
    from homing.config.home_and_run_files import preset_dir

    if not preset:
        raise UsageError(
            what="No preset given.",
            why=f"A run file starts from a preset. {_presets()}",
            fix=f"homing new {name} --from tiny{typed}",
        )
    path = preset_dir() / f"{preset}.yaml"
    if preset not in {found.stem for found in preset_dir().glob("*.yaml")}:
        near = difflib.get_close_matches(preset.lower(), preset_names(), n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            what=f"Unknown preset: {preset!r}.", why=f"{hint}{_presets()}", fix=f"{_again(name, near)}{typed}"
        )
    return path


def _refuse_text(typed: str, name: str, weights: str) -> None:
    if typed:
        raise UsageError(
            what="A run from open weights needs chat data: --chat FILE.",
            why="To continue pretraining on plain text, add a phase of kind mid (docs/guides/open-weights.md).",
            fix=f"homing new {name} --from {shlex.quote(weights)} --chat YOUR_CHATS.jsonl",
        )


def _refuse_chat_without_text(text: list[str] | None, chat: list[str], call: str) -> None:
    if not text:
        chats = _typed({"--chat": chat})
        raise UsageError(
            what="--chat with a preset also needs --text.",
            why="A preset starts with random weights, so it must learn language from text before it can learn to chat.",
            fix=f"{call} --text YOUR_TEXT.txt{chats}   or start from pretrained weights:"
            f" {call.rsplit(' ', 1)[0]} hf:OWNER/NAME{chats}",
        )


def _again(name: str, near: list[str]) -> str:
    return f"homing new {name} --from {near[0] if near else 'tiny'}"


def _check_text(named: str, flag: str, call: str) -> None:
    """Check local text now, so that the user can fix a typo immediately. `homing prep` checks text in a store."""
    from homing.find_source_files import fault_of, is_in_store, is_utf8

    if is_in_store(named) or not (fault := fault_of(named)):
        return
    near, why = _nearest(Path(os.path.expanduser(named)))
    if fault.endswith("is empty"):
        near, why = "", "The file contains no text."
    if not is_utf8(named):
        near, why = "", "The file name is not UTF-8, so a run file cannot contain it. Rename the file first."
    raise UsageError(what=f"{flag}: {fault}.", why=why, fix=f"{call} {flag} {shlex.quote(near or 'YOUR_TEXT.txt')}")


def _nearest(path: Path) -> tuple[str, str]:
    """Return the path that the user probably meant, or "", and a sentence that explains the search."""
    folder = path.parent
    try:
        there = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return "", f"The folder {folder.absolute()} does not exist or cannot be read."
    by_small = {name.lower(): name for name in there}  # so that faust.txt finds Faust.TXT
    near = difflib.get_close_matches(path.name.lower(), by_small, n=1, cutoff=0.6)
    # The same ending alone is no similarity: r.txt is not nope.txt.
    stems = [each.partition(".")[0] for each in (path.name.lower(), *near)]
    near = near if difflib.get_close_matches(stems[0], stems[1:], cutoff=0.5) else []
    # The top-level folders of the system, such as /opt and /home, are never suggested.
    if near and folder.absolute() != folder.absolute().parent:
        hit = str(folder / by_small[near[0]])
        return hit, f"Did you mean {hit}? Looked in {folder.absolute()}."
    some = f"{', '.join(there[:5])}{' and others' if there[5:] else ''}" if there else "nothing"
    return "", f"Looked in {folder.absolute()}, which contains {some}."


def _refuse_to_overwrite(name: str, target: Path, force: bool) -> None:
    from homing.config.home_and_run_files import run_files

    there = run_files().get(name)
    if there is not None and (not force or there != target):
        raise UsageError(
            what=f"{there} already exists.",
            why="homing never overwrites a run file unless you ask.",
            fix=f"Choose another name, or add --force to replace {target}."
            if there == target
            else f"Choose another name, or delete {there}: each name needs one file.",
        )


def _write(source: Path, target: Path, name: str, text: list[str], validation: list[str], chat: list[str]) -> Loaded:
    from homing.config.load import load_run

    body = _fill(source.read_text(encoding="utf-8"), name, text, validation)
    if chat:
        preset = load_run(str(source), is_for_prep=True).run
        seen = measure_chats(chat, preset.model.vocab_size)
        body = with_chats(body, preset, chat, seen, _num_tokens(text, preset.model.vocab_size))
    with written_atomically(target, name) as draft:
        # The header names no sizes, because they change with the keys below it.
        header = f"Parameters, memory and the GPUs that it fits on: homing verify {name}"
        draft.write_text(body.replace(SIZES, header, 1), encoding="utf-8")
        load_run(str(draft), is_for_prep=True)  # fail before the file exists if it is not valid
    return load_run(str(target), is_for_prep=True)


def _num_tokens(text: list[str], vocab_size: int) -> int:
    """Return the estimated number of tokens in the local text; 0 if there is none."""
    from homing.config.estimate.params_and_flops import bytes_per_token
    from homing.find_source_files import num_text_bytes

    return int((num_text_bytes(text) or 0) / bytes_per_token(vocab_size))


def _fill(body: str, name: str, text: list[str], validation: list[str]) -> str:
    body = re.sub(r"(?m)^name: .*$", f"name: {yaml_name(name)}", body, count=1)
    if text:
        body = re.sub(r"(?m)^  text: .*$", lambda _: f"  text: {yaml_list(text)}", body, count=1)
        # Replace the preset's held-out file and prompts, because they belong to the preset's own text.
        body = re.sub(r"(?m)^  validation: .*\n", "", body, count=1)
        prompts = json.dumps([words] if (words := _first_words(text)) else [], ensure_ascii=False)
        body = re.sub(r"(?m)^  prompts: .*$", lambda _: f"  prompts: {prompts}", body, count=1)
    if validation:
        body = re.sub(r"(?m)^(  text: .*\n)", lambda m: f"{m[1]}  validation: {yaml_list(validation)}\n", body, count=1)
    return body


def _first_words(text: list[str]) -> str:
    """Return the first words of the text, as a prompt for samples.

    Return "" if the text cannot be read here; `homing prep` reports the reason.
    """
    # Read the first document exactly as prep does, even from a compressed or JSON lines file. The imported modules need
    # only the standard library and, for .zst files, zstandard, which may not be installed.
    from homing.find_source_files import find_sources
    from homing.lm.data.text.documents import Cuts, documents_of, unmarked_bytes_for
    from homing.lm.data.text.read_bytes import Reading

    try:
        source = find_sources(text, key="--text").sources[0]
        with Reading(source) as reading:
            first = next(documents_of(reading, Cuts(unmarked_bytes_for(source.num_text_bytes))), b"")
    except (HomingError, ImportError, OSError):
        return ""
    lines = (line.split() for line in first.decode("utf-8", errors="ignore").splitlines())
    words = next((line for line in lines if any(letter.isalpha() for letter in "".join(line))), [])
    return " ".join(words[:_PROMPT_WORDS])[:_MOST_PROMPT].strip()
