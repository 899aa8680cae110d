"""What the machine decides: device, precision, compile, attention, micro-batch. Choices are state, not settings.

They ride in every checkpoint. The same device takes them up again on resume, so that nothing changes in the middle of a
run; another device picks anew, and an event says so. What the run file sets by name always wins.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from homing.errors import RunFailed, UsageError
from homing.lm.device import describe_device, is_compile_worthwhile, pick_device, pick_precision, use_device
from homing.lm.model.backends import race_attention, race_segments, using_attention
from homing.lm.train.ranks import ALONE, Ranks
from homing.wire.run import Model, Phase, Train

__all__ = ["Choices", "lower_micro_batch", "memory_warning", "pick_attention", "pick_choices", "set_up_device",
           "what_else"]  # fmt: skip

_CPU_TOKENS = 4096  # at a time: larger micro-batches were no faster on two cores, and only took memory
_NEAR_LIMIT = 0.95  # of a card's memory
_GPU_TOKENS = 131072  # past this, more rows at a time fill no more of the card


@dataclass(frozen=True)
class Choices:
    device: str  # in words, such as "cuda (NVIDIA H200)": reuse is for the same card only
    precision: str
    is_compiled: bool
    attention: str  # cudnn | flash | efficient | math | auto; sdpa where there is but one; "" until pick_attention
    segments: str  # attention inside of segments: mask | flex; "" until pick_attention
    micro_batch: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def set_up_device(train: Train, ranks: Ranks = ALONE) -> torch.device:
    """The device to train on, proven to compute. With `needs_gpu` a machine without a GPU is an error, never a CPU."""
    if train.num_threads or ranks.count > 1:
        # Ranks share the processor: together they must not have more threads than it runs.
        torch.set_num_threads(train.num_threads or max(1, torch.get_num_threads() // ranks.count))
    if train.is_deterministic:
        _be_deterministic()
    if train.needs_gpu and (train.device in ("cpu", "mps") or not torch.cuda.is_available()):
        found = f"train.device says {train.device}" if train.device in ("cpu", "mps") else "none works here"
        raise RunFailed(
            what=f"This run needs a CUDA GPU, and {found}.",
            why=f"It was launched on a rented GPU and must not run on another device at its rate. "
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda or '(none)'}.",
            fix="Destroy this instance and launch another; a card without a driver never gets better.",
        )
    device = pick_device("cuda" if train.needs_gpu else train.device)
    if device.type == "cuda":
        if ranks.count > torch.cuda.device_count():
            raise UsageError(
                what=f"This run wants {ranks.count} ranks, and this machine has {_gpus(torch.cuda.device_count())}.",
                why="Each rank computes on a GPU of its own.",
                fix=f"Set train.ranks: {torch.cuda.device_count()}, or 0 for one on each GPU.",
            )
        if ranks.count > 1:
            device = torch.device("cuda", ranks.rank)
        use_device(device)
        _prove_gpu(device)
    return device


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _be_deterministic() -> None:
    """The same bits on the same card and versions. Each line takes away one way in which sums change their order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # compiled kernels are not chosen by stop-watch
    torch.use_deterministic_algorithms(True)  # and with it no cuDNN attention, whose backward adds in any order


def _prove_gpu(device: torch.device) -> None:
    try:
        square = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        is_right = bool((square == 64.0).all())
        why = "A product of two matrices of ones came out wrong."
    except RuntimeError as exc:
        is_right, why = False, str(exc)
    if not is_right:
        raise RunFailed(
            what=f"{describe_device(device)} does not compute.",
            why=why,
            fix="The driver or the card is broken: destroy this instance and launch another.",
        )


def pick_choices(
    train: Train, phase: Phase, model: Model, device: torch.device, rows_per_step: int, before: dict[str, Any]
) -> tuple[Choices, list[str]]:
    """What to use, and which of the choices of the checkpoint (`before`) are no longer kept, in words."""
    is_same_device = before.get("device") == describe_device(device)
    kept = before if is_same_device else {}
    precision = str(kept.get("precision", "")) if train.precision == "auto" else ""
    compiled = {"on": True, "off": False}.get(train.compile, kept.get("is_compiled"))
    micro = min(phase.micro_batch or int(kept.get("micro_batch", 0)), rows_per_step)
    choices = Choices(
        device=describe_device(device),
        precision=precision or pick_precision(train.precision, device),
        is_compiled=is_compile_worthwhile(device) if compiled is None else bool(compiled),
        attention=str(kept.get("attention", "")) or ("sdpa" if device.type != "cuda" else ""),
        segments=str(kept.get("segments", "")) or ("mask" if device.type != "cuda" else ""),
        micro_batch=micro,
    )
    if not micro:
        free = _fixed_bytes(model, phase, device) if train.is_deterministic else None
        picked = _pick_micro_batch(model, phase, device, choices.precision, rows_per_step, free)
        choices = Choices(**{**asdict(choices), "micro_batch": picked})
    changed = [
        f"{name} {before[name]} -> {value}"
        for name, value in asdict(choices).items()
        if name in before and before[name] != value and value != ""  # picked later
    ]
    return choices, changed


def pick_attention(
    train: Train, phase: Phase, model: Model, device: torch.device, choices: Choices
) -> tuple[Choices, list[str]]:
    """With the attention that this card does best, and what is to be told of how it was found. A card that is kept
    keeps its own: another kernel in the middle of a run would be another rounding."""
    if device.type != "cuda":
        if train.attention not in ("auto", "math"):
            raise UsageError(
                what=f"train.attention: {train.attention} is for CUDA cards, and this is {describe_device(device)}.",
                fix="Set train.attention: auto.",
            )
        return choices, []
    dtype = torch.float32 if choices.precision == "fp32" else torch.bfloat16
    told = []
    if train.attention != "auto":
        choices = replace(choices, attention=train.attention)
        race = race_attention(model, device, dtype, not train.is_deterministic)
        if train.attention in race.refused:
            raise UsageError(
                what=f"train.attention: {train.attention} does not work on {describe_device(device)}.",
                why=race.told(),
                fix=f"Set train.attention: auto, which takes {race.winner} here.",
            )
    elif not choices.attention:
        race = race_attention(model, device, dtype, not train.is_deterministic)
        choices = replace(choices, attention=race.winner)
        told.append(f"Attention by {race.winner}: {race.told()}.")
    has_segments = phase.data is not None and phase.data.kind == "chat"  # a row of rl is one answer
    if has_segments and not choices.segments:
        with using_attention(choices.attention):  # a mask falls to what the chosen one leaves
            race = race_segments(model, device, dtype, not train.is_deterministic)
        choices = replace(choices, segments=race.winner)
        told.append(f"Attention inside of conversations by {race.winner}: {race.told()}.")
    return replace(choices, segments=choices.segments or "mask"), told


def memory_warning(peak_bytes: int, total_bytes: int) -> str:
    """After the first step, which has had everything in memory at once: what is nearly full may not survive a longer
    row or a neighbour. "" where there is room."""
    if peak_bytes < _NEAR_LIMIT * total_bytes:
        return ""
    return (
        f"warning: {peak_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB of the card were used by the first step. "
        "A smaller micro_batch or recompute: half in the phase leaves room."
    )


def what_else(phase: Phase, at_last: str) -> str:
    """What makes room where fewer rows at a time do not: the levers of the phase that are not pulled yet."""
    levers = ["recompute: all"] if phase.recompute != "all" else []
    levers += ["offload: optimizer"] if phase.offload == "none" and phase.method == "full" else []
    pulled = f"Set {' or '.join(levers)} in the phase, {at_last}" if levers else at_last[0].upper() + at_last[1:]
    return f"{pulled}, or take a card with more memory."


def lower_micro_batch(micro_batch: int, rows_per_step: int) -> int:
    """The largest divisor of the batch that is at most half: the same batch, in smaller pieces."""
    return _divisor(rows_per_step, micro_batch // 2)


def _pick_micro_batch(
    model: Model, phase: Phase, device: torch.device, precision: str, rows_per_step: int, free: int | None = None
) -> int:
    """`free`: bytes of the card to reckon with; None: those that are free now."""
    if device.type != "cuda":
        return _divisor(rows_per_step, _CPU_TOKENS // model.context)
    if free is None:
        # Called with weights and optimizer in place: what is free is for gradients, activations and a piece of logits.
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    # As in config.memory: streams, inputs of products, heads before and after turning, the feed-forward's two sides.
    streams, sides, values = (5, 2, kv) if model.family == "swift" else (4, 3, 0)
    numbers = model.num_layers * (streams * model.width + 3 * (q + kv) + values + sides * model.ffn_width)
    numbers += 4 * model.width
    gradients_and_logits = 6 * _num_weights(model) + 2**30
    if phase.method != "full":  # adapters are small, and frozen weights have no gradients
        gradients_and_logits = 2 * 2**30
    if phase.recompute != "none":  # such blocks keep their input; one more is whole while it is computed again
        layers, again = model.num_layers, 0.5 if phase.recompute == "half" else 1.0
        numbers = int(numbers * (1.0 - again + 2 / layers) + again * layers * model.width)
    tokens = (0.85 * free - gradients_and_logits) / (numbers * (4 if precision == "fp32" else 2))
    return _divisor(rows_per_step, int(min(tokens, _GPU_TOKENS)) // model.context)


def _fixed_bytes(model: Model, phase: Phase, device: torch.device) -> int:
    """What of the card is left for a step, by its size and the settings alone: another program on the card, or memory
    that is not given back yet, changes nothing. With fp32 weights and two moments each, or frozen ones in 16 bits."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    held = (4 if phase.offload != "none" else 12) if phase.method == "full" else 2
    return int(0.95 * total) - 2**30 - held * _num_weights(model)


def _num_weights(model: Model) -> int:
    """About."""
    q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    blocks = model.num_layers * (model.width * 2 * (q + kv) + 3 * model.width * model.ffn_width)
    return blocks + 2 * model.vocab_size * model.width


def _divisor(number: int, at_most: int) -> int:
    return next(candidate for candidate in range(max(1, min(at_most, number)), 0, -1) if number % candidate == 0)
