"""The run directory as the trainer sees it: what it reads at the start, checked, and how it says how it ended.

lock -> run.json -> data directory, its manifest and tokenizer, all as run.json says -> ... -> outcome.json
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from homing.errors import DataError, RunFailed, UsageError
from homing.lm.model import Decoder, config_json
from homing.lm.shards.read import file_sha256, read_manifest
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.files import PAPERS
from homing.wire import codec, names
from homing.wire.event import Outcome
from homing.wire.run import Run

__all__ = ["called", "check_count", "check_data", "locked", "read_papers", "read_run", "write_outcome"]


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One trainer per run directory. The lock is the process's, so a killed one leaves none behind."""
    if not run_dir.is_dir():
        raise UsageError(what=f"There is no run directory {run_dir}.", fix="homing train RUN makes one.")
    with open(run_dir / names.TRAINER_LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                what=f"Another trainer is at work in {run_dir}.",
                why="Two would write over each other's checkpoints.",
                fix="Wait for it, or stop it: Ctrl-C there saves and ends it.",
            ) from None
        (run_dir / names.OUTCOME).unlink(missing_ok=True)  # of an attempt before this one
        yield


def read_run(run_dir: Path) -> Run:
    path = run_dir / names.RUN
    try:
        return codec.loads(Run, path.read_bytes())
    except (OSError, ValueError) as exc:
        raise UsageError(
            what=f"{path} cannot be read.", why=str(exc), fix="`homing train RUN` writes it from the run file."
        ) from exc


def called(run_dir: Path) -> str:
    """What a person calls the run: as they typed it, where they are here, else its name; RUN where that is not known,
    as of a smoke profile on a rented machine, whose name no file has."""
    if typed := os.environ.get(names.TYPED_ENV):
        return typed
    try:
        run = codec.loads(Run, (run_dir / names.RUN).read_bytes())
    except (OSError, ValueError):
        return "RUN"
    return "RUN" if "smoke" in run.origin.get("name", "") else run.name


def check_data(run: Run, run_dir: Path) -> tuple[Path, Tokenizer]:
    """The data directory and its tokenizer, once both are what run.json was written for. Text there may be none, where
    each phase has data of its own."""
    data_dir = (run_dir / run.data.dir).resolve()  # an absolute path stays itself
    found = {names.TOKENIZER: (_tokenizer_sha256(data_dir), run.data.tokenizer_sha256)}
    tokenizer = load_tokenizer(data_dir / names.TOKENIZER)
    sizes = {f"{data_dir / names.TOKENIZER}": tokenizer.vocab_size}
    changed = []
    if run.data.manifest_sha256:
        manifest = read_manifest(data_dir)
        found[names.MANIFEST] = (file_sha256(data_dir / names.MANIFEST), run.data.manifest_sha256)
        sizes[f"{data_dir / names.MANIFEST}"] = manifest.vocab_size
        if manifest.tokenizer_sha256 != found[names.TOKENIZER][0]:
            changed.append(f"{names.TOKENIZER} is not the one that made the shards")
    changed += [f"{name} is not the one the run was resolved with" for name, (is_, was) in found.items() if is_ != was]
    # Open weights may have more rows than their tokenizer has ids.
    is_fit = max(sizes.values()) <= run.model.vocab_size if run.base else set(sizes.values()) == {run.model.vocab_size}
    if not is_fit:
        sizes = {"model.vocab_size in run.json": run.model.vocab_size, **sizes}
        changed.append("vocab_size mismatch: " + ", ".join(f"{where}: {size:,}" for where, size in sizes.items()))
    if changed:
        raise DataError(
            what=f"The data in {data_dir} does not belong to this run.",
            why="\n".join(changed),
            fix="Resolve the run again (homing train RUN --fresh), or prepare its data again (homing prep RUN).",
        )
    return data_dir, tokenizer


def _tokenizer_sha256(data_dir: Path) -> str:
    try:
        return file_sha256(data_dir / names.TOKENIZER)
    except OSError as exc:
        raise DataError(
            what=f"The data in {data_dir} has no tokenizer.", why=str(exc), fix="homing prep RUN --force"
        ) from exc


def check_count(run: Run, model: Decoder) -> None:
    if model.num_params() != run.sizes.num_params:
        raise RunFailed(
            what=f"The model has {model.num_params():,} parameters, run.json says {run.sizes.num_params:,}.",
            why=f"run.json was written by homing {run.code_version or 'of another version'}.",
            fix="Resolve the run again with this version: homing train RUN --fresh",
        )


def read_papers(run: Run, run_dir: Path, data_dir: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The small files of every checkpoint: with them beside the weights, the folder can be used anywhere."""
    config = config_json(run.model, end_of_text_id=tokenizer.end_of_text_id)
    papers = {
        names.RUN: (run_dir / names.RUN).read_bytes(),
        names.TOKENIZER: (data_dir / names.TOKENIZER).read_bytes(),
        "config.json": json.dumps(config, indent=1).encode(),
    }
    # The chat template lies in one of these: without it nobody could ask as was trained.
    return papers | {name: (data_dir / name).read_bytes() for name in PAPERS if (data_dir / name).is_file()}


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    aside = run_dir / f".{names.OUTCOME}.aside"
    with contextlib.suppress(OSError):  # a full disk: exit code and last line still tell it
        aside.write_text(codec.dumps(outcome, indent=1), encoding="utf-8")
        os.replace(aside, run_dir / names.OUTCOME)
