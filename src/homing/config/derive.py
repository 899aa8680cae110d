"""Numbers from a shape: parameters by part, FLOPs, steps, epochs. Pure functions, no torch.

The trainer counts its own parameters and refuses to start if they differ from these, so a formula that drifts from the
decoder is found at the first step and not in the bill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.wire.run import Model, Sizes

__all__ = [
    "BYTES_PER_TOKEN_RANGE",
    "DATA_CONSTRAINED_EPOCHS",
    "Part",
    "bytes_per_token",
    "eval_steps",
    "num_epochs",
    "parameter_table",
    "round_up",
    "save_steps",
    "scaling_params",
    "sizes",
    "steps_for",
]

# Past about so many passes over the same text each further one teaches little (Muennighoff et al., 2023).
DATA_CONSTRAINED_EPOCHS = 4.0
# A phase of minutes needs neither a look at each step nor a checkpoint at each second one: nobody reads them, and a
# sample goes with every checkpoint.
LEAST_EVAL_STEPS = 10
# At 256 entries and at each doubling: between English novels, Shakespeare, Goethe in German and Python code, each with
# a tokenizer learned from itself (tests/config/test_derive.py has what was counted). Past 32k little is gained.
_BYTES_PER_TOKEN = (1.0, 2.1, 2.7, 3.25, 3.75, 4.15, 4.45, 4.6)
BYTES_PER_TOKEN_RANGE = (1.2, 1.0, 0.8)  # times that: a text that is easy, a usual one, one that is hard
SHORT_PHASE_STEPS = 500


@dataclass(frozen=True)
class Part:
    name: str
    num_params: int  # in the whole model
    is_matmul: bool  # takes part in a matrix product for every token
    note: str = ""


def parameter_table(model: Model) -> list[Part]:
    """Every parameter once, in the order of the decoder. A tied head has a row of its own that counts nothing."""
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


# As in the trainer's model, which checks its own count against this one.
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
    """6 FLOPs per matrix parameter and token; attention itself adds 12 L d T with d the width of all query heads."""
    matmul = scaling_params(model)
    attention = 12 * model.num_layers * model.num_heads * model.head_size * model.context
    return Sizes(
        num_params=sum(part.num_params for part in parameter_table(model)),
        num_matmul_params=matmul,
        flops_per_token=float(6 * matmul + attention),
    )


def scaling_params(model: Model) -> int:
    """Block matrices and head: what one token is multiplied with, and what the scaling rules count."""
    blocks = sum(part.num_params for part in parameter_table(model) if part.is_matmul and part.name != "head")
    return blocks + model.vocab_size * model.width


def steps_for(num_tokens: float, batch_tokens: int) -> int:
    """Whole steps only: the rest of a last batch is not trained on."""
    return max(1, math.floor(num_tokens / batch_tokens))


def eval_steps(num_steps: int) -> int:
    """Between two evaluations, where nobody asked for a number: a twentieth of the phase, at least ten."""
    return max(LEAST_EVAL_STEPS, num_steps // 20)


def save_steps(num_steps: int) -> int:
    """Between two checkpoints: a tenth of the phase, a fifth of a short one; in whole steps of evaluation, so that each
    checkpoint is one that was evaluated anyway."""
    evals = eval_steps(num_steps)
    if num_steps >= SHORT_PHASE_STEPS:
        return 2 * evals
    return evals * max(2, math.ceil(num_steps / 5 / evals))


def num_epochs(num_steps: int, batch_tokens: int, num_train_tokens: int) -> float | None:
    """How often the text is read; None while nobody knows how much there is."""
    return num_steps * batch_tokens / num_train_tokens if num_train_tokens else None


def bytes_per_token(vocab_size: int) -> float:
    """What a byte-level BPE of this size does to ordinary text; between two entries of the table by the logarithm."""
    doublings = max(0.0, math.log2(max(vocab_size, 256)) - 8.0)
    below = min(int(doublings), len(_BYTES_PER_TOKEN) - 1)
    above = min(below + 1, len(_BYTES_PER_TOKEN) - 1)
    return _BYTES_PER_TOKEN[below] + (doublings - below) * (_BYTES_PER_TOKEN[above] - _BYTES_PER_TOKEN[below])


def round_up(number: float, step: int) -> int:
    return max(step, step * math.ceil(number / step - 1e-9))
