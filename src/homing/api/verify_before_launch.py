"""Verify a run before any money is spent. Implements `homing verify` and `Run.verify()`.

parameters by part, FLOPs -> memory on each GPU -> vocabulary, shards, tokens -> one forward and backward pass

Everything but the forward and backward pass is arithmetic and needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.api import notices
from homing.api.data.stale_shards import refuse_stale
from homing.api.extras import need
from homing.config.load import as_typed, with_phases
from homing.errors import DataError
from homing.units import counted, format_bytes, format_count, format_duration
from homing.wire import file_names

if TYPE_CHECKING:
    from homing.config.estimate.memory import Fit
    from homing.config.load import Loaded

__all__ = ["Findings", "Show", "raise_problems", "verify_run"]

Show = Callable[[str, Any], None]  # receives a table's name, "parameters" or "cards", and its rows


@dataclass
class Findings:
    loaded: Loaded
    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify_run(
    run: str | None = None,
    sets: Sequence[str] | None = None,
    *,
    phase: str | None = None,
    smoke: bool = False,
    no_run: bool = False,
    check_hashes: bool = False,
    show: Show = lambda name, rows: None,
) -> Findings:
    """Check a run's sizes, memory and data, and, unless `no_run` is set, run one training step.

    The problems it finds are in the result; `raise_problems` raises them. `run`: None means the newest run file.
    """
    from homing.config import load_run, newest_run, typed_name

    sets = with_phases(sets, phase)
    if not no_run:
        need("lm", verb="verify")
    loaded = load_run(newest_run() if run is None else run, sets, is_smoke=smoke)
    changes = as_typed(sets, is_smoke=smoke)
    refuse_stale(loaded, f"{typed_name(loaded.file)}{changes}")
    found = Findings(loaded, {"run": loaded.run.name, "file": str(loaded.file), "is_prepared": loaded.is_prepared})
    _say_title(loaded)
    _parameters(loaded, found, show)
    _memory(loaded, found, show)
    _data(loaded, found, check_hashes)
    _length(loaded, found)
    if not no_run and not found.problems:  # if shards are missing, running a step would only report that again
        _one_step(loaded, found)
    follows = _next_command(loaded, found, changes)
    _say_refused(loaded, found, changes, is_smoke=smoke)
    found.document |= {"problems": found.problems, "warnings": loaded.warnings, "next": follows}
    return found


def _say_refused(loaded: Loaded, found: Findings, changes: str, *, is_smoke: bool) -> None:
    """Say why `homing launch` would refuse this run, in the words of `launch` and `plan`."""
    from homing.api.runs.refused_launch import refused_run
    from homing.cloud.commands_to_type import Words
    from homing.config.home_and_run_files import typed_name

    refused = refused_run(loaded, Words(loaded.run.name, f"{typed_name(loaded.file)}{changes}"), is_smoke=is_smoke)
    found.document["refused"] = [vars(refusal) for refusal in refused]
    for refusal in refused:
        notices.say(f"warning: `homing launch` refuses this run. {refusal}\n  fix {refusal.fix}")


def _next_command(loaded: Loaded, found: Findings, changes: str) -> str:
    from homing.config.home_and_run_files import typed_name

    is_next = loaded.is_prepared and not found.problems
    return f"homing {'plan' if is_next else 'prep'} {typed_name(loaded.file)}{changes}"


def raise_problems(found: Findings) -> None:
    """Raise DataError with all problems, if there are any."""
    if found.problems:
        count = counted(len(found.problems), "problem")
        fix = f"Fix the problems above; for data: {found.document['next']}"
        raise DataError(what=f"Found {count} in {found.loaded.run.name}.", why="\n".join(found.problems), fix=fix)


def _say_title(loaded: Loaded) -> None:
    model = loaded.run.model
    notices.say(
        f"{loaded.run.name} ({loaded.file}): {model.arch}, {model.num_layers} layers, width {model.width},"
        f" {model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_size}, feed-forward"
        f" {model.ffn_width}, context {model.context}, vocabulary {model.vocab_size:,}"
    )


def _parameters(loaded: Loaded, found: Findings, show: Show) -> None:
    from homing.config.estimate.params_and_flops import parameter_table

    sizes, table = loaded.run.sizes, parameter_table(loaded.run.model)
    found.document["parameters"] = [{"part": part.name, "num_params": part.num_params} for part in table]
    found.document |= vars(sizes)
    show("parameters", table)
    notices.say(
        f"{format_count(sizes.flops_per_token)} FLOPs per token, forward and backward"
        f" (6 x {sizes.num_matmul_params:,} in matrices, and attention over {loaded.run.model.context:,} tokens).\n"
    )


def _memory(loaded: Loaded, found: Findings, show: Show) -> None:
    from homing.config.estimate.memory import fits_every_phase, training_memory
    from homing.gpus import find_gpu

    run = loaded.run
    memory = training_memory(run)
    parts = ("weights", "gradients", "optimizer", "copies", "activations_per_row", "scratch", "cuda")
    needed = memory.host_needed(run.cloud.num_gpus)
    found.document["memory"] = {**{name: getattr(memory, name) for name in parts}, "host": memory.host}
    found.document["memory"]["host_needed"] = needed
    notices.say(
        "Memory: " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(getattr(memory, name))}" for name in parts)
    )
    if memory.host:
        notices.say(
            f"Host memory: {format_bytes(memory.host)} of optimizer state per GPU; an instance needs"
            f" {format_bytes(needed)} in total."
        )
    every = fits_every_phase(run)
    found.document["cards"] = [
        {
            "gpu": fit.gpu.name,
            "memory_gib": fit.gpu.memory_gib,
            "is_fitting": fit.is_fitting,
            "micro_batch": fit.micro_batch,
            "most_rows": fit.most_rows,
            "peak_bytes": fit.peak_bytes,
            "lower": fit.lower,
            "parallel": fit.parallel,
        }
        for fit in every
    ]
    show("cards", every)
    if run.cloud.num_gpus > 1:
        modes = {kind: [fit.gpu.name for fit in every if fit.parallel == kind and fit.is_fitting]
                 for kind in dict.fromkeys(fit.parallel for fit in every)}  # fmt: skip
        listed = "; ".join(f"{kind} on {', '.join(names)}" for kind, names in modes.items() if names)
        notices.say(
            f"How {run.cloud.num_gpus} GPUs hold the model (train.parallel): {listed or 'no GPU is large enough'}."
        )
    notices.say()
    chosen = find_gpu(run.cloud.gpu) if run.cloud.gpu else None
    for fit in every:
        if chosen and fit.gpu.name == chosen.name and not fit.is_fitting:
            found.problems.append(f"cloud.gpu is {chosen.name}, and {_why_not(fit)}")


def _why_not(fit: Fit) -> str:
    if fit.lower.startswith("train.precision: "):
        return f"it cannot train in this precision. Change {fit.lower}."
    return (
        f"training does not fit in its memory: {format_bytes(fit.peak_bytes)} needed,"
        f" {format_bytes(fit.usable_bytes)} available. Lower {fit.lower}."
    )


def _data(loaded: Loaded, found: Findings, is_hashing: bool) -> None:
    from homing.config.prepared_data import missing_files, read_prepared, unlisted_files

    _own_data(loaded, found, is_hashing)
    prepared = read_prepared(Path(loaded.run.data.dir))
    if prepared is None and loaded.is_prepared:  # no prepared text is needed, because no phase reads the run's text
        found.problems += _vocabulary(loaded, Path(loaded.run.data.dir) / file_names.TOKENIZER)
        return
    if prepared is None:
        found.document["data"] = {"dir": loaded.run.data.dir, "num_train_tokens": 0, "num_val_tokens": 0}
        notices.say(f"Data: nothing has been prepared in {loaded.run.data.dir} yet.")
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
    if tokenizer.is_file():  # a missing tokenizer is already reported
        found.problems += _vocabulary(loaded, tokenizer)
    state = "complete" if not problems else f"wrong files: {len(problems)}"
    checked = ", hashes checked" if is_hashing and not problems else ""
    notices.say(
        f"Data: {prepared.num_train_tokens:,} tokens to train on, {prepared.num_val_tokens:,} held out,"
        f" {counted(num_shards, 'shard')}: {state}{checked}."
    )
    if unlisted := found.document["data"]["unlisted"]:
        more = f" and {len(unlisted) - 3} more" if len(unlisted) > 3 else ""
        notices.say(
            f"warning: training ignores {', '.join(unlisted[:3])}{more} in {prepared.dir}: its"
            f" {file_names.MANIFEST} does not list them. To train on other text, add it to data.text and"
            " run `homing prep`."
        )


def _own_data(loaded: Loaded, found: Findings, is_hashing: bool) -> None:
    """Check the prepared data of each phase that has its own data."""
    from homing.config.prepared_data import missing_files, read_prepared

    found.document["own_data"] = []
    for prep in loaded.phase_preps:
        prepared = read_prepared(prep.dir)
        if prepared is None:
            notices.say(f"Data of {prep.phase}: nothing has been prepared in {prep.dir} yet.")
            continue
        problems = missing_files(prepared, is_hashing=is_hashing)
        found.problems += problems
        counts = {"num_train_tokens": prepared.num_train_tokens, "num_val_tokens": prepared.num_val_tokens}
        found.document["own_data"].append({"phase": prep.phase, "kind": prep.kind, "dir": str(prep.dir), **counts})
        notices.say(
            f"Data of {prep.phase}: {prepared.num_train_tokens:,} tokens of {prep.kind} to train on,"
            f" {prepared.num_val_tokens:,} held out: {f'wrong files: {len(problems)}' if problems else 'complete'}."
        )


def _vocabulary(loaded: Loaded, tokenizer: Path) -> list[str]:
    from homing.config.prepared_data import tokenizer_vocab_size

    try:
        wanted, there = loaded.run.model.vocab_size, tokenizer_vocab_size(tokenizer)
    except DataError as error:
        return [error.what]
    is_match = there <= wanted if loaded.run.base else wanted == there  # open weights may have unused embedding rows
    sizes = f"{wanted:,} in {loaded.file}, {there:,} in {tokenizer}"
    verdict = "they do not match" if not is_match else "they match" if wanted == there else "they fit"
    notices.say(f"Vocabulary: {sizes}: {verdict}.")
    return [] if is_match else [f"vocab_size mismatch: {sizes}."]


def _length(loaded: Loaded, found: Findings) -> None:
    from homing.config.estimate.params_and_flops import num_epochs

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
            notices.say(f"Length: {phase.kind}, set in epochs; the number of tokens is not known yet.")
            continue
        read = "its data" if phase.data else "the text"
        passes = f", {epochs:.2f} passes over {read}" if epochs is not None else ""
        notices.say(
            f"Length: {phase.kind}, {phase.num_steps:,} steps of {phase.batch_tokens:,} tokens ="
            f" {format_count(num_tokens)} tokens{passes}."
        )
    for warning in loaded.warnings:
        notices.say(f"Note: {warning}")


def _one_step(loaded: Loaded, found: Findings) -> None:
    # Import torch only here, because the other checks do not need it.
    from homing.lm.try_first_step import verify

    notices.say("Running one forward and backward pass ...")
    report = verify(loaded.run, Path.cwd())
    found.document["step"] = report.to_dict()
    layers = ""
    if report.num_layers_run < report.num_layers:
        layers = f" with {report.num_layers_run} of {report.num_layers} layers (as many as fit here),"
    learns = f", {report.num_adapter_params:,} more in trainable adapters" if report.num_adapter_params else ""
    notices.say(f"Weights of {report.phase}: {report.weights}.")
    notices.say(
        f"Built on {report.device}{layers} in {format_duration(report.step_s)}: {report.num_params:,}"
        f" parameters{learns}, loss {report.loss:.3f} (guessing gives {report.expected_loss:.3f}, the ln of"
        f" the vocabulary size), gradient norm {report.grad_norm:.3f} on {report.batch}."
    )
    for sentence in report.notes:
        notices.say(f"Note: {sentence}")
    for sentence in report.left_out:
        notices.say(f"Not tested: {sentence}")
    found.problems += report.problems
