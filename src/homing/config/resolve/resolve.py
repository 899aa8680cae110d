"""Resolve the checked run file into run.json: every value final, in base units, with its origin.

tokenizer and prepared data -> vocabulary -> model -> phases -> the rest -> Run

Rules that involve two keys or the data directory are checked here. Their mistakes are added to those of the schema, so
that the user sees one complete list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing import __version__
from homing.config.estimate.params import BYTES_PER_TOKEN_RANGE, bytes_per_token, sizes
from homing.config.parse.source import read_source
from homing.config.paths import home, preset_of, shown, typed_name
from homing.config.prepared_data import Prepared, read_prepared, sha256_of, tokenizer_vocab_size
from homing.config.resolve.cloud_section import resolve_cloud
from homing.config.resolve.model_shape import read_base, resolve_base, resolve_model, shape_of_base
from homing.config.resolve.origins import Trace
from homing.config.resolve.phase_data import PhasePrep, phase_data, phase_prep, uses_run_text
from homing.config.resolve.phase_numbers import Corpus, resolve_phase
from homing.config.resolve.selected_phases import chosen_phases, find_start
from homing.config.text_files import num_text_bytes, warn_of_missing
from homing.config.weights.hub_repo import init_folder
from homing.config.weights.open_weights import Source
from homing.errors import DataError, HomingError
from homing.units import format_bytes, format_count
from homing.wire import file_names as wire_names
from homing.wire.codec import dump
from homing.wire.run_json import Data, Limits, Model, Phase, PhaseData, Run, Sampling, Train

__all__ = ["SPECIALS", "PrepSettings", "Resolved", "resolve"]

SPECIALS = {"standard": 16, "one": 1}
DEFAULT_VOCAB_SIZE = 32_768


@dataclass(frozen=True)
class PrepSettings:
    """Settings for `homing prep`."""

    text: list[str]  # paths, globs, directories
    validation: list[str]
    val_fraction: float
    text_field: str
    vocab_size: int
    split: str  # gpt4 | gpt2
    specials: str  # standard | one
    tokenizer: str  # path of an existing tokenizer.json, or ""
    sample_bytes: int
    shard_tokens: int
    dir: Path  # absolute
    is_vocab_firm: bool = True  # chosen by the user; otherwise prep may use a smaller one, with a notice
    take_bytes: int = 0  # how much of the text to prepare; 0: all


@dataclass(frozen=True)
class Resolved:
    run: Run
    prep: PrepSettings
    is_prepared: bool
    phase_preps: list[PhasePrep]
    source: Source | None  # open weights of model.from, if set


@dataclass(frozen=True)
class _Inputs:
    """What the run starts from: chosen phases, open weights, and the run's own text if a phase reads it."""

    data_dir: Path
    numbers: list[int]  # indices of the chosen phases in the run file
    source: Source | None
    needs_text: bool
    # Hash of the open weights' tokenizer, "" without open weights. Text tokenized with a different tokenizer would be
    # noise to the model, and no later check would notice.
    base_tokenizer_sha256: str
    prepared: Prepared | None
    is_for_prep: bool


@dataclass(frozen=True)
class _AllData:
    """The data of the run and of its phases; the phases by index in the run file."""

    corpus: Corpus
    preps: dict[int, PhasePrep | None]
    datas: dict[int, PhaseData | None]
    corpora: dict[int, Corpus]


def resolve(trace: Trace, name: str, *, is_for_prep: bool) -> Resolved:
    """Resolve the run. Mistakes and warnings are recorded in the trace; use the run only if there are no mistakes."""
    inputs = _read_inputs(trace, name, is_for_prep=is_for_prep)
    vocab_size, model = _resolve_shape(trace, inputs)
    data = _resolve_data(trace, inputs, model, vocab_size)
    phases = _resolve_phases(trace, inputs, model, data, name)
    _renumber(trace, inputs.numbers)
    _refuse_twice(trace, name)
    _note_sizes(trace)
    run = Run(
        name=trace.take("name", ("name",), name, "derived from the file's name"),
        seed=trace.plain("seed", ("seed",)),
        model=model,
        sizes=sizes(model),
        data=_data(trace, inputs.data_dir, inputs.prepared, data.corpus, needs_text=inputs.needs_text),
        phases=phases,
        train=_train(trace),
        sampling=_sampling(trace),
        limits=_limits(trace),
        cloud=resolve_cloud(trace),
        store=_store(trace),
        base=resolve_base(trace, inputs.source),
        code_version=__version__,
        run_file_sha256=hashlib.sha256(trace.source.text.encode()).hexdigest(),
        origin=trace.origin,
    )
    for path in _leaves(dump(run)):
        trace.origin.setdefault(path, "default")
    is_prepared = _is_prepared(trace, inputs, data)
    prep = _prep(trace, vocab_size, inputs.data_dir, inputs.source, inputs.numbers[0])
    return Resolved(run, prep, is_prepared, [each for each in data.preps.values() if each is not None], inputs.source)


# --- the steps of resolve ---------------------------------------------------------------------------------------------


def _read_inputs(trace: Trace, name: str, *, is_for_prep: bool) -> _Inputs:
    data_dir = Path(trace.file.data.dir or Path("data") / name).expanduser().absolute()
    numbers = chosen_phases(trace)
    source = read_base(trace)
    needs_text = any(uses_run_text(trace, number) for number in numbers)
    base_tokenizer_sha256 = sha256_of(source.metadata_dir / wire_names.TOKENIZER) if source is not None else ""
    prepared = None if is_for_prep else _prepared(trace, data_dir, base_tokenizer_sha256 if needs_text else "")
    return _Inputs(data_dir, numbers, source, needs_text, base_tokenizer_sha256, prepared, is_for_prep)


def _resolve_shape(trace: Trace, inputs: _Inputs) -> tuple[int, Model]:
    """Return the vocabulary size and the model's shape, from the open weights or from the run file."""
    if inputs.source is not None:
        return inputs.source.shape.vocab_size, shape_of_base(trace, inputs.source)
    vocab_size = _vocab_size(trace, inputs.prepared, is_for_prep=inputs.is_for_prep, first=inputs.numbers[0])
    return vocab_size, resolve_model(trace, vocab_size)


def _resolve_data(trace: Trace, inputs: _Inputs, model: Model, vocab_size: int) -> _AllData:
    """Return the amount of text of the run and of each phase, and warn about files that prep will not find."""
    numbers, prepared = inputs.numbers, inputs.prepared
    corpus = _corpus(trace, prepared, vocab_size) if inputs.needs_text else Corpus(0, 0, "no phase reads it")
    preps = {number: phase_prep(trace, number, inputs.data_dir) for number in numbers}
    datas = {
        number: phase_data(
            trace, number, None if inputs.is_for_prep else preps[number], model.context, inputs.base_tokenizer_sha256
        )
        for number in numbers
    }
    if not inputs.is_for_prep:
        _warn_of_missing(trace, preps, datas, needs_text=inputs.needs_text and prepared is None)
    corpora = {
        number: _corpus_of(trace, number, preps[number], datas[number], corpus, vocab_size, prepared)
        for number in numbers
    }
    return _AllData(corpus, preps, datas, corpora)


def _resolve_phases(trace: Trace, inputs: _Inputs, model: Model, data: _AllData, name: str) -> list[Phase]:
    numbers, source = inputs.numbers, inputs.source
    start = "" if inputs.is_for_prep else find_start(trace, numbers[0], name)
    tokenizer = (source.metadata_dir if source is not None else inputs.data_dir) / wire_names.TOKENIZER
    is_brought = source is not None and (inputs.data_dir / wire_names.TOKENIZER).is_file()
    return [
        resolve_phase(
            trace, number, model, data.corpora[number], data=data.datas[number], source=source,
            start=start if number == numbers[0] else "",
            tokenizer=tokenizer if tokenizer.is_file() and not inputs.is_for_prep else None,
            turns=inputs.data_dir / wire_names.TURNS if is_brought else None,
            before=[earlier for each in numbers if each < number and (earlier := data.datas[each]) is not None],
        )
        for number in numbers
    ]  # fmt: skip


def _is_prepared(trace: Trace, inputs: _Inputs, data: _AllData) -> bool:
    has_own = all(each is None or each.manifest_sha256 for each in data.datas.values())
    is_checked = not inputs.needs_text and not inputs.is_for_prep
    has_tokenizer = _has_tokenizer(trace, inputs.data_dir, inputs.base_tokenizer_sha256 if is_checked else "")
    return has_own and (inputs.prepared is not None if inputs.needs_text else has_tokenizer)


# --- data and vocabulary ---------------------------------------------------------------------------------------------


def _prepared(trace: Trace, data_dir: Path, tokenizer_sha256: str) -> Prepared | None:
    try:
        found = read_prepared(data_dir)
    except DataError as exc:
        trace.wrong(("data", "dir"), f"{exc.what} {exc.why}", exc.fix)
        return None
    if found is not None and tokenizer_sha256 and found.manifest.tokenizer_sha256 != tokenizer_sha256:
        trace.warn(f"{shown(data_dir)} was not prepared with the tokenizer of model.from. Run `homing prep` again.")
        return None
    return found


def _has_tokenizer(trace: Trace, data_dir: Path, tokenizer_sha256: str) -> bool:
    """Return whether the data folder has a tokenizer.

    `tokenizer_sha256`: hash of the open weights' tokenizer, if the tokenizer in the folder must still be compared with
    it because no text was tokenized; "" to skip the comparison.
    """
    path = data_dir / wire_names.TOKENIZER
    if not path.is_file():
        return False
    if tokenizer_sha256 and sha256_of(path) != tokenizer_sha256:
        trace.warn(f"{shown(path)} is not the tokenizer of model.from. `homing prep` replaces it.")
        return False
    return True


def _vocab_size(trace: Trace, prepared: Prepared | None, *, is_for_prep: bool, first: int) -> int:
    """Return the vocabulary size. `first`: the first phase; its init_from checkpoint may bring the tokenizer."""
    path = ("tokenizer", "vocab_size")
    wanted = trace.file.tokenizer.vocab_size
    existing = _existing_tokenizer(trace)
    if existing is not None:
        file, size = existing
        if wanted is not None and wanted != size:
            problem = f"{trace.source.file} says {wanted:,}, but {file} has {size:,} entries."
            trace.wrong(path, problem, f"Set tokenizer.vocab_size to {size}, or delete the key.")
        trace.note("model.vocab_size", f"tokenizer.file: {file}")
        return size
    least = 256 + SPECIALS[trace.file.tokenizer.specials]
    if wanted is not None and wanted < least:
        problem = f"{wanted} is too small: 256 bytes and {least - 256} specials need {least}."
        trace.wrong(path, problem, f"Allowed: at least {least}.")
    if prepared is not None and not is_for_prep:
        return _prepared_vocab_size(trace, prepared, wanted)
    loaded_tokenizer = _brought_tokenizer(trace, first)
    if loaded_tokenizer is not None and wanted is None:
        trace.note("model.vocab_size", f"init_from: {loaded_tokenizer}")
        try:
            return tokenizer_vocab_size(loaded_tokenizer)
        except DataError as exc:
            trace.wrong(("phases", first, "init_from"), f"{exc.what} {exc.why}", "Use the folder of a checkpoint.")
    trace.take("model.vocab_size", path, DEFAULT_VOCAB_SIZE)
    return wanted or DEFAULT_VOCAB_SIZE


def _brought_tokenizer(trace: Trace, first: int) -> Path | None:
    """Return the tokenizer of the init_from checkpoint, if any: the weights require its ids, so none is trained."""
    brought = trace.file.phases[first].init_from
    try:
        path = init_folder(brought) / wire_names.TOKENIZER
    except HomingError:
        return None  # resolving the phase reports the problem
    return path if brought and path.is_file() else None


def _existing_tokenizer(trace: Trace) -> tuple[str, int] | None:
    file = trace.file.tokenizer.file
    if not file:
        return None
    try:
        return file, tokenizer_vocab_size(Path(file).expanduser())
    except HomingError as exc:
        trace.wrong(("tokenizer", "file"), f"{exc.what} {exc.why}", exc.fix)
        return None


def _prepared_vocab_size(trace: Trace, prepared: Prepared, wanted: int | None) -> int:
    """Return the size of the existing tokenizer; a different size in the run file is reported as a mistake."""
    found = prepared.manifest.vocab_size
    file = shown(prepared.dir / wire_names.TOKENIZER)
    is_shrunk = prepared.manifest.settings.get("vocab_size") == wanted and not _is_vocab_firm(trace)
    if wanted is not None and wanted != found and not is_shrunk:
        trace.wrong(
            ("tokenizer", "vocab_size"),
            f"vocab_size mismatch: {trace.source.file} says {wanted:,}, but {file} has {found:,} entries.",
            f"Prepare the data again (homing prep {typed_name(Path(trace.source.file))}), or set it to {found}.",
        )
    trace.note("model.vocab_size", file)
    return found


def _warn_of_missing(
    trace: Trace, preps: dict[int, PhasePrep | None], datas: dict[int, PhaseData | None], *, needs_text: bool
) -> None:
    """Warn about missing files that prep has yet to read. Text that is already in shards may be missing."""
    if needs_text:
        warn_of_missing(trace, ("data", "text"), trace.file.data.text)
        warn_of_missing(trace, ("data", "validation"), trace.file.data.validation)
    for number, data in datas.items():
        prep = preps[number]
        if prep is not None and data is not None and not data.manifest_sha256:
            at = ("phases", number, "data")
            warn_of_missing(trace, (*at, "text"), prep.text)
            warn_of_missing(trace, (*at, "chat"), [source.path for source in prep.chat])
            warn_of_missing(trace, (*at, "validation"), prep.validation)


def _is_vocab_firm(trace: Trace) -> bool:
    """Return whether the user chose the size: it is not derived, from the smoke profile, or the preset's own."""
    path = ("tokenizer", "vocab_size")
    if not trace.is_given(path) or trace.source.is_preset:
        return False
    setting = trace.source.setting(path)
    if setting is not None:
        return setting.startswith("--set")
    preset = preset_of(trace.source.text)
    return preset is None or read_source(preset).get(path) != trace.source.get(path)


def _corpus(trace: Trace, prepared: Prepared | None, vocab_size: int) -> Corpus:
    if prepared is not None:
        found = Corpus(prepared.num_train_tokens, prepared.num_val_tokens, shown(prepared.dir / wire_names.MANIFEST))
        if not found.num_val_tokens:
            trace.warn(
                "There is no held-out text, so nothing can be evaluated. Set data.validation"
                f"{'' if trace.file.data.val_fraction else ', or raise data.val_fraction'}, and prepare again."
            )
        return found
    num_bytes = _taken(trace, num_text_bytes(trace.file.data.text))
    if not num_bytes:
        return Corpus(0, 0, "not prepared yet")
    guess, amount = _guess(num_bytes, vocab_size, None)
    source = f"estimated from {format_bytes(num_bytes)} of text"
    trace.warn(f"Not prepared yet: {amount}, {source}. `homing prep` counts them.")
    return Corpus(guess, 0, source)


def _taken(trace: Trace, num_bytes: int) -> int:
    return min(num_bytes, trace.file.data.take or num_bytes)


def _guess(num_bytes: int, vocab_size: int, prepared: Prepared | None) -> tuple[int, str]:
    """Estimate the tokens in this much text, and describe the estimate.

    `prepared`: text already tokenized with the same tokenizer, which gives the bytes per token for this user's
    language. Without it, languages differ too much for one number.
    """
    train = prepared.manifest.splits.get("train") if prepared is not None else None
    if train is not None and train.num_tokens and train.num_text_bytes:
        guess = int(num_bytes * train.num_tokens / train.num_text_bytes)
        return guess, f"about {format_count(guess)} tokens, estimated from the prepared text"
    low, guess, high = (int(num_bytes / (bytes_per_token(vocab_size) * much)) for much in BYTES_PER_TOKEN_RANGE)
    return guess, f"about {format_count(guess)} tokens ({format_count(low)} to {format_count(high)} by language)"


def _corpus_of(
    trace: Trace, number: int, prep: PhasePrep | None, data: PhaseData | None, whole: Corpus, vocab_size: int,
    prepared: Prepared | None,
) -> Corpus:  # fmt: skip
    """Return the data amount of one phase. `prepared`: the text of the run."""
    if prep is None:
        return whole
    if data is not None and data.manifest_sha256:
        own = read_prepared(prep.dir) if prep.kind == "chat" else None
        source = shown(prep.dir / wire_names.MANIFEST)
        return Corpus(data.num_train_tokens, data.num_val_tokens, source, own.num_train_tokens if own else 0)
    patterns = [*prep.text, *(source.path for source in prep.chat)]
    num_bytes = num_text_bytes(patterns)
    num_bytes = _taken(trace, num_bytes) if prep.kind != "chat" else num_bytes
    if not num_bytes:
        return Corpus(0, 0, "not prepared yet")
    guess, amount = _guess(num_bytes, vocab_size, prepared)
    source = f"estimated from {format_bytes(num_bytes)} of {prep.kind}"
    trace.warn(f"phases.{number} is not prepared yet: {amount}, {source}.")
    return Corpus(guess, 0, source)


def _data(trace: Trace, data_dir: Path, prepared: Prepared | None, corpus: Corpus, *, needs_text: bool) -> Data:
    trace.take("data.dir", ("data", "dir"), "", "derived from name")
    for name in ("manifest_sha256", "tokenizer_sha256", "num_train_tokens", "num_val_tokens"):
        trace.note(f"data.{name}", corpus.source if prepared or name == "num_train_tokens" else "not prepared yet")
    if not needs_text:
        path = data_dir / wire_names.TOKENIZER
        return Data(str(data_dir), "", sha256_of(path) if path.is_file() else "", 0, 0)
    return Data(
        dir=str(data_dir),
        manifest_sha256=prepared.manifest_sha256 if prepared else "",
        tokenizer_sha256=prepared.manifest.tokenizer_sha256 if prepared else "",
        num_train_tokens=corpus.num_train_tokens if prepared else 0,
        num_val_tokens=corpus.num_val_tokens,
    )


def _prep(trace: Trace, vocab_size: int, data_dir: Path, source: Source | None, first: int) -> PrepSettings:
    data, tokenizer = trace.file.data, trace.file.tokenizer
    existing = str(Path(tokenizer.file).expanduser()) if tokenizer.file else str(_brought_tokenizer(trace, first) or "")
    if source is not None:
        # The model may have more rows than its tokenizer has ids.
        existing, vocab_size = str(source.metadata_dir / wire_names.TOKENIZER), source.tokenizer_size
    return PrepSettings(
        text=list(data.text),
        validation=list(data.validation),
        val_fraction=data.val_fraction,
        text_field=data.text_field,
        vocab_size=vocab_size,
        split=tokenizer.split,
        specials=tokenizer.specials,
        tokenizer=existing,
        sample_bytes=tokenizer.sample,
        shard_tokens=data.shard_tokens,
        dir=data_dir,
        is_vocab_firm=source is not None or bool(existing) or _is_vocab_firm(trace),
        take_bytes=data.take,
    )


def _renumber(trace: Trace, numbers: list[int]) -> None:
    """Rename origins to use each phase's index in run.json, which differs if phases of the file are left out."""
    for place, number in enumerate(numbers):
        if place != number:
            old, new = f"phases.{number}.", f"phases.{place}."
            for name in [name for name in trace.origin if name.startswith(old)]:
                trace.origin[new + name.removeprefix(old)] = trace.origin.pop(name)


def _refuse_twice(trace: Trace, name: str) -> None:
    """Reject two phases of the same kind, even if only some phases are chosen: the full file could never be trained."""
    first: dict[str, int] = {}
    for number, phase in enumerate(trace.file.phases):
        if not trace.is_sound(("phases", number, "kind")) or first.setdefault(phase.kind, number) == number:
            continue
        trace.wrong(
            ("phases", number, "kind"),
            f"phases.{first[phase.kind]} is already {phase.kind}, and the checkpoint folder is named after the kind.",
            "Move this phase and those after it to another run file that starts from the result of this one: "
            f"init_from: models/{name} after `homing fetch`, or a checkpoint's folder. Or merge the two phases.",
        )
        return  # the user moves later phases to the other file too


# --- the rest --------------------------------------------------------------------------------------------------------


def _train(trace: Trace) -> Train:
    limit = trace.file.limits.time
    why = "derived from limits.time" if limit else "default"
    return Train(
        device=trace.plain("train.device", ("train", "device")),
        precision=trace.plain("train.precision", ("train", "precision")),
        compile=trace.plain("train.compile", ("train", "compile")),
        attention=trace.plain("train.attention", ("train", "attention")),
        graphs=trace.plain("train.graphs", ("train", "graphs")),
        is_deterministic=trace.plain("train.is_deterministic", ("train", "deterministic")),
        num_threads=trace.plain("train.num_threads", ("train", "threads")),
        num_ranks=trace.plain("train.num_ranks", ("train", "ranks")),
        log_every=trace.plain("train.log_every", ("train", "log_every")),
        max_bad_steps=trace.plain("train.max_bad_steps", ("train", "max_bad_steps")),
        time_limit_s=trace.take("train.time_limit_s", ("train", "time_limit"), limit, why),
        writes_csv=trace.plain("train.writes_csv", ("train", "csv")),
    )


def _sampling(trace: Trace) -> Sampling:
    return Sampling(
        prompts=list(trace.plain("sampling.prompts", ("sample", "prompts"))),
        num_tokens=trace.plain("sampling.num_tokens", ("sample", "tokens")),
        temperature=trace.plain("sampling.temperature", ("sample", "temperature")),
        top_k=trace.plain("sampling.top_k", ("sample", "top_k")),
    )


def _limits(trace: Trace) -> Limits:
    spend = trace.plain("limits.spend_usd", ("limits", "spend"))
    rate = trace.plain("limits.rate_usd_per_hour", ("limits", "rate"))
    return Limits(
        spend_usd=None if spend is None else str(spend),
        time_s=trace.plain("limits.time_s", ("limits", "time")),
        idle_s=trace.plain("limits.idle_s", ("limits", "idle")),
        unsaved_s=trace.plain("limits.unsaved_s", ("limits", "unsaved")),
        stall_factor=trace.plain("limits.stall_factor", ("limits", "stall_factor")),
        rate_usd_per_hour=None if rate is None else str(rate),
        on_divergence=trace.plain("limits.on_divergence", ("limits", "on_divergence")),
        on_slow=trace.plain("limits.on_slow", ("limits", "on_slow")),
        relaunches=trace.plain("limits.relaunches", ("limits", "relaunches")),
    )


def _store(trace: Trace) -> str:
    default = f"file:{(home() / 'store').absolute()}"
    typed = trace.take("store", ("store",), default, "default")
    if typed.startswith("file:") and not typed.startswith("file:/"):
        return f"file:{Path(typed.removeprefix('file:')).expanduser().absolute()}"
    return typed


def _note_sizes(trace: Trace) -> None:
    for name in ("num_params", "num_matmul_params", "flops_per_token"):
        trace.note(f"sizes.{name}", "derived from model")
    trace.note("code_version", "this homing")
    trace.note("run_file_sha256", "derived from the file")
    trace.note("id", "given at launch")
    trace.note("train.needs_gpu", "set at launch")


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted name of every value in run.json; a list of plain values is one value."""
    if isinstance(value, dict) and path != "origin":
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{number}")
    elif path not in ("origin", "schema"):
        yield path
