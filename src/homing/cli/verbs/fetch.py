"""`homing fetch`: fetch a model from the store, verified by hash."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from homing.api.extras import export_hint
from homing.api.lookup.find_models import MODELS
from homing.api.lookup.find_runs import name_here
from homing.api.notices import say_problems
from homing.api.runs.fetch_model import fetch_model, list_checkpoints
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.artifacts.checkpoints import Shown
from homing.cloud.ledger.ledger import RunRow
from homing.config.home_and_run_files import file_called
from homing.units import format_bytes, format_duration
from homing.wire.checkpoint_manifest import figure_of

__all__ = ["command"]


def command(
    run: RunName = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint", metavar="best|latest|STEP", help="Checkpoint: latest, best, a step or PHASE:STEP."
        ),
    ] = "latest",
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="Target folder; default: models/NAME, or models/NAME-PHASE if that is taken."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a different or modified model in the folder.")
    ] = False,
    or_older: Annotated[
        bool, typer.Option("--or-older", help="Fall back to an older checkpoint if this one is damaged.")
    ] = False,
    is_list: Annotated[bool, typer.Option("--list", help="List the checkpoints in the store and exit.")] = False,
    json_: Json = False,
) -> None:
    """Fetch a model from the store to this computer and verify every file by its hash."""
    if is_list:
        _list(run)
        return
    fetched = fetch_model(run, checkpoint=checkpoint, to=to, force=force, or_older=or_older)
    row, got, folder, manifest = fetched.run, fetched.got, fetched.folder, fetched.got.manifest
    output.emit("fetch/1", fetched.to_dict())
    if not output.is_json():
        print(folder)
    say_problems([f"skipped {text}" for text in got.passed_over])
    said = "fetched" if got.is_new else "is already local"
    output.say(
        f"{manifest.phase} step {manifest.step:,} {said}: {format_bytes(got.num_bytes)}, every hash verified."
        f" Logs, metrics and samples: {got.run_dir}"
    )
    # Fetch gets `latest` by default, because the next phase continues from it. Verbs that read a run directory use the
    # best checkpoint.
    if fetched.best_step is not None:
        output.say(
            f"This is the latest checkpoint; the best by {figure_of(manifest.phase)} is step {fetched.best_step:,}:"
            f" homing fetch {name_here(row)} --checkpoint best"
        )
    _say_next(row, row.name if folder == MODELS / row.name else shlex.quote(str(folder)), manifest.phase)


def _say_next(row: RunRow, model: str, phase: str) -> None:
    """Print the next commands. `model`: the argument for verbs that use the model."""
    name = name_here(row)
    output.say(
        f"Chat with it: homing chat {model}   Complete a prompt: homing generate {model} --prompt 'Once'"
        f"   Evaluate it: homing eval {model}   End billing: homing destroy {name}"
    )
    # A base model only completes text; an sft phase in this folder's run file makes it answer.
    if phase in ("pretrain", "mid") and name == row.name and file_called(name) is not None:
        output.say(f"Fine-tune it: add a phase of kind sft to its run file, then: homing launch {name} --phase sft")
    output.say(export_hint(model))


def _list(run: str | None) -> None:
    row, found, now = list_checkpoints(run)
    documents = [_document(each) for each in found]
    output.emit("fetch-list/1", {"run": row.id, "store": row.store, "checkpoints": documents})
    rows = []
    for each in documents:
        called = figure_of(each["phase"]).removeprefix("held-out ")
        held_out = f"{called} {each['val_loss']:.3f}" if each["val_loss"] is not None else ""
        age = f"{format_duration(max(0.0, now - each['made_at']))} ago" if each["made_at"] else ""
        said = each["problem"] or ", ".join(each["names"])
        rows.append((each["phase"], f"{each['step']:,}", held_out, format_bytes(each["num_bytes"]), age, said))
    output.table(["phase", "step", "held out", "size", "made", ""], rows)
    if found:
        step = found[-1].checkpoint.manifest.step
        output.say(f"Fetch one: homing fetch {name_here(row)} --checkpoint {step} --to models/{row.name}-{step}")
    else:
        output.say(f"{row.id} has no checkpoint in the store yet. Watch it: homing watch {name_here(row)}")


def _document(shown: Shown) -> dict[str, Any]:
    manifest = shown.checkpoint.manifest
    return {
        "phase": manifest.phase,
        "step": manifest.step,
        "names": shown.names,
        "val_loss": manifest.val_loss,
        "num_bytes": shown.checkpoint.num_bytes,
        "made_at": manifest.made_at,
        "is_final": manifest.is_final,
        "problem": shown.checkpoint.problem,
    }
