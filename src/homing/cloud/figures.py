"""Numbers that come from elsewhere (a provider's answer, a ledger row): read once, finite, not negative, bounded.

    value -> read_figure -> a Decimal that can be counted with, or None where no sane person would believe it
    answer -> Figures    -> usd, rate, whole, seconds, moment; `problems` names each figure that was not believed

Python's JSON parser accepts NaN, Infinity and 1e308, and a tag may hold any text. Such a figure is never a bill and
never ends a look: whoever reads keeps the last sane figure or our own estimate, and tells the person.
"""

from __future__ import annotations

import datetime
import re
from decimal import Decimal

__all__ = ["MOST_USD", "MOST_USD_PER_HOUR", "Figures", "read_figure", "read_moment", "read_port"]

MOST_USD = Decimal(10**7)  # of one instance; the dearest eight cards cost about a million dollars a year
MOST_USD_PER_HOUR = Decimal(10**4)
_MOST_COUNT = 10**15
_LONGEST_TEXT = 100  # digits of a number that somebody means
_SMALLEST = Decimal("1e-12")
_OLDEST_S = 10 * 365 * 86400.0  # nothing that lives is older
_AHEAD_S = 2 * 86400.0  # clocks differ; by more than this one of them is not a clock


def read_figure(value: object, most: Decimal | int, *, least: Decimal | int = 0) -> Decimal | None:
    """`value` as a number from `least` to `most`; None where it is none: NaN, infinite, out of bounds, text, a list."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    if isinstance(value, int) and abs(value) > 10**40:
        return None  # text of it would take long, and Python refuses to make it from some length on
    text = str(value).strip()
    if len(text) > _LONGEST_TEXT:
        return None
    try:
        number = Decimal(text)
    except ArithmeticError:
        return None
    if not number.is_finite() or not least <= number <= most:
        return None
    # 0E+999999 and 1E-999999 are in bounds too, and their text or their quotient is not.
    return number if abs(number) >= _SMALLEST else Decimal(0)


def read_port(value: object) -> int | None:
    """A TCP port; None where it is none."""
    port = read_figure(value, 65535, least=1)
    return int(port) if port is not None and port == port.to_integral_value() else None


def read_moment(value: object) -> float | None:
    """Unix seconds of a number, an RFC 3339 time or a datetime; None where it is none.

    Year 1 is how Go writes "not yet".
    """
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value.strip()):
        if value.startswith("0001-"):
            return None
        # Fractions have up to nine digits in some answers, and Python reads six.
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
    """Reads the numbers of one answer. `source` is who sent it, as a person knows it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []

    def usd(self, name: str, value: object) -> Decimal | None:
        return self._read(name, value, MOST_USD)

    def rate(self, name: str, value: object) -> Decimal | None:
        """Dollars an hour."""
        return self._read(name, value, MOST_USD_PER_HOUR)

    def whole(self, name: str, value: object, most: int = _MOST_COUNT) -> int | None:
        number = self._read(name, value, Decimal(most))
        return None if number is None else int(number)

    def seconds(self, name: str, value: object, most: float) -> float | None:
        number = self._read(name, value, Decimal(str(most)))
        return None if number is None else float(number)

    def moment(self, name: str, value: object, now: float) -> float | None:
        """Unix seconds, by the clock that `now` is of. Years ago or days ahead is no time of something that lives."""
        at = read_moment(value)
        if at is not None and now - _OLDEST_S <= at <= now + _AHEAD_S:
            return at
        if value is not None and not (isinstance(value, str) and (not value or value.startswith("0001-"))):
            self._doubt(name, value)
        return None

    def _read(self, name: str, value: object, most: Decimal) -> Decimal | None:
        number = read_figure(value, most)
        if number is None and value is not None:  # None is no figure at all, and no wrong one
            self._doubt(name, value)
        return number

    def _doubt(self, name: str, value: object) -> None:
        self.problems.append(f"{self.source} says that {name} is {_shown(value)}, which cannot be right: not counted.")


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**40:
        return "a number of more than 40 digits"
    text = repr(value) if not isinstance(value, datetime.datetime) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
