"""Resolve one phase to final numbers: steps, batch, learning rates, schedule, and when to evaluate, save and sample.

tokens | epochs | steps  ->  batch_tokens  ->  num_steps  ->  rates and schedule  ->  evaluation and checkpoints
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from homing.config.estimate.params_and_flops import (
    DATA_CONSTRAINED_EPOCHS,
    eval_steps,
    num_epochs,
    save_steps,
    sizes,
    steps_for,
)
from homing.config.parse.check import Trace
from homing.config.parse.source import KeyPath
from homing.config.resolve import depth_dial
from homing.config.resolve.lora_and_rl import resolve_lora, resolve_rl
from homing.config.resolve.phase_data import Corpus
from homing.config.resolve.phase_weights import resolve_init
from homing.config.schema.phase import LENGTHS, PhaseLora, PhaseRl
from homing.config.weights.open_weights import Source
from homing.units import counted
from homing.wire.run_json import Model, Optimizer, Phase, PhaseData, Rl, Schedule

__all__ = ["resolve_phase"]

_EVALS = "a twentieth, at least 10 steps"
_SAVES = "a tenth, or a fifth of a short phase"
_MOST_EVAL_TOKENS = 500_000
_WARMUP_SHARE = 0.02
_MOST_WARMUP_STEPS = 1000
_DECAY_FRACTION = 0.5
_EPOCHS = {"mid": 1.0, "sft": 3.0}  # phase kind -> default length in epochs
_LEAST_EPOCHS = 0.5  # warn below this number of epochs, because many conversations would never be seen
# Below the first number of steps, warn that a model with random weights cannot learn. The second is enough for a start.
_LEAST_STEPS, _ENOUGH_STEPS = 100, 500
_HABITS = ("beta1", "eps", "momentum", "momentum_start", "variance_beta", "cautious", "clip", "weight_decay")
_FLOORS = {"wsd": 0.05, "cosine": 0.1, "constant": 1.0}


def resolve_phase(
    trace: Trace,
    number: int,
    model: Model,
    corpus: Corpus,
    *,
    data: PhaseData | None,
    source: Source | None,
    start: str = "",
    tokenizer: Path | None = None,
    turns: Path | None = None,
    before: Sequence[PhaseData] = (),
) -> Phase:
    """Resolve phase `number` of the run file.

    - corpus: the amount of data that the phase trains on.
    - source: open weights that the run starts from; they need low learning rates.
    - start: checkpoint folder to start from if the run file names none.
    - tokenizer: tokenizer file, if it exists. turns: chat turns of the open weights, if prepared.
    - before: the earlier phases' data.
    """
    at: KeyPath = ("phases", number)
    wire = f"phases.{number}"
    _refuse_what_has_no_effect(trace, at)
    phase = trace.value(at)
    lora = resolve_lora(trace, number) if phase.method != "full" else None
    rl = resolve_rl(trace, number, model.context, tokenizer, turns) if phase.kind == "rl" else None
    num_steps, batch_tokens = _length(trace, at, wire, model, corpus, rl)
    micro_batch = trace.plain(f"{wire}.micro_batch", (*at, "micro_batch"))
    if rl is None:
        _check_batch(trace, at, batch_tokens, micro_batch, model.context)
        _warn_about_data(trace, number, num_steps, batch_tokens, corpus)
    when = _When(trace, at, wire)
    init = str(trace.take(f"{wire}.init_from", (*at, "init_from"), start, "found locally" if start else "default"))
    init_from, init_base = resolve_init(trace, number, init, model, source, tokenizer) if init else ("", "")
    if phase.kind == "pretrain" and not init and source is None:
        _warn_if_too_short(trace, at, num_steps, batch_tokens, model)
    whole = trace.file
    return Phase(
        kind=trace.plain(f"{wire}.kind", (*at, "kind")),
        method=trace.plain(f"{wire}.method", (*at, "method")),
        num_steps=num_steps,
        batch_tokens=batch_tokens,
        micro_batch=micro_batch,
        optimizer=_optimizer(trace, at, wire, model, batch_tokens, num_steps, has_base=source is not None),
        schedule=_schedule(trace, at, wire, num_steps),
        eval_every=int(
            when("eval_every", "eval", "every", eval_steps(num_steps), f"derived from {wire}.num_steps: {_EVALS}")
        ),
        eval_tokens=_tokens_of_rl(trace, at, wire, rl)
        if rl
        else int(when("eval_tokens", "eval", "tokens", *_eval_tokens(model, corpus))),
        save_every=int(
            when("save_every", "checkpoint", "every", save_steps(num_steps), f"derived from {wire}.num_steps: {_SAVES}")
        ),
        save_every_s=float(when("save_every_s", "checkpoint", "every_time", whole.checkpoint.every_time)),
        sample_every=int(when("sample_every", "sample", "every", whole.sample.every)),
        keep_last=int(when("keep_last", "checkpoint", "keep_last", whole.checkpoint.keep_last)),
        init_from=init_from,
        init_base=init_base,
        data=data,
        lora=lora,
        rl=rl,
        recompute=trace.plain(f"{wire}.recompute", (*at, "recompute")),
        offload=trace.plain(f"{wire}.offload", (*at, "offload")),
        sample_prompts=_prompts(trace, at, wire, data if rl is None else next(reversed(before), None)),
    )


def _prompts(trace: Trace, at: KeyPath, wire: str, data: PhaseData | None) -> list[str]:
    """Return the sample prompts of the phase.

    A phase with conversations uses the first question in its data, because a model that answers questions should not
    be sampled with the opening of a book. `data`: the phase's data; in rl, the previous phase's data.
    """
    asked, why = (
        ([data.question], "derived: the first question in its data")
        if data and data.question
        else ([], "sample.prompts")
    )
    return list(trace.take(f"{wire}.sample_prompts", (*at, "sample", "prompts"), asked, why))


def _refuse_what_has_no_effect(trace: Trace, at: KeyPath) -> None:
    phase = trace.value(at)
    for name in ("momentum", "momentum_start", "variance_beta", "cautious"):
        if phase.optimizer == "adamw" and trace.is_given((*at, name)):
            trace.wrong((*at, name), "does not apply to optimizer: adamw.", "Delete it, or change beta1.")
    if trace.file.model.family != "swift" and trace.is_given((*at, "lr_scalar")):
        trace.wrong((*at, "lr_scalar"), "does not apply to family: stock.", "Delete it, or use model.family: swift.")
    if phase.offload != "none" and phase.method != "full":
        trace.wrong(
            (*at, "offload"), f"does not help with method: {phase.method}: adapters have little state.",
            "Delete it, or use recompute: all or method: qlora.",
        )  # fmt: skip
    parallel = trace.file.train.parallel
    if parallel not in ("auto", "ddp"):
        whole = phase.method if phase.method != "full" else "rl" if phase.kind == "rl" else ""
        if whole:
            trace.wrong(
                ("train", "parallel"), f"{parallel} cannot train phases.{at[1]} ({phase.kind}, method: {phase.method}):"
                f" with {whole}, every rank holds the whole model.",
                "Set train.parallel: auto or ddp.",
            )  # fmt: skip
        elif phase.states == "int8":
            trace.wrong(
                (*at, "states"), f"int8 does not work with train.parallel: {parallel}: a block of 256 moments with one"
                " scale could belong to two ranks.",
                "Set states: fp32, or train.parallel: ddp.",
            )  # fmt: skip
    if phase.offload != "none" and trace.file.train.device in ("cpu", "mps"):
        trace.wrong(
            (*at, "offload"), f"has no effect with train.device: {trace.file.train.device}: it is for CUDA GPUs.",
            "Delete it.",
        )  # fmt: skip
    if phase.schedule != "wsd" and trace.is_given((*at, "decay_fraction")):
        trace.wrong((*at, "decay_fraction"), f"does not apply to schedule: {phase.schedule}.", "Delete it, or use wsd.")
    if phase.schedule == "constant" and trace.is_given((*at, "floor")):
        trace.wrong((*at, "floor"), "does not apply to schedule: constant.", "Delete it, or use wsd or cosine.")
    for name in PhaseLora.model_fields:
        if phase.method == "full" and trace.is_given((*at, "lora", name)):
            trace.wrong((*at, "lora", name), "has no effect with method: full.", "Delete it, or use method: lora.")
    for name in PhaseRl.model_fields:
        if phase.kind != "rl" and trace.source.get((*at, "rl", name)) is not None:
            trace.wrong((*at, "rl", name), f"has no effect in a phase of kind {phase.kind}.", "Use kind: rl.")


def _length(trace: Trace, at: KeyPath, wire: str, model: Model, corpus: Corpus, rl: Rl | None) -> tuple[int, int]:
    """Return the number of steps and the tokens per step.

    At most one of tokens, epochs and steps may set the length. If none is set, pretraining derives the length from
    model.depth, and mid and sft use a default number of epochs.
    """
    phase = trace.value(at)
    if rl is not None:
        return _length_of_rl(trace, at, wire, rl)
    given = [name for name in LENGTHS if trace.is_given((*at, name))]
    has_dial = trace.is_given(("model", "depth")) and phase.kind == "pretrain"
    usual = _EPOCHS.get(phase.kind, 0.0)
    if len(given) > 1:
        lines = ", ".join(f"{name} ({trace.source.origin((*at, name))})" for name in given)
        trace.wrong((*at, given[1]), f"more than one length is given: {lines}.", "Keep one of tokens, epochs, steps.")
    length_keys: list[KeyPath] = [("model", "depth"), *((*at, name) for name in LENGTHS)]
    if not given and not has_dial and not usual and trace.is_sound(*length_keys):
        trace.wrong(at, "has no length.", "Set one of tokens, epochs, steps, or set model.depth.")
    length = given[0] if given else "epochs" if usual else "dial"
    why = f"derived from {wire}.{length} and {wire}.batch_tokens" if given else "derived from model.depth"
    if usual and not given:
        why = f"default of {phase.kind}: {usual:g} epochs"
    batch_path = (*at, "batch_tokens")
    if length == "steps":
        best = depth_dial.batch_for_steps(phase.steps, model.context, model.vocab_size)
        if phase.kind == "sft":
            best = max(best, depth_dial.SFT_ROWS * model.context)
        batch_why = f"derived from {wire}.steps"
        most = depth_dial.batch_within(best, phase.steps, corpus.num_train_tokens, model.context)
        if most < best and not trace.is_given(batch_path):
            _say_smaller_batch(trace, wire, phase.steps, most, best, corpus)
            best, batch_why = most, f"{batch_why} and {corpus.source}: at most {DATA_CONSTRAINED_EPOCHS:.0f} passes"
        batch = trace.take(f"{wire}.batch_tokens", batch_path, best, batch_why)
        return trace.take(f"{wire}.num_steps", (*at, "steps"), phase.steps), batch
    if length == "tokens":
        num_tokens = float(phase.tokens)
    elif length == "epochs":
        num_tokens = (phase.epochs or usual) * corpus.num_train_tokens
        why = f"{why} and {corpus.source}"
    else:
        num_tokens = float(depth_dial.tokens_for(model))
    best = depth_dial.batch_for_tokens(max(1.0, num_tokens), model.context, model.vocab_size)
    batch = trace.take(f"{wire}.batch_tokens", batch_path, best, f"derived from {length if given else 'model.depth'}")
    trace.note(f"{wire}.num_steps", why)
    # If the number of tokens is unknown, so is the number of steps: return 0. A warning then suggests `homing prep`.
    return (steps_for(num_tokens, batch) if num_tokens else 0), batch


def _say_smaller_batch(trace: Trace, wire: str, num_steps: int, batch: int, best: int, corpus: Corpus) -> None:
    passes = num_epochs(num_steps, batch, corpus.num_train_tokens) or 0.0
    would = num_epochs(num_steps, best, corpus.num_train_tokens) or 0.0
    trace.warn(
        f"{wire} uses {batch:,} tokens per step, so it reads its data {_times(passes)} in {num_steps:,} steps. With"
        f" the usual {best:,} tokens per step, it would read the {corpus.amount} {_times(would)}. To choose the"
        f" batch size yourself, set {wire}.batch_tokens."
    )


def _times(passes: float) -> str:
    return f"{passes:,.1f} times" if passes < 100 else f"{passes:,.0f} times"


def _length_of_rl(trace: Trace, at: KeyPath, wire: str, rl: Rl) -> tuple[int, int]:
    """Return the number of steps of an rl phase, and the tokens per step, which follow from its `rl` section."""
    for name in ("tokens", "epochs", "batch_tokens"):
        if trace.is_given((*at, name)):
            trace.wrong((*at, name), "has no effect in rl.", "Set steps, rl.prompts_per_step, rl.samples_per_prompt.")
    if not trace.is_given((*at, "steps")) and trace.is_sound((*at, "steps")):
        trace.wrong(at, "has no length.", "Set steps, such as steps: 200.")
    trace.note(f"{wire}.batch_tokens", f"derived from {wire}.rl")
    batch = rl.prompts_per_step * rl.samples_per_prompt * rl.max_new_tokens
    return trace.take(f"{wire}.num_steps", (*at, "steps"), 0), batch


def _check_batch(trace: Trace, at: KeyPath, batch_tokens: int, micro_batch: int, context: int) -> None:
    batch_path, micro_path = (*at, "batch_tokens"), (*at, "micro_batch")
    if not trace.is_sound(batch_path, ("model", "context")):
        return
    if batch_tokens % context:
        below = batch_tokens - batch_tokens % context
        near = " or ".join(f"{n:,}" for n in (below, below + context) if n)
        trace.wrong(batch_path, f"{batch_tokens:,} is not a multiple of the context {context:,}.", f"Nearest: {near}.")
        return
    rows = batch_tokens // context
    if micro_batch and rows % micro_batch and trace.is_sound(micro_path):
        near = ", ".join(str(n) for n in _divisors_near(rows, micro_batch))
        trace.wrong(
            micro_path,
            f"{micro_batch} rows of {context:,} tokens do not divide a batch of {batch_tokens:,} tokens ({rows} rows).",
            f"Nearest: {near}.",
        )


def _divisors_near(number: int, near: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    return [n for n in divisors if n < near][-1:] + [n for n in divisors if n > near][:1]


def _warn_about_data(trace: Trace, number: int, num_steps: int, batch_tokens: int, corpus: Corpus) -> None:
    if not corpus.num_train_tokens:
        if not num_steps:
            trace.warn(f"phases.{number}: run `homing prep` to find out how many steps the epochs take.")
        return
    epochs = num_epochs(num_steps, batch_tokens, corpus.num_train_tokens)
    amount = f"{corpus.amount} ({corpus.source})"
    # Accept up to 10% above the limit, because people round 7,751 steps up to 8,000.
    if epochs is not None and epochs > DATA_CONSTRAINED_EPOCHS * 1.1:
        fewer = max(1, int(DATA_CONSTRAINED_EPOCHS * corpus.num_train_tokens / batch_tokens))
        trace.warn(
            f"phases.{number} reads {amount} {_times(epochs)}. After about {DATA_CONSTRAINED_EPOCHS:.0f} passes, a"
            f" model learns little more from the same text. Use more text, or fewer steps: --set"
            f" phases.{number}.steps={fewer}"
        )
    is_sft = trace.value(("phases", number)).kind == "sft"
    if is_sft and epochs is not None and epochs < _LEAST_EPOCHS and not _is_by_profile(trace, ("phases", number)):
        whole = steps_for(_EPOCHS["sft"] * corpus.num_train_tokens, batch_tokens)
        trace.warn(
            f"phases.{number} trains on {100 * epochs:.2g}% of its conversations: {num_steps:,} steps of"
            f" {batch_tokens:,} tokens cover only part of the {amount}. With phases.{number}.epochs:"
            f" {_EPOCHS['sft']:.0f}, the phase would take {whole:,} steps."
        )
    if batch_tokens > corpus.num_train_tokens:
        trace.warn(f"phases.{number}.batch_tokens is {batch_tokens:,}, but the phase has only {amount}.")


def _warn_if_too_short(trace: Trace, at: KeyPath, num_steps: int, batch_tokens: int, model: Model) -> None:
    """Warn if a length in tokens or epochs leaves too few steps. With `steps`, the user chose the number of steps."""
    if not 0 < num_steps < _LEAST_STEPS or trace.is_given((*at, "steps")):
        return
    wire, num_tokens = f"phases.{at[1]}", num_steps * batch_tokens
    batch = max(1, num_tokens // _ENOUGH_STEPS // model.context) * model.context
    smaller = f", or smaller steps: --set {wire}.batch_tokens={batch} ({num_tokens // batch:,} steps)"
    trace.warn(
        f"{wire} has only {counted(num_steps, 'step')} of {batch_tokens:,} tokens, too few for a model of"
        f" {sizes(model).num_params:,} parameters to learn from random weights. Use more text, a smaller model (homing"
        f" new --list){smaller if batch < batch_tokens else ''}."
    )


def _is_by_profile(trace: Trace, at: KeyPath) -> bool:
    """Return True if --smoke set the phase's number of steps, so that the phase is short on purpose."""
    setting = trace.source.setting((*at, "steps"))
    return setting is not None and not setting.startswith("--set")


def _optimizer(
    trace: Trace, at: KeyPath, wire: str, model: Model, batch_tokens: int, num_steps: int, *, has_base: bool
) -> Optimizer:
    phase = trace.value(at)
    is_loaded = has_base or phase.method != "full"
    kind = trace.plain(f"{wire}.optimizer.kind", (*at, "optimizer"))
    if is_loaded and not trace.is_given((*at, "optimizer")):
        kind = "adamw"
        trace.note(f"{wire}.optimizer.kind", "default for adapters and loaded weights")
    if phase.method != "full" and kind == "muon":
        trace.wrong((*at, "optimizer"), "adapters are trained with adamw.", "Delete it, or use optimizer: adamw.")
    by_kind = depth_dial.PHASE_RATE[phase.kind]
    is_swift, is_pretrain = model.family == "swift", phase.kind == "pretrain"
    both_why = f"derived from model.width and {wire}.batch_tokens"
    if kind == "muon":
        of_depth = "" if is_swift else "model.num_layers, "
        of_family = {"lr": f"derived from {of_depth}{wire}.batch_tokens and {wire}.num_steps",
                     "lr_embedding": both_why, "lr_head": "derived from model.width"}  # fmt: skip
        rates = {
            name: (rate, of_family.get(name, f"default of {model.family}") if is_pretrain else both_why)
            for name, rate in depth_dial.muon_rates(model, phase.kind, batch_tokens, num_steps).items()
        }
    else:
        usual = depth_dial.adamw_rate(model.width, batch_tokens) * by_kind
        if is_loaded:
            usual = depth_dial.LOADED_LR["full" if phase.method == "full" else "lora"] * (
                by_kind if phase.kind == "rl" else 1
            )
        lr = trace.value((*at, "lr")) or usual
        rates = {"lr": (lr, both_why)}
        others = ("lr_embedding", "lr_head", "lr_norm", *(["lr_scalar"] if is_swift else []))
        rates |= {name: (lr, f"derived from {wire}.lr") for name in others}
    taken: dict[str, Any] = {
        name: trace.take(f"{wire}.optimizer.{name}", (*at, name), float(f"{value:.4g}"), why)
        for name, (value, why) in rates.items()
    }
    plain = {name: trace.plain(f"{wire}.optimizer.{name}", (*at, name)) for name in ("beta2", "states")}
    if plain["states"] != "fp32" and kind == "muon":
        trace.wrong((*at, "states"), "applies only to AdamW's moments.", "Use optimizer: adamw, or delete it.")
    return Optimizer(kind=kind, **taken, **plain, **_habits(trace, at, wire, kind, is_loaded=is_loaded))


def _habits(trace: Trace, at: KeyPath, wire: str, optimizer: str, *, is_loaded: bool) -> dict[str, Any]:
    """Return betas, momentum, clipping and weight decay. The defaults depend on the optimizer and the phase kind."""
    kind: str = trace.value(at).kind
    own = depth_dial.ADAM_WITH_MUON if optimizer == "muon" else {}
    own = own | depth_dial.MUON_PRETRAIN if optimizer == "muon" and kind == "pretrain" else own
    usual = {
        name: (own.get(name, trace.value((*at, name))), "default of muon" if name in own else "default")
        for name in _HABITS
    }
    if is_loaded or kind in ("sft", "rl"):
        # Weight decay pulls towards zero, which would damage trained weights.
        usual["weight_decay"] = (0.0, f"default of {kind}")
    wires = {name: "is_cautious" if name == "cautious" else name for name in usual}
    return {
        wires[name]: trace.take(f"{wire}.optimizer.{wires[name]}", (*at, name), value, why)
        for name, (value, why) in usual.items()
    }


def _schedule(trace: Trace, at: KeyPath, wire: str, num_steps: int) -> Schedule:
    kind = trace.plain(f"{wire}.schedule.kind", (*at, "schedule"))
    default_warmup = min(_MOST_WARMUP_STEPS, max(1, round(_WARMUP_SHARE * num_steps)))
    why = f"derived from {wire}.num_steps"
    warmup = trace.take(f"{wire}.schedule.warmup_steps", (*at, "warmup_steps"), default_warmup, why)
    if trace.is_given((*at, "warmup_steps")) and num_steps and warmup >= num_steps:
        trace.wrong(
            (*at, "warmup_steps"),
            f"{warmup:,} warm-up steps would fill all {num_steps:,} steps.",
            f"Allowed: less than {num_steps:,}.",
        )
    floor = trace.take(f"{wire}.schedule.floor", (*at, "floor"), _FLOORS[kind])
    decay_steps = {"cosine": max(0, num_steps - warmup), "constant": 0}.get(kind)
    if decay_steps is None:
        fraction = trace.take(f"{wire}.schedule.decay_steps", (*at, "decay_fraction"), _DECAY_FRACTION, why)
        decay_steps = round(fraction * num_steps)
    else:
        trace.note(f"{wire}.schedule.decay_steps", why)
    return Schedule(kind=kind, warmup_steps=warmup, decay_steps=decay_steps, floor=floor)


class _When:
    """Looks up eval, checkpoint and sample intervals: the phase's value, else the run's, else a derived default."""

    def __init__(self, trace: Trace, at: KeyPath, wire: str) -> None:
        self.trace, self.at, self.wire = trace, at, wire

    def __call__(self, name: str, section: str, key: str, otherwise: float, why: str = "default") -> float:
        own = (*self.at, section, key)
        path = own if self.trace.is_given(own) else (section, key)
        return self.trace.take(f"{self.wire}.{name}", path, otherwise, why)


def _tokens_of_rl(trace: Trace, at: KeyPath, wire: str, rl: Rl) -> int:
    if trace.is_given((*at, "eval", "tokens")):
        trace.wrong((*at, "eval", "tokens"), "has no effect in rl.", "Set rl.eval_prompts and rl.eval_samples.")
    trace.note(f"{wire}.eval_tokens", f"derived from {wire}.rl")
    return rl.eval_prompts * rl.eval_samples * rl.max_new_tokens


def _eval_tokens(model: Model, corpus: Corpus) -> tuple[int, str]:
    there = min(_MOST_EVAL_TOKENS, corpus.num_val_tokens or _MOST_EVAL_TOKENS)
    why = "derived: all held-out tokens" if corpus.num_val_tokens == there else "default"
    return max(there, model.context), why
