"""`homing verify [RUN]`: check that the run builds, trains and fits, before any money is spent.

parameters by part, FLOPs -> memory on each GPU -> vocabulary, shards, tokens -> one forward and backward -> plan

Everything but the forward and backward is arithmetic and needs no torch; `--no-run` stops there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homing.api.run_changes import as_typed, with_phases
from homing.cli import output
from homing.cli.options import Json, Phases, RunName, Sets
from homing.errors import DataError
from homing.units import counted, format_bytes, format_count, format_duration
from homing.wire import file_names

if TYPE_CHECKING:
    from homing.config import Loaded
    from homing.config.estimate.memory import Fit

__all__ = ["command"]


@dataclass
class _Findings:
    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def command(
    run: RunName = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only compute the sizes; this does not need torch.")] = False,
    is_smoke: Annotated[bool, typer.Option("--smoke", help="Verify the scaled-down run file of a smoke run.")] = False,
    is_hashing: Annotated[bool, typer.Option("--hash", help="Also check the sha256 of every shard.")] = False,
    sets: Sets = None,
    phase: Phases = None,
    json_: Json = False,
) -> None:
    """Build the model, count its parameters, run one training step, and check memory and data."""
    sets = with_phases(sets, phase)
    from homing.api.stale_shards import refuse_stale
    from homing.config import load_run, newest_run, typed_name

    if not no_run:
        from homing.api.extras import need

        need("lm", verb="verify")
    loaded = load_run(newest_run() if run is None else run, sets, is_smoke=is_smoke)
    found = _Findings({"run": loaded.run.name, "file": str(loaded.file), "is_prepared": loaded.is_prepared})
    refuse_stale(loaded, f"{typed_name(loaded.file)}{as_typed(sets, is_smoke=is_smoke)}")
    _say_title(loaded)
    _parameters(loaded, found)
    _memory(loaded, found)
    _data(loaded, found, is_hashing)
    _length(loaded, found)
    if not no_run and not found.problems:  # without its shards the step would only report the same problem
        _one_step(loaded, found)
    _end(loaded, found, changes=as_typed(sets, is_smoke=is_smoke))


def _say_title(loaded: Loaded) -> None:
    model = loaded.run.model
    output.say(
        f"{loaded.run.name} ({loaded.file}): {model.arch}, {model.num_layers} layers, width {model.width},"
        f" {model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_size}, feed-forward"
        f" {model.ffn_width}, context {model.context}, vocabulary {model.vocab_size:,}"
    )


def _parameters(loaded: Loaded, found: _Findings) -> None:
    from homing.config.estimate.params import parameter_table

    sizes, table = loaded.run.sizes, parameter_table(loaded.run.model)
    found.document["parameters"] = [{"part": part.name, "num_params": part.num_params} for part in table]
    found.document |= vars(sizes)
    rows = [
        (part.name, f"{part.num_params:,}", f"{part.num_params / sizes.num_params:.1%}", part.note) for part in table
    ]
    output.table(("part", "parameters", "share", "how"), [*rows, ("all", f"{sizes.num_params:,}", "100.0%", "")])
    output.say(
        f"{format_count(sizes.flops_per_token)} FLOPs per token, forward and backward"
        f" (6 x {sizes.num_matmul_params:,} in matrices, and attention over {loaded.run.model.context:,} tokens).\n"
    )


def _memory(loaded: Loaded, found: _Findings) -> None:
    from homing.config.estimate.memory import fits, training_memory
    from homing.gpus import find_gpu

    run = loaded.run
    memory = training_memory(run)
    parts = ("weights", "gradients", "optimizer", "copies", "activations_per_row", "scratch", "cuda")
    needed = memory.host_needed(run.cloud.num_gpus)
    found.document["memory"] = {**{name: getattr(memory, name) for name in parts}, "host": memory.host}
    found.document["memory"]["host_needed"] = needed
    output.say(
        "Memory: " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(getattr(memory, name))}" for name in parts)
    )
    if memory.host:
        output.say(
            f"Host memory: {format_bytes(memory.host)} of optimizer state per GPU; an instance needs"
            f" {format_bytes(needed)} in total."
        )
    every = fits(run)
    found.document["cards"] = [
        {
            "gpu": fit.gpu.name,
            "memory_gib": fit.gpu.memory_gib,
            "is_fitting": fit.is_fitting,
            "micro_batch": fit.micro_batch,
            "most_rows": fit.most_rows,
            "peak_bytes": fit.peak_bytes,
            "lower": fit.lower,
        }
        for fit in every
    ]
    if all(fit.is_fitting for fit in every) and not output.is_verbose():
        _say_all_fit(every)
    else:
        _card_table(every)
    output.say()
    chosen = find_gpu(run.cloud.gpu) if run.cloud.gpu else None
    for fit in every:
        if chosen and fit.gpu.name == chosen.name and not fit.is_fitting:
            found.problems.append(
                f"cloud.gpu is {chosen.name}, and training does not fit it: {format_bytes(fit.peak_bytes)} needed,"
                f" {format_bytes(fit.usable_bytes)} available. Lower {fit.lower}."
            )


def _say_all_fit(every: list[Fit]) -> None:
    """Print one line for a small model instead of a table that says yes for every GPU; -v prints the table."""
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


def _data(loaded: Loaded, found: _Findings, is_hashing: bool) -> None:
    from homing.config.prepared_data import missing_files, read_prepared, unlisted_files

    _own_data(loaded, found, is_hashing)
    prepared = read_prepared(Path(loaded.run.data.dir))
    if prepared is None and loaded.is_prepared:  # no phase reads the run's text
        found.problems += _vocabulary(loaded, Path(loaded.run.data.dir) / file_names.TOKENIZER)
        return
    if prepared is None:
        found.document["data"] = {"dir": loaded.run.data.dir, "num_train_tokens": 0, "num_val_tokens": 0}
        output.say(f"Data: nothing prepared in {loaded.run.data.dir} yet.")
        return
    problems = missing_files(prepared, is_hashing=is_hashing)
    found.problems += problems
    manifest = prepared.manifest
    num_shards = sum(len(split.shards) for split in manifest.splits.values())
    found.document["data"] = {
        "dir": str(prepared.dir),
        "num_train_tokens": prepared.num_train_tokens,
        "num_val_tokens": prepared.num_val_tokens,
        "num_shards": num_shards,
        "vocab_size": manifest.vocab_size,
        "is_hashed": is_hashing,
        "unlisted": unlisted_files(prepared),
    }
    tokenizer = prepared.dir / file_names.TOKENIZER
    if tokenizer.is_file():  # a missing one is already reported
        found.problems += _vocabulary(loaded, tokenizer)
    state = "all there" if not problems else f"wrong files: {len(problems)}"
    checked = ", hashes checked" if is_hashing and not problems else ""
    output.say(
        f"Data: {prepared.num_train_tokens:,} tokens to train on, {prepared.num_val_tokens:,} held out,"
        f" {counted(num_shards, 'shard')}: {state}{checked}."
    )
    if unlisted := found.document["data"]["unlisted"]:
        more = f" and {len(unlisted) - 3} more" if len(unlisted) > 3 else ""
        output.say(
            f"warning: training ignores {', '.join(unlisted[:3])}{more} in {prepared.dir}: its"
            f" {file_names.MANIFEST} does not list them. `homing prep` makes shards from data.text."
        )


def _own_data(loaded: Loaded, found: _Findings, is_hashing: bool) -> None:
    """Check the data of single phases."""
    from homing.config.prepared_data import missing_files, read_prepared

    found.document["own_data"] = []
    for prep in loaded.phase_preps:
        prepared = read_prepared(prep.dir)
        if prepared is None:
            output.say(f"Data of {prep.phase}: nothing prepared in {prep.dir} yet.")
            continue
        problems = missing_files(prepared, is_hashing=is_hashing)
        found.problems += problems
        counts = {"num_train_tokens": prepared.num_train_tokens, "num_val_tokens": prepared.num_val_tokens}
        found.document["own_data"].append({"phase": prep.phase, "kind": prep.kind, "dir": str(prep.dir), **counts})
        output.say(
            f"Data of {prep.phase}: {prepared.num_train_tokens:,} tokens of {prep.kind} to train on,"
            f" {prepared.num_val_tokens:,} held out: {f'wrong files: {len(problems)}' if problems else 'all there'}."
        )


def _vocabulary(loaded: Loaded, tokenizer: Path) -> list[str]:
    from homing.config.prepared_data import tokenizer_vocab_size

    try:
        wanted, there = loaded.run.model.vocab_size, tokenizer_vocab_size(tokenizer)
    except DataError as error:
        return [error.what]
    is_match = there <= wanted if loaded.run.base else wanted == there  # open weights may have spare rows
    sizes = f"{wanted:,} in {loaded.file}, {there:,} in {tokenizer}"
    verdict = "they do not match" if not is_match else "they match" if wanted == there else "they fit"
    output.say(f"Vocabulary: {sizes}: {verdict}.")
    return [] if is_match else [f"vocab_size mismatch: {sizes}."]


def _length(loaded: Loaded, found: _Findings) -> None:
    from homing.config.estimate.params import num_epochs

    found.document["phases"] = []
    for phase in loaded.run.phases:
        num_tokens = phase.num_steps * phase.batch_tokens
        own = phase.data.num_train_tokens if phase.data else 0 if phase.rl else loaded.run.data.num_train_tokens
        epochs = num_epochs(phase.num_steps, phase.batch_tokens, own)
        found.document["phases"].append(
            {
                "kind": phase.kind,
                "num_steps": phase.num_steps,
                "batch_tokens": phase.batch_tokens,
                "num_tokens": num_tokens,
                "num_epochs": epochs,
                "flops": num_tokens * loaded.run.sizes.flops_per_token,
            }
        )
        if not phase.num_steps:
            output.say(f"Length: {phase.kind}, in epochs; the text is not counted yet.")
            continue
        read = "its data" if phase.data else "the text"
        passes = f", {epochs:.2f} passes over {read}" if epochs is not None else ""
        output.say(
            f"Length: {phase.kind}, {phase.num_steps:,} steps of {phase.batch_tokens:,} tokens ="
            f" {format_count(num_tokens)} tokens{passes}."
        )
    for warning in loaded.warnings:
        output.say(f"Note: {warning}")


def _one_step(loaded: Loaded, found: _Findings) -> None:
    # torch is imported here and nowhere above.
    from homing.lm.verify_model import verify

    output.say("Running one forward and backward pass ...")
    report = verify(loaded.run, Path.cwd())
    found.document["step"] = report.to_dict()
    layers = ""
    if report.num_layers_run < report.num_layers:
        layers = f" with {report.num_layers_run} of its {report.num_layers} layers (what fits here),"
    learns = f", {report.num_adapter_params:,} more in trainable adapters" if report.num_adapter_params else ""
    output.say(f"Weights of {report.phase}: {report.weights}.")
    output.say(
        f"Built on {report.device}{layers} in {format_duration(report.step_s)}: {report.num_params:,}"
        f" parameters{learns}, loss {report.loss:.3f} (guessing gives {report.expected_loss:.3f}, ln of the"
        f" vocabulary), gradient norm {report.grad_norm:.3f} on {report.batch}."
    )
    for sentence in report.notes:
        output.say(f"Note: {sentence}")
    for sentence in report.left_out:
        output.say(f"Not tested: {sentence}")
    found.problems += report.problems


def _end(loaded: Loaded, found: _Findings, *, changes: str) -> None:
    from homing.config import typed_name

    is_next = loaded.is_prepared and not found.problems
    follows = f"homing {'plan' if is_next else 'prep'} {typed_name(loaded.file)}{changes}"
    found.document |= {"problems": found.problems, "warnings": loaded.warnings, "next": follows}
    output.emit("verify/1", found.document)
    if found.problems and output.is_json():
        raise typer.Exit(2)  # the one document already contains the problems
    if found.problems:
        count = counted(len(found.problems), "problem")
        fix = f"Fix the problems above; for data: {follows}"
        raise DataError(what=f"Found {count} in {loaded.run.name}.", why="\n".join(found.problems), fix=fix)
    is_all = loaded.is_prepared and not found.document.get("step", {}).get("left_out")
    sound = "All checks passed." if is_all else "The checks that ran passed."
    output.say(f"{sound} {'Next:' if loaded.is_prepared else 'Prepare the data:'} {follows}")
