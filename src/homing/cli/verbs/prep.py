"""`homing prep [RUN]`: turn text into a tokenizer and token shards, and report how far the tokens go.

run file or flags -> PrepOrder -> homing.lm.data.prep -> report -> steps and epochs -> verify

Also works without a run file: `homing prep --text a.txt --out data/x --vocab-size 10000`. With one, flags are written
into the file when the work is done, so that later verbs use the same data; `--set` and `--smoke` change one command
only.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homing.cli import output
from homing.cli.options import HeldOutPaths, Json, RunName, Sets, TextPaths, as_typed
from homing.cli.prep_report import Meter, document, print_report
from homing.errors import DataError, UsageError

if TYPE_CHECKING:
    from homing.config import Loaded
    from homing.lm.data.prep import PrepOrder

__all__ = ["command"]


def command(
    run: RunName = None,
    text: TextPaths = None,
    validation: HeldOutPaths = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Output folder for shards and tokenizer.")
    ] = None,
    vocab_size: Annotated[
        str | None, typer.Option("--vocab-size", metavar="N", help="Vocabulary size, such as 10000 or 32k.")
    ] = None,
    use_existing_tokenizer: Annotated[
        bool, typer.Option("--use-existing-tokenizer", help="Use the tokenizer.json in DIR; never train one.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="PATH", help="Use this tokenizer.json; never train one.")
    ] = None,
    specials: Annotated[
        str | None,
        typer.Option(
            "--specials", metavar="standard|one", help="Special tokens: standard, or one (only <|endoftext|>)."
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field", metavar="NAME", help="Text field of a .jsonl line, or text column of a .parquet file."
        ),
    ] = None,
    val_fraction: Annotated[
        str | None,
        typer.Option("--val-fraction", metavar="SHARE", help="Share of the text held out for validation: 5% or 0.05."),
    ] = None,
    take: Annotated[
        str | None, typer.Option("--take", metavar="SIZE", help="Use about this much of the text, such as 100MB.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Prepare again even if nothing changed.")] = False,
    is_smoke: Annotated[bool, typer.Option("--smoke", help="Prepare the scaled-down run file of a smoke run.")] = False,
    sets: Sets = None,
    json_: Json = False,
) -> None:
    """Turn text into a tokenizer and token shards."""
    from homing.cli.extras import need

    need("lm", verb="prep")
    given = _given(
        {
            "data.text": text,
            "data.validation": validation,
            "data.dir": out,
            "data.text_field": text_field,
            "data.val_fraction": val_fraction,
            "data.take": take,
            "tokenizer.vocab_size": vocab_size,
            "tokenizer.specials": specials,
            "tokenizer.file": tokenizer,
        }
    )
    flags = {key: _as_value(value) for key, value in given.items()}
    changes = [*(sets or []), *(f"{key}={value}" for key, value in flags.items())]
    if run is None and text:
        if is_smoke or sets:
            raise UsageError(
                what="--smoke and --set need a run file.",
                why="With --text and no RUN, prep takes all settings from its options.",
                fix="Name the run: homing prep RUN --smoke",
            )
        loaded, order = None, _order_from_flags(given, use_existing_tokenizer, force)
    else:
        loaded, order = _order_from_run(run, changes, use_existing_tokenizer, force, is_smoke)
    try:
        _prepare(order, loaded, changes, is_smoke, remembered={} if sets or is_smoke else flags)
    except KeyboardInterrupt:
        output.say("Progress is saved. Run the same command to continue.")
        raise


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were typed.

    vocab_size becomes a number, because messages repeat it: --set tokenizer.vocab_size=500.
    """
    found = {key: value for key, value in flags.items() if value not in (None, [])}
    if str(found.get("tokenizer.vocab_size", "")).isdecimal():
        found["tokenizer.vocab_size"] = int(found["tokenizer.vocab_size"])
    return found


def _as_value(value: Any) -> str:
    """Format a value for --set: a path or a size unquoted, everything else as JSON, which is also YAML."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w.-]*/[\w./-]+|\d+[kMGTB]i?B?|[\d.]+%?", value)
    return value if is_plain else json.dumps(value)


def _order_from_flags(given: dict[str, Any], is_existing: bool, force: bool) -> PrepOrder:
    from homing.config.schema.value_types import parse_number
    from homing.lm.data.prep import PrepOrder
    from homing.units import parse_bytes, parse_count

    if "data.dir" not in given:
        raise UsageError(
            what="No output folder for the shards.",
            why="With --text and no RUN, prep takes all settings from its options.",
            fix="Add --out DIR, such as --out data/mine, or name a run: homing prep RUN",
        )
    folder = Path(given["data.dir"]).expanduser().absolute()
    tokenizer = given.get("tokenizer.file") or (str(folder / "tokenizer.json") if is_existing else "")
    try:
        vocab_size = parse_count(given["tokenizer.vocab_size"]) if "tokenizer.vocab_size" in given else None
    except ValueError as exc:
        raise UsageError(f"--vocab-size: {exc}.", fix="--vocab-size 10000") from exc
    try:
        take_bytes = parse_bytes(given.get("data.take", 0))
    except ValueError as exc:
        raise UsageError(f"--take: {exc}.", fix="--take 100MB") from exc
    if vocab_size is None:
        vocab_size = _size_of(tokenizer) if tokenizer else 32768
    rest = {key: given[f"data.{key}"] for key in ("validation", "text_field") if f"data.{key}" in given}
    try:
        rest |= {"val_fraction": parse_number(given["data.val_fraction"])} if "data.val_fraction" in given else {}
    except ValueError as exc:
        raise UsageError(f"--val-fraction: {exc}.", fix="--val-fraction 5%") from exc
    return PrepOrder(
        text=given["data.text"],
        dir=folder,
        vocab_size=vocab_size,
        is_vocab_firm="tokenizer.vocab_size" in given,
        specials=given.get("tokenizer.specials", "standard"),
        tokenizer=tokenizer,
        take_bytes=take_bytes,
        is_forced=force,
        **rest,
    )


def _order_from_run(
    run: str | None, sets: list[str], is_existing: bool, force: bool, is_smoke: bool
) -> tuple[Loaded, PrepOrder]:
    from homing.config import load_run, newest_run
    from homing.lm.data.prep import PrepOrder

    name, sets = run or newest_run(), list(sets)
    loaded = load_run(name, sets, is_smoke=is_smoke, is_for_prep=True)
    if is_existing and not loaded.prep.tokenizer:
        existing = loaded.prep.dir / "tokenizer.json"
        _size_of(str(existing))
        sets.append(f"tokenizer.file={json.dumps(str(existing))}")
        loaded = load_run(name, sets, is_smoke=is_smoke, is_for_prep=True)
    return loaded, PrepOrder(**{**vars(loaded.prep), "is_forced": force})


def _size_of(path: str) -> int:
    """Return the vocabulary size of a tokenizer that must exist."""
    from homing.lm.tokenizer.write_files import read_facts

    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.exists():
        raise DataError(
            what=f"No tokenizer found at {file}.",
            why="You asked for an existing tokenizer, so prep does not train one.",
            fix="Pass --tokenizer PATH, or leave out --use-existing-tokenizer to train one.",
        )
    return read_facts(file).vocab_size


def _prepare(
    order: PrepOrder, loaded: Loaded | None, sets: list[str], is_smoke: bool, remembered: dict[str, str]
) -> None:
    from homing.cli.prep_phases import bring_base, needs_text, prepare_phases, take_tokenizer, write_turns_of
    from homing.config import typed_name

    base = bring_base(loaded) if loaded else None
    if loaded and not base and not needs_text(loaded):
        take_tokenizer(loaded)
    result: dict[str, Any] = (
        _prepare_run_text(order) if loaded is None or needs_text(loaded) else {"dir": str(order.dir)}
    )
    if base:
        result["base"] = base
    if loaded:
        write_turns_of(loaded)
    if loaded and loaded.phase_preps:
        result["own"] = prepare_phases(loaded, is_forced=order.is_forced, check=_check_command(loaded, sets, is_smoke))
    if loaded and remembered and _remember(loaded.file, remembered):
        sets = []
    after = _reload(loaded, sets, is_smoke)
    result["phases"] = _budget(after)
    typed = f"{typed_name(loaded.file)}{as_typed(sets, is_smoke=is_smoke)}" if loaded else "NAME"
    result["next"] = f"homing verify {typed}"
    output.emit("prep/1", result)
    if not output.is_json() and "splits" in result:
        print_report(result, is_run=loaded is not None)
    for warning in after.warnings if after else []:
        output.say(f"warning: {warning}")
    if loaded is None:
        output.say(f"To use it in a run file, set `data.dir: {order.dir}`: homing new NAME --from tiny")
    output.say(f"Next: {result['next']}")


def _remember(file: Path, flags: dict[str, str]) -> bool:
    """Write the flags into the run file once their data exists. Print what was written, or why not."""
    from homing.config import preset_dir
    from homing.config.parse.edit import write_keys

    if file.resolve().parent == preset_dir().resolve():
        return False
    changes = ", ".join(f"{key}: {value}" for key, value in flags.items())
    if problem := write_keys(file, flags):
        output.say(
            f"warning: {changes} could not be written to {file}: {problem}. Pass --set to later commands as below."
        )
        return False
    output.say(f"Saved in {file} for later commands: {changes}")
    return True


def _check_command(loaded: Loaded, sets: list[str], is_smoke: bool) -> str:
    """Return the matching `data check` command. It has no --smoke, so pass the smoke run's tokenizer and context."""
    from homing.config import typed_name

    small = f" --tokenizer {shlex.quote(str(loaded.prep.dir))} --context {loaded.run.model.context}" * is_smoke
    return f"homing data check {typed_name(loaded.file)}{as_typed(sets)}{small}"


def _prepare_run_text(order: PrepOrder) -> dict[str, Any]:
    from homing.cli.bring_files import addresses, bring_files, part_of, say_if_less
    from homing.lm.data.prep import prepare

    named, part = order.text, part_of(order.take_bytes, order.text, order.validation)
    text = bring_files(named, order.dir / "from-store", part)
    held_out = bring_files(order.validation, order.dir / "held-out")
    order = replace(order, text=text, validation=held_out, named=addresses(order.text, order.validation))
    with Meter() as meter:
        manifest = prepare(order, meter.show)
    say_if_less(part, named, manifest)
    return document(order, manifest, meter)


def _reload(loaded: Loaded | None, sets: list[str], is_smoke: bool) -> Loaded | None:
    """Load the run file again, now that its tokens are counted: steps, epochs, and a warning about too many epochs."""
    if loaded is None:
        return None
    from homing.config import load_run

    return load_run(str(loaded.file), sets, is_smoke=is_smoke)


def _budget(after: Loaded | None) -> list[dict[str, Any]]:
    if after is None:
        return []
    from homing.config.estimate.params import num_epochs

    whole = after.run.data.num_train_tokens
    return [
        {
            "phase": phase.kind,
            "batch_tokens": phase.batch_tokens,
            "num_steps": phase.num_steps,
            "num_tokens": phase.num_steps * phase.batch_tokens,
            "epochs": num_epochs(
                phase.num_steps, phase.batch_tokens, phase.data.num_train_tokens if phase.data else whole
            ),
        }
        for phase in after.run.phases
        if phase.kind != "rl"  # rl generates its training data as it runs
    ]
