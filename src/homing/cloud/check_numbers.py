"""Validates numbers from a provider's response or a ledger row: they must be finite, not negative, and within bounds.

    value  -> read_figure -> a Decimal that is safe to compute with, or None if it is implausible
    answer -> Figures     -> usd, rate, whole, seconds, moment; `problems` names each rejected figure

Python's JSON parser accepts NaN, Infinity and 1e308, and an instance's tag may contain any text. Such a figure must
neither become part of a bill nor abort a status check. Instead, the caller keeps the last plausible figure or our own
estimate, and reports the problem.
"""

from __future__ import annotations

import datetime
import re
from decimal import Decimal

from homing.wire.codec import MOST_USD, read_figure

__all__ = ["MOST_USD", "MOST_USD_PER_HOUR", "Figures", "read_figure", "read_moment", "read_port"]

MOST_USD_PER_HOUR = Decimal(10**4)
_MOST_COUNT = 10**15
_OLDEST_S = 10 * 365 * 86400.0  # the maximum age that we expect of a live instance
_AHEAD_S = 2 * 86400.0  # the largest difference that we expect between two machines' clocks


def read_port(value: object) -> int | None:
    """Return `value` as a TCP port, or None if it is not one."""
    port = read_figure(value, 65535, least=1)
    return int(port) if port is not None and port == port.to_integral_value() else None


def read_moment(value: object) -> float | None:
    """Return `value`, a number, an RFC 3339 time or a datetime, as Unix seconds, or None if it is none of these.

    Also returns None for the zero time, in year 1, which providers written in Go send for something that has not
    happened yet.
    """
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value.strip()):
        if value.startswith("0001-"):
            return None
        # Some providers send nine fractional digits, but Python parses at most six.
        plain = re.sub(r"(\.\d{6})\d+", r"\1", value.strip().replace("Z", "+00:00").replace("z", "+00:00"))
        try:
            value = datetime.datetime.fromisoformat(plain)
        except ValueError:
            return None
    if isinstance(value, datetime.datetime):
        try:
            return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
        except (ArithmeticError, ValueError, OSError):
            return None
    number = read_figure(value, 10**12)
    return None if number is None else float(number)


class Figures:
    """Reads the numbers in one response. `source` is the name of the sender, for use in messages."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []

    def usd(self, name: str, value: object) -> Decimal | None:
        return self._read(name, value, MOST_USD)

    def rate(self, name: str, value: object) -> Decimal | None:
        """Dollars per hour."""
        return self._read(name, value, MOST_USD_PER_HOUR)

    def whole(self, name: str, value: object, most: int = _MOST_COUNT) -> int | None:
        number = self._read(name, value, Decimal(most))
        return None if number is None else int(number)

    def seconds(self, name: str, value: object, most: float) -> float | None:
        number = self._read(name, value, Decimal(str(most)))
        return None if number is None else float(number)

    def moment(self, name: str, value: object, now: float) -> float | None:
        """Return `value` as Unix seconds, or None if it is many years before or several days after `now`."""
        at = read_moment(value)
        if at is not None and now - _OLDEST_S <= at <= now + _AHEAD_S:
            return at
        if value is not None and not (isinstance(value, str) and (not value or value.startswith("0001-"))):
            self._doubt(name, value)
        return None

    def _read(self, name: str, value: object, most: Decimal) -> Decimal | None:
        number = read_figure(value, most)
        if number is None and value is not None:  # None means that a figure is missing, which is not an error
            self._doubt(name, value)
        return number

    def _doubt(self, name: str, value: object) -> None:
        self.problems.append(
            f"{self.source} reports {name} as {_shown(value)}, which cannot be right, so homing ignores it."
        )


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**40:
        return "a number with more than 40 digits"
    text = repr(value) if not isinstance(value, datetime.datetime) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
