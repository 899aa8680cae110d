"""Resolve the checked run file into run.json: every value final, in base units, with its origin.

    inputs: chosen phases, open weights, prepared data -> vocabulary and model -> data -> phases -> the other sections

Each section below resolves one part of the run file. Rules that involve two keys or the data directory are checked
along the way. Their mistakes are added to those that the schema found, so that the user sees one complete list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing import __version__
from homing.config.estimate.params_and_flops import sizes
from homing.config.home_and_run_files import preset_of, shown, typed_name
from homing.config.parse.check import Trace
from homing.config.parse.key_suggestions import nearest
from homing.config.parse.source import read_source
from homing.config.prepared_data import Prepared, read_prepared, sha256_of, tokenizer_vocab_size
from homing.config.resolve import depth_dial
from homing.config.resolve.phase_data import (
    Corpus,
    PhasePrep,
    phase_corpus,
    phase_data,
    phase_prep,
    text_corpus,
    uses_run_text,
    warn_of_missing,
)
from homing.config.resolve.phase_numbers import resolve_phase
from homing.config.resolve.phase_weights import find_start, loaded_tokenizer
from homing.config.resolve.sections import (
    read_base,
    resolve_base,
    resolve_cloud,
    resolve_limits,
    resolve_model,
    resolve_sampling,
    resolve_store,
    resolve_train,
    shape_of_base,
)
from homing.config.weights.open_weights import Source
from homing.errors import DataError, HomingError
from homing.wire import file_names as wire_names
from homing.wire.codec import dump
from homing.wire.run_json import Data, Model, Phase, PhaseData, Run

__all__ = ["SPECIALS", "PrepSettings", "Resolved", "resolve"]

SPECIALS = {"standard": 16, "one": 1}
DEFAULT_VOCAB_SIZE = 32_768
_ALL = "all"  # train.only: every phase


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
    is_vocab_firm: bool = True  # whether the user chose vocab_size; if not, prep may use a smaller one, with a notice
    take_bytes: int = 0  # how much of the text to prepare; 0 for all of it


@dataclass(frozen=True)
class Resolved:
    run: Run
    prep: PrepSettings
    is_prepared: bool
    phase_preps: list[PhasePrep]
    source: Source | None  # the open weights that model.from names, if any


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
    """The data for the run and for its phases. The keys of the dicts are phase indices in the run file."""

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
    run = Run(
        name=trace.take("name", ("name",), name, "derived from the file's name"),
        seed=trace.plain("seed", ("seed",)),
        model=model,
        sizes=sizes(model),
        data=_run_data(trace, inputs, data.corpus),
        phases=phases,
        train=resolve_train(trace),
        sampling=resolve_sampling(trace),
        limits=resolve_limits(trace),
        cloud=resolve_cloud(trace),
        store=resolve_store(trace),
        base=resolve_base(trace, inputs.source),
        code_version=__version__,
        run_file_sha256=hashlib.sha256(trace.source.text.encode()).hexdigest(),
        origin=trace.origin,
    )
    _note_other_origins(trace, run)
    prep = _prep_settings(trace, inputs, vocab_size)
    phase_preps = [each for each in data.preps.values() if each is not None]
    return Resolved(run, prep, _is_prepared(trace, inputs, data), phase_preps, inputs.source)


# --- inputs ---------------------------------------------------------------------------------------------------------


def _read_inputs(trace: Trace, name: str, *, is_for_prep: bool) -> _Inputs:
    data_dir = Path(trace.file.data.dir or Path("data") / name).expanduser().absolute()
    numbers = _chosen_phases(trace)
    source = read_base(trace)
    needs_text = any(uses_run_text(trace, number) for number in numbers)
    base_tokenizer_sha256 = sha256_of(source.metadata_dir / wire_names.TOKENIZER) if source is not None else ""
    prepared = None if is_for_prep else _read_prepared(trace, data_dir, base_tokenizer_sha256 if needs_text else "")
    return _Inputs(data_dir, numbers, source, needs_text, base_tokenizer_sha256, prepared, is_for_prep)


def _chosen_phases(trace: Trace) -> list[int]:
    """Return the indices of the phases that `train.only` chooses, such as mid+sft, in the run file's order.

    If a name is unknown, record a mistake and return all indices.
    """
    kinds = [phase.kind for phase in trace.file.phases]
    typed = [part.strip() for part in trace.file.train.only.lower().split("+")]
    if typed == [_ALL]:
        return list(range(len(kinds)))
    for name in typed:
        if name not in kinds and trace.is_sound(("train", "only")):
            near = nearest(name, [*kinds, _ALL])
            hint = f"Did you mean {near}? " if near else ""
            add = f" To add it, put `- kind: {name}` under phases." if name in depth_dial.PHASE_RATE else ""
            there = f"{hint}This run has {', '.join(kinds)}; join several with +, or use all.{add}"
            trace.wrong(("train", "only"), f"this run has no phase {name!r}.", there)
    return [number for number, kind in enumerate(kinds) if kind in typed] or list(range(len(kinds)))


def _read_prepared(trace: Trace, data_dir: Path, tokenizer_sha256: str) -> Prepared | None:
    """Return the prepared text; None if there is none, or if it was prepared with a different tokenizer."""
    try:
        found = read_prepared(data_dir)
    except DataError as exc:
        trace.wrong(("data", "dir"), f"{exc.what} {exc.why}", exc.fix)
        return None
    if found is not None and tokenizer_sha256 and found.manifest.tokenizer_sha256 != tokenizer_sha256:
        trace.warn(f"{shown(data_dir)} was not prepared with the tokenizer of model.from. Run `homing prep` again.")
        return None
    return found


# --- model: vocabulary and shape ------------------------------------------------------------------------------------


def _resolve_shape(trace: Trace, inputs: _Inputs) -> tuple[int, Model]:
    """Return the vocabulary size and the model's shape, from the open weights or from the run file."""
    if inputs.source is not None:
        return inputs.source.shape.vocab_size, shape_of_base(trace, inputs.source)
    vocab_size = _vocab_size(trace, inputs)
    return vocab_size, resolve_model(trace, vocab_size)


def _vocab_size(trace: Trace, inputs: _Inputs) -> int:
    """Return the vocabulary size: from tokenizer.file, prepared data, the run file, init_from, or the default."""
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
        problem = f"{wanted} is too small: 256 bytes and {least - 256} special tokens need {least}."
        trace.wrong(path, problem, f"Allowed: at least {least}.")
    if inputs.prepared is not None:
        return _prepared_vocab_size(trace, inputs.prepared, wanted)
    if wanted is None and (size := _init_vocab_size(trace, inputs.numbers[0])):
        return size
    trace.take("model.vocab_size", path, DEFAULT_VOCAB_SIZE)
    return wanted or DEFAULT_VOCAB_SIZE


def _existing_tokenizer(trace: Trace) -> tuple[str, int] | None:
    """Return tokenizer.file and its vocabulary size; None if it is not set or cannot be used."""
    file = trace.file.tokenizer.file
    if not file:
        return None
    try:
        return file, tokenizer_vocab_size(Path(file).expanduser())
    except HomingError as exc:
        trace.wrong(("tokenizer", "file"), f"{exc.what} {exc.why}", exc.fix)
        return None


def _prepared_vocab_size(trace: Trace, prepared: Prepared, wanted: int | None) -> int:
    """Return the prepared data's vocabulary size. A different size in the run file is reported as a mistake."""
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


def _init_vocab_size(trace: Trace, first: int) -> int:
    """Return the vocabulary size of the checkpoint that the first phase starts from; 0 if there is none."""
    tokenizer = _init_tokenizer(trace, first)
    if tokenizer is None:
        return 0
    trace.note("model.vocab_size", f"init_from: {tokenizer}")
    try:
        return tokenizer_vocab_size(tokenizer)
    except DataError as exc:
        trace.wrong(("phases", first, "init_from"), f"{exc.what} {exc.why}", "Use the folder of a checkpoint.")
        return 0


def _init_tokenizer(trace: Trace, first: int) -> Path | None:
    """Return the init_from checkpoint's tokenizer, if any. The run must use it, because the weights expect its ids."""
    typed = trace.file.phases[first].init_from
    return loaded_tokenizer(typed) if typed else None


def _is_vocab_firm(trace: Trace) -> bool:
    """Return True if the user chose vocab_size, rather than a default, the smoke profile or a preset."""
    path = ("tokenizer", "vocab_size")
    if not trace.is_given(path) or trace.source.is_preset:
        return False
    setting = trace.source.setting(path)
    if setting is not None:
        return setting.startswith("--set")
    preset = preset_of(trace.source.text)
    return preset is None or read_source(preset).get(path) != trace.source.get(path)


# --- data -----------------------------------------------------------------------------------------------------------


def _resolve_data(trace: Trace, inputs: _Inputs, model: Model, vocab_size: int) -> _AllData:
    """Return the amount of data for the run and for each phase, and warn about files that prep will not find."""
    numbers, prepared = inputs.numbers, inputs.prepared
    unread = Corpus(0, 0, "no phase reads it")
    corpus = text_corpus(trace, prepared, vocab_size, model.context) if inputs.needs_text else unread
    preps = {number: phase_prep(trace, number, inputs.data_dir) for number in numbers}
    datas = {
        number: phase_data(
            trace, number, None if inputs.is_for_prep else preps[number], model.context, inputs.base_tokenizer_sha256
        )
        for number in numbers
    }
    if not inputs.is_for_prep:
        warn_of_missing(trace, preps, datas, needs_text=inputs.needs_text and prepared is None)
    corpora = {
        number: phase_corpus(trace, number, preps[number], datas[number], corpus, vocab_size, prepared)
        for number in numbers
    }
    return _AllData(corpus, preps, datas, corpora)


def _run_data(trace: Trace, inputs: _Inputs, corpus: Corpus) -> Data:
    """Return the `data` section of run.json: folder, hashes and token counts, which are 0 if nothing is prepared."""
    data_dir, prepared = inputs.data_dir, inputs.prepared
    trace.take("data.dir", ("data", "dir"), "", "derived from name")
    for name in ("manifest_sha256", "tokenizer_sha256", "num_train_tokens", "num_val_tokens"):
        trace.note(f"data.{name}", corpus.source if prepared or name == "num_train_tokens" else "not prepared yet")
    if not inputs.needs_text:
        path = data_dir / wire_names.TOKENIZER
        return Data(str(data_dir), "", sha256_of(path) if path.is_file() else "", 0, 0)
    return Data(
        dir=str(data_dir),
        manifest_sha256=prepared.manifest_sha256 if prepared else "",
        tokenizer_sha256=prepared.manifest.tokenizer_sha256 if prepared else "",
        num_train_tokens=corpus.num_train_tokens if prepared else 0,
        num_val_tokens=corpus.num_val_tokens,
    )


def _prep_settings(trace: Trace, inputs: _Inputs, vocab_size: int) -> PrepSettings:
    data, tokenizer, source = trace.file.data, trace.file.tokenizer, inputs.source
    existing = Path(tokenizer.file).expanduser() if tokenizer.file else _init_tokenizer(trace, inputs.numbers[0])
    if source is not None:
        # The model may have more embedding rows than its tokenizer has ids.
        existing, vocab_size = source.metadata_dir / wire_names.TOKENIZER, source.tokenizer_size
    return PrepSettings(
        text=list(data.text),
        validation=list(data.validation),
        val_fraction=data.val_fraction,
        text_field=data.text_field,
        vocab_size=vocab_size,
        split=tokenizer.split,
        specials=tokenizer.specials,
        tokenizer=str(existing or ""),
        sample_bytes=tokenizer.sample,
        shard_tokens=data.shard_tokens,
        dir=inputs.data_dir,
        is_vocab_firm=existing is not None or _is_vocab_firm(trace),
        take_bytes=data.take,
    )


def _is_prepared(trace: Trace, inputs: _Inputs, data: _AllData) -> bool:
    """Return True if everything that the chosen phases read is prepared."""
    has_own = all(each is None or each.manifest_sha256 for each in data.datas.values())
    is_checked = not inputs.needs_text and not inputs.is_for_prep
    has_tokenizer = _has_tokenizer(trace, inputs.data_dir, inputs.base_tokenizer_sha256 if is_checked else "")
    return has_own and (inputs.prepared is not None if inputs.needs_text else has_tokenizer)


def _has_tokenizer(trace: Trace, data_dir: Path, tokenizer_sha256: str) -> bool:
    """Return True if the data folder has a tokenizer that the run can use.

    `tokenizer_sha256`: the required hash (that of the open weights' tokenizer), or "" to accept any tokenizer.
    """
    path = data_dir / wire_names.TOKENIZER
    if not path.is_file():
        return False
    if tokenizer_sha256 and sha256_of(path) != tokenizer_sha256:
        trace.warn(f"{shown(path)} is not the tokenizer of model.from. Run `homing prep` to replace it.")
        return False
    return True


# --- phases ---------------------------------------------------------------------------------------------------------


def _resolve_phases(trace: Trace, inputs: _Inputs, model: Model, data: _AllData, name: str) -> list[Phase]:
    _refuse_twice(trace, name)
    numbers, source = inputs.numbers, inputs.source
    tokenizer = (source.metadata_dir if source is not None else inputs.data_dir) / wire_names.TOKENIZER
    is_brought = source is not None and (inputs.data_dir / wire_names.TOKENIZER).is_file()
    phases = [
        resolve_phase(
            trace, number, model, data.corpora[number], data=data.datas[number], source=source,
            start=_start(trace, inputs, name) if number == numbers[0] else "",
            tokenizer=tokenizer if tokenizer.is_file() and not inputs.is_for_prep else None,
            turns=inputs.data_dir / wire_names.TURNS if is_brought else None,
            before=[earlier for each in numbers if each < number and (earlier := data.datas[each]) is not None],
        )
        for number in numbers
    ]  # fmt: skip
    _renumber(trace, numbers)
    return phases


def _start(trace: Trace, inputs: _Inputs, name: str) -> str:
    """Return the checkpoint of an earlier phase that the first chosen phase starts from; "" if it needs none."""
    first = inputs.numbers[0]
    is_continued = first > 0 and not trace.file.phases[first].init_from
    return find_start(trace, first, name) if is_continued and not inputs.is_for_prep else ""


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
        return  # one report is enough, because its fix applies to all later phases too


def _renumber(trace: Trace, numbers: list[int]) -> None:
    """Rename origins to use each phase's index in run.json, which differs if some phases of the file are left out."""
    for place, number in enumerate(numbers):
        if place != number:
            old, new = f"phases.{number}.", f"phases.{place}."
            for name in [name for name in trace.origin if name.startswith(old)]:
                trace.origin[new + name.removeprefix(old)] = trace.origin.pop(name)


# --- origins --------------------------------------------------------------------------------------------------------


def _note_other_origins(trace: Trace, run: Run) -> None:
    """Record the origin of each value that does not come from a key of the run file."""
    for name in ("num_params", "num_matmul_params", "flops_per_token"):
        trace.note(f"sizes.{name}", "derived from model")
    trace.note("code_version", "the installed homing")
    trace.note("run_file_sha256", "derived from the file")
    trace.note("id", "assigned at launch")
    trace.note("train.needs_gpu", "set at launch")
    for path in _leaves(dump(run)):
        trace.origin.setdefault(path, "default")


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted name of every value in run.json; a list of plain values counts as one value."""
    if isinstance(value, dict) and path != "origin":
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{number}")
    elif path not in ("origin", "schema"):
        yield path
