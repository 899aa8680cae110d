"""Size of an rl step: number of rows, tokens per row, and bytes of the KV cache for sampling.

longest prompt (by task kind) + max_new_tokens -> positions in the cache, tokens per trained row

The exact token count of a question is known only on the instance, after tokenization. Here it is an upper bound by task
kind; the user's own prompts may fill the context. The trainer's side is lm.rl.rollout and lm.model.attention.
"""

from __future__ import annotations

import math

from homing.config.estimate.params import round_up
from homing.wire.run_json import Model, Rl

__all__ = ["REACH", "cache_bytes", "num_rows", "prompt_tokens", "row_tokens", "rows_at_a_time"]

REACH = 128  # on a GPU, positions and rows are padded to multiples of this
# Longest GSM8K question, and longest generated questions, in bytes.
_LONGEST_BYTES = {"gsm8k": 991, "arithmetic": 24, "spelling": 64}
_TURNS = 16  # tokens around a question: role, start and end of turn
_THEIR_TURNS = 48  # of open weights, which add a few words of their own before the question


def num_rows(rl: Rl) -> int:
    """Return the rows of one step."""
    return rl.prompts_per_step * rl.samples_per_prompt


def rows_at_a_time(rl: Rl) -> int:
    """Return the rows that are sampled together: whole groups of samples per prompt."""
    prompts = (rl.rollout_rows or num_rows(rl)) // rl.samples_per_prompt
    return min(rl.prompts_per_step, max(1, prompts)) * rl.samples_per_prompt


def prompt_tokens(model: Model, rl: Rl, *, is_open: bool = False) -> int:
    """Return the tokens of the longest question. `is_open`: formatted with the chat template of open weights."""
    turns = _THEIR_TURNS if is_open else _TURNS
    room = max(1, model.context - rl.max_new_tokens)
    longest = [_LONGEST_BYTES.get(task.kind) for task in rl.tasks]
    per_byte = 1.0 / _least_bytes_per_token(model.vocab_size)
    # Never more tokens than bytes: the smallest tokens are bytes.
    tokens = [room if size is None else turns + math.ceil(size * min(1.0, per_byte)) for size in longest]
    return min(room, max(tokens, default=room))


def _least_bytes_per_token(vocab_size: int) -> float:
    """Return the least bytes per token for questions that differ from the text the tokenizer was trained on.

    For GSM8K with 2,048-entry tokenizers trained on books: the worst question has 1.8 bytes per token with English
    books, and the average is 1.7 with German ones.
    """
    return (1.0 + 0.45 * max(0.0, math.log2(max(vocab_size, 256)) - 8.0)) / 1.5


def row_tokens(model: Model, rl: Rl, prompt: int = 0) -> int:
    """Return the tokens of a trained row, including padding."""
    longest = (prompt or prompt_tokens(model, rl)) + rl.max_new_tokens - 1
    return min(model.context, round_up(longest, REACH))


def cache_bytes(model: Model, rows: int, places: int, size: int) -> int:
    """Return the bytes of keys and values in all layers, with `size` bytes per number."""
    return 2 * model.num_layers * rows * places * model.num_kv_heads * model.head_size * size
