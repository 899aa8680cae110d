"""Check chat data, and show what a model would learn from it. Implements `homing data check` and `homing data show`.

check_chats   checks every line of the files or of a run: what is kept, cut or skipped, and why
show_chat     returns one conversation as tokens, and marks those that are trained on
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.data.download_input_files import bring_files
from homing.api.extras import need
from homing.errors import DataError, HomingError, UsageError
from homing.units import counted

if TYPE_CHECKING:
    from homing.config import Loaded
    from homing.find_source_files import Source
    from homing.lm.data.chat.check_chats import Doctor, FileReport, Finding
    from homing.lm.data.chat.render import Example, Renderer

__all__ = ["CheckedChats", "ShownChat", "check_chats", "show_chat"]


@dataclass(frozen=True)
class CheckedChats:
    findings: list[Finding]
    files: list[FileReport]
    document: dict[str, Any]
    error: DataError | None  # names the first invalid line and says how to fix it


def check_chats(
    names: Sequence[str],
    *,
    validation: Sequence[str] = (),
    tokenizer: Path | None = None,
    context: int | None = None,
    sets: Sequence[str] = (),
) -> CheckedChats:
    """Check every line of chat files, or of the phases of a run: JSON, roles, order, length, duplicates, leaks."""
    need("lm", verb="data")
    from homing.lm.data.chat.check_chats import Doctor

    names = list(names)
    loaded = _run_named(names, list(sets))
    doctor = Doctor()
    if loaded is not None:
        for phase in _chat_phases(loaded):
            renderer = _renderer(tokenizer or loaded.prep.dir, is_needed=False)
            one = Doctor(renderer, (context or loaded.run.model.context) if renderer else 0)
            held_out = bring_files(phase.validation, phase.dir / "held-out")
            here = bring_files([source.path for source in phase.chat], phase.dir / "from-store")
            _examine(one, held_out, here)
            _merge(doctor, one)
    else:
        renderer = _renderer(tokenizer, is_needed=True) if tokenizer else None
        if context and renderer is None:
            raise UsageError(
                what="--context needs a tokenizer to count tokens.",
                why="No --tokenizer was given.",
                fix="Add --tokenizer data/NAME, or pass the run instead of its files.",
            )
        if renderer is None:
            notices.say("Without a tokenizer (--tokenizer data/NAME), lengths and markers are not checked.")
        doctor.renderer, doctor.context = renderer, context or 0
        with _paths_typed():
            _examine(doctor, list(validation), names)
    return _checked(doctor, f"homing data show {names[0]}")


@dataclass(frozen=True)
class ShownChat:
    document: dict[str, Any]
    markers: set[int]  # ids of the tokens between messages
    is_last: bool


def show_chat(
    name: str,
    *,
    number: int = 1,
    phase: str | None = None,
    tokenizer: Path | None = None,
    sets: Sequence[str] = (),
) -> ShownChat:
    """Return one conversation of a chat file or a prepared run as tokens, and mark those that are trained on."""
    need("lm", verb="data")
    from homing.lm.data.chat.chat_settings import find_chat_files

    loaded = _run_named([name], list(sets))
    if loaded is None:
        with _paths_typed():
            # look for the files first, so that a mistyped name does not cause an error about a tokenizer
            files = find_chat_files([name])[0]
        renderer = _renderer(tokenizer or _data_of(files), is_needed=True)
        assert renderer is not None
        where, examples = _from_files(files, name, number, renderer)
        is_last = False
    else:
        renderer = _renderer(tokenizer or loaded.prep.dir, is_needed=True)
        assert renderer is not None
        where, examples, is_last = _from_run(loaded, number, phase)
    tokens = [
        {"id": i, "text": renderer.tokens.show(i), "is_learned": is_learned}
        for example in examples
        for i, is_learned in zip(example.ids.tolist(), example.mask.tolist(), strict=True)
    ]
    num_learned = sum(bool(token["is_learned"]) for token in tokens)
    document = {"where": where, "num_tokens": len(tokens), "num_learned": num_learned, "tokens": tokens}
    return ShownChat(document, set(renderer.tokens.markers.values()), is_last)


def _examine(doctor: Doctor, validation: list[str], names: list[str]) -> None:
    from homing.lm.data.chat.chat_settings import find_chat_files

    for side, patterns in (("val", validation), ("train", names)):
        for source in find_chat_files(patterns, "validation" if side == "val" else "chat")[0]:
            try:
                for _ in doctor.examine(source, side):
                    pass
            except DataError:
                continue  # the error is reported as a finding; continue with the other files


@contextmanager
def _paths_typed() -> Iterator[None]:
    """Rewrite errors that name the run file key `chat`, because here the files are command line arguments."""
    try:
        yield
    except DataError as exc:
        fix = exc.fix.replace("--chat PATH", "homing data check PATH")
        raise DataError(exc.what.removeprefix("chat: "), exc.why, fix) from exc


def _merge(whole: Doctor, one: Doctor) -> None:
    whole.files += one.files
    whole.findings += one.findings
    whole.counts.update(one.counts)


def _checked(doctor: Doctor, next_verb: str) -> CheckedChats:
    findings = doctor.sorted_findings()
    error = None
    if doctor.num_faults:
        lines = counted(doctor.num_faults, "invalid line")
        error = DataError(
            what=f"Found {lines} in the chat data.",
            why=f"The first finding: {findings[0]}",
            fix=_how_to_fix(doctor),
        )
    document = {
        "files": [asdict(file) for file in doctor.files],
        "counts": dict(doctor.counts),
        "findings": [asdict(finding) for finding in findings],
        "num_faults": doctor.num_faults,
        "next": next_verb,
    }
    return CheckedChats(findings, list(doctor.files), document, error)


def _how_to_fix(doctor: Doctor) -> str:
    if doctor.fixes:
        return next(iter(doctor.fixes.values()))
    formless = [file.path for file in doctor.files if file.num_lines and not file.form]
    if formless:
        return _into_a_form(formless[0], doctor)
    broken = {finding.path for finding in doctor.findings if finding.action == "stops"}
    stops = [file.path for file in doctor.files if file.path in broken or file.num_faults * 2 > file.num_lines]
    if stops:
        return f"Fix or delete them: `homing prep` stops at {', '.join(stops)} because of too many invalid lines."
    return "Fix or delete them; `homing prep` skips and counts them."


def _into_a_form(path: str, doctor: Doctor) -> str:
    if path.lower().endswith((".csv", ".tsv")):
        return (
            f"{path} is a table, but each conversation must be a line of JSON. To convert it: docs/guides/chat-data.md"
        )
    foreign = next((found.text for found in doctor.findings if (found.path, found.kind) == (path, "not-utf8")), "")
    if foreign:
        target = Path(path).with_name(f"utf8-{Path(path).name}")
        return f"{path} may be Latin-1: iconv -f latin1 -t utf-8 {shlex.quote(path)} > {shlex.quote(str(target))}"
    form = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    return f"{path} has an unknown format. Use lines such as {form}; docs/guides/chat-data.md lists the others."


def _from_files(files: list[Source], name: str, number: int, renderer: Renderer) -> tuple[str, list[Example]]:
    from homing.lm.data.chat.check_chats import Doctor

    doctor, count = Doctor(renderer), 0
    for source in files:
        for kept in doctor.examine(source, "train"):
            count += 1
            if count == number:
                return f"{source.path}:{kept.line}", kept.examples
    raise _no_such(name, number, count)


def _from_run(loaded: Loaded, number: int, wanted: str | None) -> tuple[str, list[Example], bool]:
    """Return a conversation's location, its tokens as prep wrote them, and whether it is the last conversation."""
    import numpy as np

    from homing.lm.data.chat.render import Example
    from homing.lm.data.shards.pack_chats import open_conversations
    from homing.lm.data.shards.read_shards import read_manifest

    phases = _chat_phases(loaded)
    prep = next((phase for phase in phases if phase.phase == (wanted or phases[0].phase)), None)
    if prep is None:
        raise UsageError(
            what=f"The phase {wanted} of {loaded.run.name} has no conversations.",
            why=f"Phases with conversations: {', '.join(phase.phase for phase in phases)}.",
            fix=f"Use --phase {phases[0].phase}",
        )
    split = open_conversations(prep.dir, read_manifest(prep.dir), "train")
    if number > split.tokens.num_documents:
        raise _no_such(f"{loaded.run.name}, phase {prep.phase},", number, split.tokens.num_documents)
    ids, mask = split.read(number - 1)
    example = Example(np.asarray(ids, dtype=np.uint32), mask != 0, [len(ids)])
    return f"{prep.phase} {number:,}", [example], number == split.tokens.num_documents


def _no_such(name: str, number: int, count: int) -> UsageError:
    numbers = f"1 to {count:,}" if count > 1 else "1"
    return UsageError(
        what=f"Conversation {number:,} does not exist.",
        why=f"{name} has {count:,} usable conversations.",
        fix=f"Use --number {numbers}. `homing data check` lists the conversations that were skipped.",
    )


def _run_named(names: list[str], sets: list[str] | None) -> Loaded | None:
    """Load the named run; None if the arguments are files. An existing file takes precedence over a run."""
    from homing.config.load import load_run

    first = Path(names[0]).expanduser()
    is_run_file = first.suffix in (".yaml", ".yml")
    if len(names) > 1 or ((first.exists() or any(sign in names[0] for sign in "*?[/.")) and not is_run_file):
        if sets:
            raise UsageError("--set needs a run, not files.", fix="homing data check RUN --set ...")
        return None
    return load_run(names[0], sets or [], is_for_prep=True)


def _chat_phases(loaded: Loaded) -> list[Any]:
    phases = [prep for prep in loaded.phase_preps if prep.kind == "chat"]
    if not phases:
        raise DataError(
            what=f"No phase of {loaded.run.name} has conversations.",
            why="No phase sets data: {chat: [...]}.",
            fix="Pass files instead: homing data check chats.jsonl",
        )
    return phases


def _renderer(folder: Path | None, *, is_needed: bool) -> Renderer | None:
    from homing.lm.data.chat.chat_settings import open_renderer

    if folder is None or (not is_needed and not (folder / "tokenizer.json").is_file()):
        if folder is not None:
            notices.say(f"No tokenizer in {folder} yet: lengths are not checked. Create one: homing prep")
        return None
    return open_renderer(folder if folder.is_dir() else folder.parent)


def _data_of(files: list[Source]) -> Path:
    """Return the data folder whose tokenizer and chat template are used to show these files.

    It belongs to the newest run that trains on one of the files, or else to the newest prepared run.
    """
    runs = _runs_here()
    shown = {Path(source.path).resolve() for source in files}
    naming = [loaded for loaded in runs if shown & _chat_files_of(loaded)]
    prepared = [loaded for loaded in runs if (loaded.prep.dir / "tokenizer.json").is_file()]
    for loaded in (naming or prepared)[:1]:
        folder, name = loaded.prep.dir, loaded.run.name
        if not (folder / "tokenizer.json").is_file():
            raise UsageError(
                what=f"The run {name}, which uses {files[0].path}, is not prepared yet.",
                why=f"There is no tokenizer in {folder}.",
                fix=f"homing prep {name}   Or use another tokenizer: --tokenizer DIR",
            )
        learns = "which uses this file" if naming else "the newest prepared run"
        notices.say(f"Using the tokenizer and chat template in {folder}, from the run {name}, {learns}.")
        return folder
    raise UsageError(
        what="No tokenizer was given.",
        why="No local run uses this data file, and no prepared data has a tokenizer.",
        fix="Add --tokenizer DIR, a folder with tokenizer.json and a chat template.",
    )


def _runs_here() -> list[Loaded]:
    """Return the runs in ./runs that can be loaded, newest first."""
    from homing.config.home_and_run_files import run_files
    from homing.config.load import load_run

    found = run_files()
    names = sorted(found, key=lambda name: (found[name].stat().st_mtime_ns, name), reverse=True)
    loaded = []
    for name in names:
        with contextlib.suppress(HomingError):  # mistakes in another run file are irrelevant here
            loaded.append(load_run(name, [], is_for_prep=True))
    return loaded


def _chat_files_of(loaded: Loaded) -> set[Path]:
    from homing.lm.data.chat.chat_settings import find_chat_files

    found: set[Path] = set()
    for prep in loaded.phase_preps:
        for path in [*(source.path for source in prep.chat), *(prep.validation if prep.kind == "chat" else [])]:
            with contextlib.suppress(HomingError):  # the file is missing, or is in a store
                found |= {Path(source.path).resolve() for source in find_chat_files([path])[0]}
    return found
