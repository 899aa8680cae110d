"""The calculator that a model may call in its answer: computes what the model writes between two tokens.

    <|tool_call|>48/2<|tool_call_end|>                    ->   <|tool_result|>24<|tool_result_end|>, in the same turn
    <|tool_call|>{"name": "calculator", "arguments":
      {"expression": "48/2"}}<|tool_call_end|><|im_end|>  ->   a tool turn, then the start of the model's next turn

Conversations with tools are rendered in the second form. A model uses the form it was trained on. An expression
consists of numbers, + - * / // % ** and brackets. It is parsed as a syntax tree in which nothing else is allowed: no
names, no calls, and no numbers that would take long to compute. If the computation fails, the result is `error`.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from homing.errors import DataError
from homing.lm.tokenizer import Tokenizer
from homing.lm.tokenizer.tokenizer import IM_END, IM_START

__all__ = ["TOOL_TOKENS", "Calculator", "compute"]

TOOL_TOKENS = ("<|tool_call|>", "<|tool_call_end|>", "<|tool_result|>", "<|tool_result_end|>")
FAILED = "error"

_MOST_CHARACTERS = 100
_LARGEST = 1e15  # maximum absolute value of a result; floats represent integers up to it exactly
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def compute(expression: str) -> str | None:
    """Return the value of the expression as text, or None if it cannot be computed."""
    text = expression.strip().replace(",", "").replace("$", "").replace("\u00d7", "*").replace("^", "**")
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        return _written(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("the exponent is too large")
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ValueError("not arithmetic")


def _bounded(value: float) -> float:
    # A complex value is possible because Python returns one for the square root of a negative number. Limiting every
    # intermediate value also prevents nested powers from taking long to compute.
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > _LARGEST:
        raise ValueError("the result is too large or not a real number")
    return value


def _written(value: float) -> str:
    rounded = round(float(value), 6)
    return str(int(rounded)) if rounded == int(rounded) else repr(rounded)


class Calculator:
    """Finds calculator calls in token ids, and returns the ids of their results."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [name for name in TOOL_TOKENS if name not in tokenizer.specials]
        if missing:
            raise DataError(
                what="This tokenizer has no calculator tokens.",
                why=f"It does not contain {', '.join(missing)}.",
                fix="Set calculator: off in the task, or prepare the data with tokenizer.specials: standard.",
            )
        self.call_id, self.end_id, self._open_id, self._close_id = (tokenizer.specials[name] for name in TOOL_TOKENS)
        self._turn_start, self._turn_end = (tokenizer.specials.get(name, -1) for name in (IM_START, IM_END))
        self._tokenizer = tokenizer
        self.call_ends = np.array([self.end_id, self._turn_end])  # the tokens that can end a calculator call

    @staticmethod
    def fits(tokenizer: Tokenizer) -> bool:
        return all(name in tokenizer.specials for name in TOOL_TOKENS)

    def answer(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens to insert after the model's output if that ends with a calculator call, else []."""
        written = list(ids)
        is_turn = len(written) > 1 and written[-1] == self._turn_end
        at = len(written) - (2 if is_turn else 1)
        if written[at] != self.end_id or self.call_id not in written[:at]:
            return []
        start = at - written[:at][::-1].index(self.call_id)
        text = self._tokenizer.decode(written[start:at])
        if text.lstrip().startswith("{") != is_turn:
            return []
        expression = _expression_of(text) if is_turn else text
        result = None if expression is None else compute(expression)
        encode = self._tokenizer.encode
        result_ids = [self._open_id, *encode(FAILED if result is None else result), self._close_id]
        if not is_turn:
            return result_ids
        next_turn = [self._turn_end, *encode("\n"), self._turn_start]
        return [*encode("\n"), self._turn_start, *encode("tool\n"), *result_ids, *next_turn, *encode("assistant\n")]


def _expression_of(call: str) -> str | None:
    """Return the argument of a call, regardless of its name, or None unless there is exactly one and it is a string."""
    try:
        arguments = json.loads(call)["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        (expression,) = arguments.values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return expression if isinstance(expression, str) else None
