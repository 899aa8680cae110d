"""Makes the choices that depend on the machine: device, precision, compilation, attention kernel, micro-batch size.

These choices are state, not settings, and are stored in every checkpoint. Resuming on the same kind of device reuses
them, so that nothing changes in the middle of a run; on a different device they are made again, and an event reports
it. Values set in the run file always take precedence.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from homing.errors import RunFailed, UsageError
from homing.lm.device import describe_device, is_compile_worthwhile, pick_device, pick_precision, use_device
from homing.lm.model.attention_backends import race_attention, race_segments, using_attention
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.wire.run_json import Model, Phase, Train

__all__ = ["Choices", "lower_micro_batch", "memory_warning", "pick_attention", "pick_choices", "set_up_device",
           "what_else"]  # fmt: skip

# Maximum number of tokens in a micro-batch on a CPU: larger ones were no faster on two cores and took more memory.
_CPU_TOKENS = 4096
_NEAR_LIMIT = 0.95  # warn if the first step uses more than this fraction of GPU memory
_GPU_TOKENS = 131072  # maximum number of tokens in a micro-batch on a GPU; more would not speed up training


@dataclass(frozen=True)
class Choices:
    device: str  # description such as "cuda (NVIDIA H200)"; the choices are reused only on the same GPU model
    precision: str
    is_compiled: bool
    attention: str  # cudnn | flash | efficient | math | auto; sdpa without CUDA; "" before pick_attention was called
    segments: str  # how a packed row separates its conversations: mask | flex; "" before pick_attention was called
    micro_batch: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def set_up_device(train: Train, ranks: Ranks = ALONE) -> torch.device:
    """Return the device to train on, after checking with a test computation that it works.

    If `needs_gpu` is set and there is no working GPU, raise RunFailed instead of falling back to a CPU.
    """
    if train.num_threads or ranks.local_count > 1:
        # The ranks of a machine share its CPU, so together they must not start more threads than it has cores.
        torch.set_num_threads(train.num_threads or max(1, torch.get_num_threads() // ranks.local_count))
    if train.is_deterministic:
        _be_deterministic()
    if train.needs_gpu and (train.device in ("cpu", "mps") or not torch.cuda.is_available()):
        found = f"train.device is {train.device}" if train.device in ("cpu", "mps") else "none works on this machine"
        raise RunFailed(
            what=f"This run needs a CUDA GPU, but {found}.",
            why=f"The run was launched on a rented GPU and must not run on a slower device at the same hourly rate. "
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda or '(none)'}.",
            fix="Destroy this instance and launch another. Restarting the run would not restore a missing GPU driver.",
        )
    device = pick_device("cuda" if train.needs_gpu else train.device)
    if device.type == "cuda":
        if ranks.local_count > torch.cuda.device_count():
            raise UsageError(
                what=f"This run needs {ranks.local_count} ranks here, but this machine has"
                f" {_gpus(torch.cuda.device_count())}.",
                why="Each rank needs its own GPU.",
                fix=f"Set train.ranks: {torch.cuda.device_count()}, or 0 for one rank per GPU.",
            )
        if ranks.count > 1:
            device = torch.device("cuda", ranks.local_rank)
        use_device(device)
        _prove_gpu(device)
    return device


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _be_deterministic() -> None:
    """Make results bit-identical between runs with the same GPU model and the same software versions.

    Each line below removes one reason why the order of summation might vary.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this variable when it is first used
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # do not select compiled kernels by timing them
    # This also disables cuDNN attention, whose backward pass has no fixed order of summation.
    torch.use_deterministic_algorithms(True)


def _prove_gpu(device: torch.device) -> None:
    try:
        square = torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        is_right = bool((square == 64.0).all())
        why = "Multiplying two matrices of ones gave a wrong result."
    except RuntimeError as exc:
        is_right, why = False, str(exc)
    if not is_right:
        raise RunFailed(
            what=f"{describe_device(device)} does not work.",
            why=why,
            fix="Destroy this instance and launch another, because the driver or the GPU is broken.",
        )


def pick_choices(
    train: Train, phase: Phase, model: Model, device: torch.device, rows_per_step: int, before: dict[str, Any]
) -> tuple[Choices, list[str]]:
    """Return the choices to use, and a description of each choice that differs from the checkpoint's (`before`)."""
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
        if name in before and before[name] != value and value != ""  # "": chosen later
    ]
    return choices, changed


def pick_attention(
    train: Train, phase: Phase, model: Model, device: torch.device, choices: Choices
) -> tuple[Choices, list[str]]:
    """Select the attention kernel for this GPU; return the choices with this kernel, and messages for the user.

    A kernel that the checkpoint's choices already contain is kept, because another kernel would round differently.
    """
    if device.type != "cuda":
        if train.attention not in ("auto", "math"):
            raise UsageError(
                what=f"train.attention: {train.attention} needs a CUDA GPU, but the device is "
                f"{describe_device(device)}.",
                fix="Set train.attention: auto.",
            )
        return choices, []
    dtype = torch.float32 if choices.precision == "fp32" else torch.bfloat16
    notices = []
    if train.attention != "auto":
        choices = replace(choices, attention=train.attention)
        race = race_attention(model, device, dtype, not train.is_deterministic)
        if train.attention in race.refused:
            raise UsageError(
                what=f"train.attention: {train.attention} does not work on {describe_device(device)}.",
                why=race.summary(),
                fix=f"Set train.attention: auto, which uses {race.winner} here.",
            )
    elif not choices.attention:
        race = race_attention(model, device, dtype, not train.is_deterministic)
        choices = replace(choices, attention=race.winner)
        notices.append(f"Attention backend: {race.winner} ({race.summary()}).")
    has_segments = phase.data is not None and phase.data.kind == "chat"  # in rl, each row is a single text
    if has_segments and not choices.segments:
        # Time masked attention under the chosen setting, which also limits the kernels that masked attention can use.
        with using_attention(choices.attention):
            race = race_segments(model, device, dtype, not train.is_deterministic)
        choices = replace(choices, segments=race.winner)
        notices.append(f"Attention backend for packed conversations: {race.winner} ({race.summary()}).")
    return replace(choices, segments=choices.segments or "mask"), notices


def memory_warning(peak_bytes: int, total_bytes: int) -> str:
    """Return a warning if the first step nearly filled the GPU, else "".

    The first step shows how much memory training needs. Without headroom, a longer row or another process on the GPU
    may make a later step run out of memory.
    """
    if peak_bytes < _NEAR_LIMIT * total_bytes:
        return ""
    return (
        f"warning: the first step used {peak_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB of GPU memory. "
        "Set a smaller micro_batch or recompute: half in the phase to leave room."
    )


def what_else(phase: Phase, at_last: str) -> str:
    """Return advice for saving GPU memory when a smaller micro-batch is not enough.

    The advice names the settings that the phase does not use yet, and then the last resort, `at_last`.
    """
    levers = ["recompute: all"] if phase.recompute != "all" else []
    levers += ["offload: optimizer"] if phase.offload == "none" and phase.method == "full" else []
    pulled = f"Set {' or '.join(levers)} in the phase, {at_last}" if levers else at_last[0].upper() + at_last[1:]
    return f"{pulled}, or use a GPU with more memory."


def lower_micro_batch(micro_batch: int, rows_per_step: int) -> int:
    """Return the next smaller micro-batch: the largest divisor of the batch that is at most half of `micro_batch`."""
    return _divisor(rows_per_step, micro_batch // 2)


def _pick_micro_batch(
    model: Model, phase: Phase, device: torch.device, precision: str, rows_per_step: int, free: int | None = None
) -> int:
    """Estimate the largest micro-batch that fits into `free` bytes of GPU memory (None: all that is free now)."""
    if device.type != "cuda":
        return _divisor(rows_per_step, _CPU_TOKENS // model.context)
    if free is None:
        # Weights and optimizer state are already allocated, so all free memory is available for gradients, activations
        # and a chunk of logits.
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    # Count the same activations as config.memory: residual streams, inputs of matmuls, heads before and after RoPE, and
    # both FFN branches.
    streams, sides, values = (5, 2, kv) if model.family == "swift" else (4, 3, 0)
    numbers = model.num_layers * (streams * model.width + 3 * (q + kv) + values + sides * model.ffn_width)
    numbers += 4 * model.width
    gradients_and_logits = 6 * _num_weights(model) + 2**30
    if phase.method != "full":  # only the adapters have gradients, and they are small
        gradients_and_logits = 2 * 2**30
    # A recomputed block stores only its input. Blocks are recomputed one at a time, and all of the current block's
    # activations are then in memory.
    if phase.recompute != "none":
        layers, again = model.num_layers, 0.5 if phase.recompute == "half" else 1.0
        numbers = int(numbers * (1.0 - again + 2 / layers) + again * layers * model.width)
    tokens = (0.85 * free - gradients_and_logits) / (numbers * (4 if precision == "fp32" else 2))
    return _divisor(rows_per_step, int(min(tokens, _GPU_TOKENS)) // model.context)


def _fixed_bytes(model: Model, phase: Phase, device: torch.device) -> int:
    """Return how many bytes of GPU memory are left for a step, computed only from the GPU's size and the settings.

    The result does not depend on other processes that use the GPU, so that every start chooses the same micro-batch. It
    assumes fp32 weights with two moments each, or frozen 16-bit weights.
    """
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    held = (4 if phase.offload != "none" else 12) if phase.method == "full" else 2
    return int(0.95 * total) - 2**30 - held * _num_weights(model)


def _num_weights(model: Model) -> int:
    """Return the model's approximate number of parameters."""
    q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    blocks = model.num_layers * (model.width * 2 * (q + kv) + 3 * model.width * model.ffn_width)
    return blocks + 2 * model.vocab_size * model.width


def _divisor(number: int, at_most: int) -> int:
    return next(candidate for candidate in range(max(1, min(at_most, number)), 0, -1) if number % candidate == 0)
