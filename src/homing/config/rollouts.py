"""What a step of rl makes: how many rows, how long they are, and the bytes of the cache they are sampled into.

    longest prompt (by kind of task) + max_new_tokens  ->  places of the cache, tokens of a row that is learned from

How long a question is in tokens is known when a tokenizer has read it, on the machine. Here it is the longest that the
task's kind asks; one's own prompts may fill the context. The trainer's side is lm.rl.rollout and lm.model.row_cache.
"""

from __future__ import annotations

import math

from homing.config.derive import round_up
from homing.wire.run import Model, Rl

__all__ = ["REACH", "cache_bytes", "num_rows", "prompt_tokens", "row_tokens", "rows_at_a_time"]

REACH = 128  # places and rows come in multiples of this many on a card
# GSM8K's longest question, and the longest that are made up, in bytes.
_LONGEST_BYTES = {"gsm8k": 991, "arithmetic": 24, "spelling": 64}
_TURNS = 16  # tokens around a question: who speaks, and where a turn begins and ends
_THEIR_TURNS = 48  # of open weights, whose templates put a few words of their own before it


def num_rows(rl: Rl) -> int:
    """Of one step."""
    return rl.prompts_per_step * rl.samples_per_prompt


def rows_at_a_time(rl: Rl) -> int:
    """That are sampled together: whole groups of a prompt's samples."""
    prompts = (rl.rollout_rows or num_rows(rl)) // rl.samples_per_prompt
    return min(rl.prompts_per_step, max(1, prompts)) * rl.samples_per_prompt


def prompt_tokens(model: Model, rl: Rl, *, is_open: bool = False) -> int:
    """Of the longest question. `is_open`: asked in the template of open weights."""
    turns = _THEIR_TURNS if is_open else _TURNS
    room = max(1, model.context - rl.max_new_tokens)
    longest = [_LONGEST_BYTES.get(task.kind) for task in rl.tasks]
    per_byte = 1.0 / _least_bytes_per_token(model.vocab_size)
    # More tokens than bytes it never is: the smallest tokens are bytes.
    tokens = [room if size is None else turns + math.ceil(size * min(1.0, per_byte)) for size in longest]
    return min(room, max(tokens, default=room))


def _least_bytes_per_token(vocab_size: int) -> float:
    """Of questions in other words than the tokenizer was made from. Of GSM8K's, by tokenizers of books with 2,048
    entries, the worst has 1.8 bytes a token where they are English, and all of them 1.7 where they are German."""
    return (1.0 + 0.45 * max(0.0, math.log2(max(vocab_size, 256)) - 8.0)) / 1.5


def row_tokens(model: Model, rl: Rl, prompt: int = 0) -> int:
    """Of a row that is learned from, padding included."""
    longest = (prompt or prompt_tokens(model, rl)) + rl.max_new_tokens - 1
    return min(model.context, round_up(longest, REACH))


def cache_bytes(model: Model, rows: int, places: int, size: int) -> int:
    """Keys and values of every layer, `size` bytes a number."""
    return 2 * model.num_layers * rows * places * model.num_kv_heads * model.head_size * size
