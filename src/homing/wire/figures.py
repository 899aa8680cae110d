"""Reads a number that another program wrote: it must be finite and within bounds, or it is ignored.

JSON may contain NaN, Infinity and 1e308, and text such as "1e999999999" is a Decimal that no one can compute with. The
agent, the guards and the parsers of providers' answers use this one function where they read a figure. The codec does
not: a request with an invalid amount must still be readable, so that the agent can report that it refused it."""

from __future__ import annotations

from decimal import Decimal
from typing import Optional, Union

# the highest plausible cost of one instance; the most expensive 8-GPU machine costs about a million dollars a year
MOST_USD = Decimal(10**7)
MOST_LIMIT_USD = Decimal(10**9)  # the highest spend limit that a person can set
_LONGEST_TEXT = 100  # maximum number of characters in a plausible number
_SMALLEST = Decimal("1e-12")


def read_figure(value: object, most: Union[Decimal, int], *, least: Union[Decimal, int] = 0) -> Optional[Decimal]:
    """Return `value` as a number from `least` to `most`, or None if it is not a finite number within these bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    if isinstance(value, int) and abs(value) > 10**40:
        return None  # converting a huge integer to text is slow, and beyond a certain length Python raises an error
    text = str(value).strip()
    if len(text) > _LONGEST_TEXT:
        return None
    try:
        number = Decimal(text)
    except ArithmeticError:
        return None
    if not number.is_finite() or not least <= number <= most:
        return None
    # 0E+999999 and 1E-999999 are within bounds too, but it is not safe to format them or divide by them.
    return number if abs(number) >= _SMALLEST else Decimal(0)
