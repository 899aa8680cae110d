"""`homing verify [RUN]`: check that the model builds, trains and fits in memory, before any money is spent.

parameters by part, FLOPs -> memory on each GPU -> vocabulary, shards, tokens -> one forward and backward pass -> plan

Everything except that pass is arithmetic and does not need torch; `--no-run` skips the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from homing.api.verify_before_launch import raise_problems, verify_run
from homing.cli import output
from homing.cli.options import Json, Phases, RunName, Sets
from homing.units import counted, format_bytes

if TYPE_CHECKING:
    from homing.config.estimate.memory import Fit
    from homing.config.estimate.params_and_flops import Part

__all__ = ["command"]


def command(
    run: RunName = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only compute the sizes; this does not need torch.")] = False,
    is_smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Verify a smoke run (a scaled-down version of the run) instead of the full run."),
    ] = False,
    is_hashing: Annotated[bool, typer.Option("--hash", help="Also check the sha256 of every shard.")] = False,
    sets: Sets = None,
    phase: Phases = None,
    json_: Json = False,
) -> None:
    """Build the model, count its parameters, run one training step, and check memory and data."""
    found = verify_run(run, sets, phase=phase, smoke=is_smoke, no_run=no_run, check_hashes=is_hashing, show=_show)
    loaded = found.loaded
    output.emit("verify/1", found.document)
    if found.problems and output.is_json():
        raise typer.Exit(2)  # the JSON document already contains the problems
    raise_problems(found)
    is_all = loaded.is_prepared and not found.document.get("step", {}).get("left_out")
    sound = "All checks passed." if is_all else "The checks that ran passed."
    if found.document["refused"]:
        output.say(f"{sound} But change the run file first: `homing launch` refuses this run; see above.")
        return
    output.say(f"{sound} {'Next:' if loaded.is_prepared else 'Prepare the data:'} {found.document['next']}")


def _show(name: str, rows: list[Any]) -> None:
    if name == "parameters":
        _parameter_table(rows)
    elif all(fit.is_fitting for fit in rows) and not output.is_verbose():
        _say_all_fit(rows)
    else:
        _card_table(rows)


def _parameter_table(parts: list[Part]) -> None:
    total = sum(part.num_params for part in parts)
    rows = [(part.name, f"{part.num_params:,}", f"{part.num_params / total:.1%}", part.note) for part in parts]
    output.table(("part", "parameters", "share", "how"), [*rows, ("all", f"{total:,}", "100.0%", "")])


def _say_all_fit(every: list[Fit]) -> None:
    """For a small model that fits on every GPU, print one line instead of a table; -v prints the table."""
    rows = sorted({fit.micro_batch for fit in every})
    at_a_time = counted(rows[0], "row") if len(rows) == 1 else f"{rows[0]} to {rows[-1]} rows"
    peak = format_bytes(max(fit.peak_bytes for fit in every))
    if not output.is_json():
        print(
            f"Fits all {len(every)} GPUs ({min(fit.gpu.memory_gib for fit in every)} GB and up),"
            f" {at_a_time} at a time, peak {peak}.",
            flush=True,
        )


def _card_table(every: list[Fit]) -> None:
    output.table(
        ("GPU", "GiB", "fits", "rows at a time", "peak", "to fit, lower"),
        [
            (
                fit.gpu.name,
                fit.gpu.memory_gib,
                "yes" if fit.is_fitting else "no",
                fit.micro_batch or "",
                format_bytes(fit.peak_bytes),
                fit.lower,
            )
            for fit in every
        ],
    )
