"""Derive numbers from a model shape: parameters by part, FLOPs, steps, epochs, and the size of an rl step. No torch.

FLOPs per trained token, with N: matrix parameters, L: layers, d: total width of the query heads, T: tokens per row:

  full           6 N + 12 L d T: forward 2 N, gradient of the activations 2 N, gradient of the weights 2 N
  lora, qlora    frozen weights have no weight gradient: 4 N, plus 6 for each adapter parameter
  recompute      one more forward of the recomputed blocks
  rl             trains on rows of prompt and answer; sampling each token costs one more forward pass

The trainer counts its own parameters and refuses to start if the counts differ. So if a formula no longer matches the
decoder, the run fails at the start, before the mistake costs money.

The exact token count of an rl question is known only on the instance, after tokenization. This module uses an upper
bound for each task kind; the user's own prompts may fill the context. The trainer's matching code is in
lm.rl.rollout and lm.model.attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from homing.wire.run_json import Lora, Model, Phase, Rl, Run, Sizes

__all__ = [
    "BYTES_PER_TOKEN_RANGE",
    "DATA_CONSTRAINED_EPOCHS",
    "REACH",
    "RECOMPUTED_OF",
    "Part",
    "adapter_params",
    "bytes_per_token",
    "cache_bytes",
    "eval_steps",
    "flops_of_step",
    "flops_of_token",
    "num_epochs",
    "num_rows",
    "parameter_table",
    "prompt_tokens",
    "round_up",
    "row_tokens",
    "rows_at_a_time",
    "save_steps",
    "scaling_params",
    "sizes",
    "steps_for",
    "training_flops",
    "with_rows_of",
]

# Beyond about this many passes over the same text, each further pass teaches little (Muennighoff et al., 2023).
DATA_CONSTRAINED_EPOCHS = 4.0
# A phase of a few minutes does not need an evaluation at every step or a checkpoint at every second step, because
# every checkpoint also generates a sample.
LEAST_EVAL_STEPS = 10
# Bytes per token for a vocabulary of 256 entries, of 512, and so on: each size is twice the previous one. Each value is
# roughly the average over English novels, Shakespeare, Goethe in German, and Python code, each with a tokenizer trained
# on that text (for the counts, see tests/config/estimate/test_params_and_flops.py). Beyond 32k entries, the gain is
# small.
_BYTES_PER_TOKEN = (1.0, 2.1, 2.7, 3.25, 3.75, 4.15, 4.45, 4.6)
# factors on the typical bytes per token, for text that compresses well, ordinarily and poorly
BYTES_PER_TOKEN_RANGE = (1.2, 1.0, 0.8)
SHORT_PHASE_STEPS = 500
RECOMPUTED_OF = {"none": 0.0, "half": 0.5, "all": 1.0}  # fraction of the blocks whose forward pass runs again


@dataclass(frozen=True)
class Part:
    name: str
    num_params: int  # total over all layers
    is_matmul: bool  # used in a matrix multiplication for every token
    note: str = ""


def parameter_table(model: Model) -> list[Part]:
    """List every parameter once, in the decoder's order. A tied head has its own row with 0 parameters."""
    d, layers = model.width, model.num_layers
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    if model.family == "swift":
        return _swift_table(model, queries, keys)
    parts = [
        Part("embedding", model.vocab_size * d, False, f"{model.vocab_size:,} x {d:,}"),
        Part("attention q", layers * d * queries, True, f"{layers} x {d:,} x {queries:,}"),
        Part("attention k, v", layers * 2 * d * keys, True, f"{layers} x 2 x {d:,} x {keys:,}"),
        Part("attention out", layers * queries * d, True, f"{layers} x {queries:,} x {d:,}"),
        Part("feed-forward", layers * 3 * d * model.ffn_width, True, f"{layers} x 3 x {d:,} x {model.ffn_width:,}"),
        Part("norms", (2 * layers + 1) * d, False, f"({layers} x 2 + 1) x {d:,}"),
    ]
    if model.arch == "qwen2":
        parts.append(Part("attention bias", layers * (queries + 2 * keys), False, "on q, k, v"))
    if model.arch == "qwen3":
        parts.append(Part("attention norms", layers * 2 * model.head_size, False, "on q, k"))
    if model.is_tied:
        parts.append(Part("head", 0, True, "tied: the embedding's matrix"))
    else:
        parts.append(Part("head", model.vocab_size * d, True, f"{d:,} x {model.vocab_size:,}"))
    return parts


# The same values as in the trainer's model. The trainer compares its own parameter count with this one.
_VALUE_GATE, _SMEAR_GATE = 12, 24


def _swift_table(model: Model, queries: int, keys: int) -> list[Part]:
    d, layers, vocab = model.width, model.num_layers, model.vocab_size
    with_values = (layers + 1) // 2
    gates = with_values * model.num_kv_heads * _VALUE_GATE + _SMEAR_GATE
    return [
        Part("embedding", vocab * d, False, f"{vocab:,} x {d:,}"),
        Part("value embeddings", with_values * vocab * keys, False, f"{with_values} x {vocab:,} x {keys:,}"),
        Part("attention q", layers * d * queries, True, f"{layers} x {d:,} x {queries:,}"),
        Part("attention k, v", layers * 2 * d * keys, True, f"{layers} x 2 x {d:,} x {keys:,}"),
        Part("attention out", layers * queries * d, True, f"{layers} x {queries:,} x {d:,}"),
        Part("feed-forward", layers * 2 * d * model.ffn_width, True, f"{layers} x 2 x {d:,} x {model.ffn_width:,}"),
        Part("gates and scales", gates + 2 * layers + 2, False),
        Part("head", vocab * d, True, f"{d:,} x {vocab:,}"),
    ]


def sizes(model: Model) -> Sizes:
    """Count parameters and FLOPs.

    Each matrix parameter costs 6 FLOPs per token. Attention adds 12 L d T, where d is the width of all query heads.
    """
    matmul = scaling_params(model)
    attention = 12 * model.num_layers * model.num_heads * model.head_size * model.context
    return Sizes(
        num_params=sum(part.num_params for part in parameter_table(model)),
        num_matmul_params=matmul,
        flops_per_token=float(6 * matmul + attention),
    )


def scaling_params(model: Model) -> int:
    """Return the number of parameters that the scaling rules count: those of the block matrices and the head."""
    blocks = sum(part.num_params for part in parameter_table(model) if part.is_matmul and part.name != "head")
    return blocks + model.vocab_size * model.width


def steps_for(num_tokens: float, batch_tokens: int) -> int:
    """Return the number of whole steps; the incomplete last batch is not trained on."""
    return max(1, math.floor(num_tokens / batch_tokens))


def eval_steps(num_steps: int) -> int:
    """Return the default number of steps between evaluations: a twentieth of the phase, at least LEAST_EVAL_STEPS."""
    return max(LEAST_EVAL_STEPS, num_steps // 20)


def save_steps(num_steps: int) -> int:
    """Return the default number of steps between checkpoints: a tenth of the phase, or a fifth of a short one.

    It is a multiple of the evaluation interval, so that every checkpoint falls on an evaluation that happens anyway.
    """
    evals = eval_steps(num_steps)
    if num_steps >= SHORT_PHASE_STEPS:
        return 2 * evals
    return evals * max(2, math.ceil(num_steps / 5 / evals))


def num_epochs(num_steps: int, batch_tokens: int, num_train_tokens: int) -> float | None:
    """Return how many times the run reads the text; None if the amount of text is unknown."""
    return num_steps * batch_tokens / num_train_tokens if num_train_tokens else None


def bytes_per_token(vocab_size: int) -> float:
    """Return the typical bytes per token of a byte-level BPE vocabulary of this size, interpolated on a log scale."""
    doublings = max(0.0, math.log2(max(vocab_size, 256)) - 8.0)
    below = min(int(doublings), len(_BYTES_PER_TOKEN) - 1)
    above = min(below + 1, len(_BYTES_PER_TOKEN) - 1)
    return _BYTES_PER_TOKEN[below] + (doublings - below) * (_BYTES_PER_TOKEN[above] - _BYTES_PER_TOKEN[below])


def round_up(number: float, step: int) -> int:
    return max(step, step * math.ceil(number / step - 1e-9))


REACH = 128  # on a GPU, positions and rows are padded to multiples of this
# Length in bytes of the longest GSM8K question and of the longest generated questions.
_LONGEST_BYTES = {"gsm8k": 991, "arithmetic": 24, "spelling": 64}
_TURNS = 16  # tokens around a question: role, start and end of turn
_OPEN_WEIGHTS_TURNS = 48  # tokens around a question with open weights, whose chat templates add a few words before it


def num_rows(rl: Rl) -> int:
    """Return the number of rows in one step."""
    return rl.prompts_per_step * rl.samples_per_prompt


def rows_at_a_time(rl: Rl) -> int:
    """Return the number of rows that are sampled together: whole groups of samples per prompt."""
    prompts = (rl.rollout_rows or num_rows(rl)) // rl.samples_per_prompt
    return min(rl.prompts_per_step, max(1, prompts)) * rl.samples_per_prompt


def prompt_tokens(model: Model, rl: Rl, *, is_open: bool = False) -> int:
    """Return the token count of the longest question.

    `is_open`: whether the chat template of open weights formats the question, which takes more tokens.
    """
    turns = _OPEN_WEIGHTS_TURNS if is_open else _TURNS
    room = max(1, model.context - rl.max_new_tokens)
    longest = [_LONGEST_BYTES.get(task.kind) for task in rl.tasks]
    per_byte = 1.0 / _least_bytes_per_token(model.vocab_size)
    # A text never has more tokens than bytes, because the smallest tokens are bytes.
    tokens = [room if size is None else turns + math.ceil(size * min(1.0, per_byte)) for size in longest]
    return min(room, max(tokens, default=room))


def _least_bytes_per_token(vocab_size: int) -> float:
    """Return a lower bound on the bytes per token for questions unlike the text that the tokenizer was trained on.

    Measured on GSM8K with tokenizers of 2,048 entries: trained on English books, the worst question has 1.8 bytes per
    token; trained on German books, the average question has 1.7.
    """
    return (1.0 + 0.45 * max(0.0, math.log2(max(vocab_size, 256)) - 8.0)) / 1.5


def row_tokens(model: Model, rl: Rl, prompt: int = 0) -> int:
    """Return the token count of a trained row, including padding."""
    longest = (prompt or prompt_tokens(model, rl)) + rl.max_new_tokens - 1
    return min(model.context, round_up(longest, REACH))


def cache_bytes(model: Model, rows: int, places: int, size: int) -> int:
    """Return the size of the KV cache of all layers in bytes, with `size` bytes per number."""
    return 2 * model.num_layers * rows * places * model.num_kv_heads * model.head_size * size


# --- adapters and FLOPs ---


def adapter_params(model: Model, lora: Lora) -> int:
    """Count adapter parameters: two low-rank matrices per target, and with DoRA one number for each output."""
    d, ffn = model.width, model.ffn_width
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    sides = {"q": (d, queries), "k": (d, keys), "v": (d, keys), "o": (queries, d)}
    sides |= {"gate": (d, ffn), "up": (d, ffn), "down": (ffn, d)}
    chosen = [sides[name] for name in sides if name in lora.targets or "all" in lora.targets]
    per_layer = sum(lora.rank * (inner + outer) + (outer if lora.is_dora else 0) for inner, outer in chosen)
    return model.num_layers * per_layer


def training_flops(model: Model, sizes: Sizes, lora: Lora | None = None, recompute: str = "none") -> float:
    """Return the FLOPs of one token in a row of `model.context` tokens. With `lora`, the base weights are frozen."""
    flops = sizes.flops_per_token
    if lora is not None:
        flops += 6 * adapter_params(model, lora) - 2 * sizes.num_matmul_params
    blocks = sizes.num_matmul_params - model.vocab_size * model.width
    attention = model.num_layers * model.num_heads * model.head_size * model.context
    return float(flops + RECOMPUTED_OF[recompute] * (2 * blocks + 4 * attention))


def flops_of_token(run: Run, phase: Phase) -> float:
    """Return the FLOPs of training on one token in this phase."""
    rows = run.model.context if phase.rl is None else row_tokens(run.model, phase.rl)
    return training_flops(*with_rows_of(rows, run.model, run.sizes), phase.lora, phase.recompute)


def flops_of_step(run: Run, phase: Phase) -> float:
    if phase.rl is None:
        return phase.batch_tokens * flops_of_token(run, phase)
    learned = num_rows(phase.rl) * row_tokens(run.model, phase.rl) * flops_of_token(run, phase)
    return learned + phase.batch_tokens * 2.0 * run.sizes.num_matmul_params / phase.rl.updates_per_rollout


def with_rows_of(num_tokens: int, model: Model, sizes: Sizes) -> tuple[Model, Sizes]:
    """Return copies of `model` and `sizes` with rows of `num_tokens` tokens instead of the full context.

    Attention over shorter rows costs fewer FLOPs, so the FLOPs per token in the copied `sizes` are lower.
    """
    spared = 12 * model.num_layers * model.num_heads * model.head_size * (model.context - num_tokens)
    return replace(model, context=num_tokens), replace(sizes, flops_per_token=sizes.flops_per_token - spared)
