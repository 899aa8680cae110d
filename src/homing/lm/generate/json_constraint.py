"""Restricts generated text to JSON, optionally to a JSON schema, with llguidance (the extra `structured`).

    schema -> grammar, compiled once per request -> mask of the tokens that may come next -> after each token again

The text can end only where the JSON is complete. llguidance limits the time and memory that a schema may take.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from homing.errors import UsageError
from homing.lm.tokenizer import Tokenizer

__all__ = ["JsonConstraint", "JsonGrammars", "TooExpensive"]

_ANY_OBJECT = {"type": "object"}
_MOST_SCHEMA = 16_384  # characters
# Limits on what one token may cost, because all other texts wait meanwhile. The defaults of llguidance are 2,000 and
# 50,000.
_ITEMS_IN_ROW, _STEP_ITEMS = 500, 10_000
# A weak model could otherwise write white space until it reaches its maximum number of tokens.
_WHITESPACE = r"( |\n {0,8})?"


class TooExpensive(Exception):
    """Raised if a schema needs more computation for a token than is allowed."""


class JsonGrammars:
    """Compiles schemas for one model. Raises ModuleNotFoundError if llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)

    def constraint(self, schema: dict[str, Any] | None) -> JsonConstraint:
        """Compile a schema; None stands for any JSON object. Raises UsageError for a bad schema.

        Each further text with the same schema uses a copy of the constraint.
        """
        from llguidance import LLMatcher, LLParserLimits

        if schema is not None and len(json.dumps(schema)) > _MOST_SCHEMA:
            raise _refused(f"It has more than {_MOST_SCHEMA:,} characters.")

        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(_ANY_OBJECT if schema is None else schema), overrides={"whitespace_pattern": _WHITESPACE}
            )
        except ValueError as exc:
            raise _refused(str(exc)) from exc
        limits = LLParserLimits(max_items_in_row=_ITEMS_IN_ROW, step_max_items=_STEP_ITEMS)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return JsonConstraint(matcher, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._stop_ids)), eos_token=self._stop_ids)


class JsonConstraint:
    """The state of the grammar within one text."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> JsonConstraint:
        return JsonConstraint(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> Tensor:
        """Return which tokens (V,) may come next."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        if self._matcher.is_error():  # after an error, llguidance would allow the text to end anywhere
            reason = (self._matcher.get_error().strip().splitlines() or ["llguidance gives no reason"])[0]
            raise TooExpensive(f"The JSON schema needs too much computation, so the text cannot go on: {reason}")
        mask_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask_V[: len(allowed)] = allowed[: self._vocab_size]
        if not mask_V.any():
            raise RuntimeError(f"llguidance allows no token: {self._matcher.get_error() or 'the JSON is complete'}")
        return mask_V

    def saw(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class _Vocabulary:
    """The tokenizer in the form that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop_ids[0]
        self.tokens = [tokenizer.bytes_of(number) for number in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.specials.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _refused(problem: str) -> UsageError:
    return UsageError(
        what="The JSON schema cannot be used.",
        why=problem.strip().splitlines()[0] if problem.strip() else "llguidance gives no reason.",
        fix="Simplify the schema; llguidance supports most of JSON Schema 2020-12.",
    )
