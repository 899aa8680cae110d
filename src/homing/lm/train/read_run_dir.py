"""Reads and checks the inputs in the run directory when the trainer starts, and writes outcome.json when it ends.

lock -> run.json -> data directory with manifest and tokenizer, checked against run.json -> ... -> outcome.json
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from homing.errors import DataError, RunFailed, UsageError
from homing.lm.data.shards.read_shards import file_sha256, read_manifest
from homing.lm.model import Decoder, config_json
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.write_files import METADATA_FILES
from homing.wire import codec, file_names
from homing.wire.event_lines import Outcome
from homing.wire.run_json import Run

__all__ = ["called", "check_count", "check_data", "locked", "read_metadata_files", "read_run", "write_outcome"]


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock that allows only one trainer per run directory. A killed trainer leaves no lock behind."""
    if not run_dir.is_dir():
        raise UsageError(what=f"The run directory {run_dir} does not exist.", fix="Create it: homing train RUN")
    with open(run_dir / file_names.TRAINER_LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                what=f"Another trainer is running in {run_dir}.",
                why="Two trainers would overwrite each other's checkpoints.",
                fix="Wait until it has finished, or press Ctrl-C in its terminal to save a checkpoint and stop it.",
            ) from None
        (run_dir / file_names.OUTCOME).unlink(missing_ok=True)  # remove the outcome of an earlier attempt
        yield


def read_run(run_dir: Path) -> Run:
    path = run_dir / file_names.RUN
    try:
        return codec.loads(Run, path.read_bytes())
    except (OSError, ValueError) as exc:
        raise UsageError(
            what=f"{path} cannot be read.", why=str(exc), fix="Recreate it from the run file: homing train RUN"
        ) from exc


def called(run_dir: Path) -> str:
    """Return the name of the run to show in messages.

    This is the name typed on the command line, if this machine knows it, else the name in run.json. The result is "RUN"
    if run.json cannot be read or is from a smoke profile, because no run file has the name of a smoke profile.
    """
    if typed := os.environ.get(file_names.TYPED_ENV):
        return typed
    try:
        run = codec.loads(Run, (run_dir / file_names.RUN).read_bytes())
    except (OSError, ValueError):
        return "RUN"
    return "RUN" if "smoke" in run.origin.get("name", "") else run.name


def check_data(run: Run, run_dir: Path) -> tuple[Path, Tokenizer]:
    """Return the data directory and its tokenizer, after checking that both match run.json.

    If every phase has its own data, there may be no text shards in the data directory.
    """
    data_dir = (run_dir / run.data.dir).resolve()  # if `run.data.dir` is absolute, `run_dir` has no effect
    found = {file_names.TOKENIZER: (_tokenizer_sha256(data_dir), run.data.tokenizer_sha256)}
    tokenizer = load_tokenizer(data_dir / file_names.TOKENIZER)
    sizes = {f"{data_dir / file_names.TOKENIZER}": tokenizer.vocab_size}
    changed = []
    if run.data.manifest_sha256:
        manifest = read_manifest(data_dir)
        found[file_names.MANIFEST] = (file_sha256(data_dir / file_names.MANIFEST), run.data.manifest_sha256)
        sizes[f"{data_dir / file_names.MANIFEST}"] = manifest.vocab_size
        if manifest.tokenizer_sha256 != found[file_names.TOKENIZER][0]:
            changed.append(f"{file_names.TOKENIZER} is not the tokenizer that encoded the shards")
    changed += [
        f"{name} is not the file that run.json was written for" for name, (is_, was) in found.items() if is_ != was
    ]
    # Open weights may have more embedding rows than their tokenizer has ids.
    is_fit = max(sizes.values()) <= run.model.vocab_size if run.base else set(sizes.values()) == {run.model.vocab_size}
    if not is_fit:
        sizes = {"model.vocab_size in run.json": run.model.vocab_size, **sizes}
        changed.append("vocab_size mismatch: " + ", ".join(f"{where}: {size:,}" for where, size in sizes.items()))
    if changed:
        raise DataError(
            what=f"The data in {data_dir} does not belong to this run.",
            why="\n".join(changed),
            fix="Start over (homing train RUN --fresh), or prepare the data again (homing prep RUN).",
        )
    return data_dir, tokenizer


def _tokenizer_sha256(data_dir: Path) -> str:
    try:
        return file_sha256(data_dir / file_names.TOKENIZER)
    except OSError as exc:
        raise DataError(
            what=f"The data in {data_dir} has no tokenizer.",
            why=str(exc),
            fix="Prepare the data again: homing prep RUN --force",
        ) from exc


def check_count(run: Run, model: Decoder) -> None:
    if model.num_params() != run.sizes.num_params:
        raise RunFailed(
            what=f"The model has {model.num_params():,} parameters, but run.json says {run.sizes.num_params:,}.",
            why=f"run.json was written by homing {run.code_version or '(unknown version)'}.",
            fix="Start over with this version: homing train RUN --fresh",
        )


def read_metadata_files(run: Run, run_dir: Path, data_dir: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the small files that are added to every checkpoint, so that it can be used without the run directory."""
    config = config_json(run.model, end_of_text_id=tokenizer.end_of_text_id)
    metadata_files = {
        file_names.RUN: (run_dir / file_names.RUN).read_bytes(),
        file_names.TOKENIZER: (data_dir / file_names.TOKENIZER).read_bytes(),
        "config.json": json.dumps(config, indent=1).encode(),
    }
    # One of METADATA_FILES contains the chat template, which is needed to prompt the model the way it was trained.
    return metadata_files | {
        name: (data_dir / name).read_bytes() for name in METADATA_FILES if (data_dir / name).is_file()
    }


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    temporary = run_dir / f".{file_names.OUTCOME}.partial"
    # If the disk is full, ignore the error: the exit code and the last line of the output still report the outcome.
    with contextlib.suppress(OSError):
        temporary.write_text(codec.dumps(outcome, indent=1), encoding="utf-8")
        os.replace(temporary, run_dir / file_names.OUTCOME)
