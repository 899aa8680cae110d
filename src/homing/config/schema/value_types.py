"""Building blocks of the schema: value types with human units, the base class `Section`, and `key`.

Each type is an annotated type for pydantic that accepts human units and returns base units. `Filled` also refuses
placeholders that the user forgot to replace, such as YOUR_BUCKET or <volume id>. `key` declares a key and everything
that `homing explain` prints about it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

from homing.units import format_bytes, format_usd, parse_bytes, parse_count, parse_duration, parse_usd

__all__ = [
    "KINDS",
    "Bytes",
    "Count",
    "Duration",
    "Filled",
    "FilledList",
    "Flag",
    "Number",
    "Parallel",
    "Section",
    "Switch",
    "Text",
    "Texts",
    "Usd",
    "Whole",
    "is_placeholder",
    "key",
    "parse_number",
    "written",
]


def _parallel(value: Any) -> Any:
    """Refuse kinds of parallel training that other programs have, with a sentence about what to use instead."""
    if isinstance(value, str) and value.lower() in ("tensor", "pipeline", "context", "expert", "fsdp"):
        has = (
            "zero3 is what torch calls FSDP"
            if value.lower() == "fsdp"
            else f"homing has no {value.lower()} parallelism"
        )
        raise ValueError(f"{has}. Use zero3 for a model that does not fit on one GPU")
    return value


def _whole(value: Any) -> int:
    wrong = f"{_shown(value)} is not a whole number, such as 12"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(wrong)
    _refuse_past_measure(value)
    try:
        return parse_count(value)
    except ValueError:
        raise ValueError(wrong) from None


def _count(value: Any) -> int:
    if not isinstance(value, (int, float, str)):
        raise ValueError(f"{_shown(value)} is not a count, such as 131072, 10k, 1.5M or 2B")
    _refuse_past_measure(value)
    return parse_count(value)


def _bytes(value: Any) -> int:
    if not isinstance(value, (int, float, str)):
        raise ValueError(f"{_shown(value)} is not a size, such as 100MB or 1.5GiB")
    _refuse_past_measure(value)
    return parse_bytes(value)


def _duration(value: Any) -> float:
    if not isinstance(value, (int, float, str)):
        raise ValueError(f"{_shown(value)} is not a duration, such as 90s, 30m or 1h30m")
    _refuse_past_measure(value)
    seconds = parse_duration(value)
    text = str(value).strip()
    if seconds and text[-1].isdigit():
        # `idle: 30` may mean minutes; reading it as seconds would destroy an instance while it compiles.
        raise ValueError(f"{text} has no unit: {text}s, {text}m or {text}h")
    return seconds


def _usd(value: Any) -> Decimal:
    if not isinstance(value, (int, float, str)):
        raise ValueError(f"{_shown(value)} is not an amount of dollars, such as $12.00")
    _refuse_past_measure(value)
    return parse_usd(re.sub(r"(?i)\s*/\s*(h|hr|hour)$", "", value.strip()) if isinstance(value, str) else value)


def parse_number(value: Any) -> float:
    wrong = f"{_shown(value)} is not a number, such as 0.02 or 3e-4"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(wrong)
    text = str(value).strip()
    is_percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(wrong) from None
    if not math.isfinite(number):
        raise ValueError(wrong)
    return number / 100 if is_percent else number


def _switch(value: Any) -> Any:
    """Accept `compile: true` for `compile: on`."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _without_null(value: str) -> str:
    # No path, pattern or prompt can contain a null character, and the operating system's error would not name the key.
    if "\0" in value:
        raise ValueError(f"{value[:60]!r} contains a null character")
    return value


def _texts(value: Any) -> Any:
    """Accept one path without brackets."""
    return [value] if isinstance(value, str) else value


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a section"
    return repr(value)[:60]


def _refuse_past_measure(value: Any) -> None:
    # 9e999999999 is short text but a number with a billion digits, which would take too long to parse.
    if re.search(r"\d{40}|[eE]\s*\+?\d{3}", str(value)[:2000]) or len(str(value)) > 100:
        raise ValueError(f"{str(value)[:40]!r} is too large")


# Parsing function -> the name that `homing explain` shows for this type of value.
KINDS: dict[Callable[..., Any], str] = {
    _whole: "a whole number",
    _count: "a count (131072, 10k, 1.5M, 2B)",
    _bytes: "a size (100MB, 1.5GiB)",
    _duration: "a duration (90s, 30m, 1h30m)",
    _usd: "dollars ($12.00)",
    parse_number: "a number (0.02, 3e-4, 5%)",
    _texts: "a list of strings",
}

Text = Annotated[StrictStr, AfterValidator(_without_null)]
Flag = StrictBool
Texts = Annotated[list[Text], BeforeValidator(_texts)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_count)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Duration = Annotated[float, BeforeValidator(_duration)]
Usd = Annotated[Decimal, BeforeValidator(_usd)]
Number = Annotated[float, BeforeValidator(parse_number)]
Switch = BeforeValidator(_switch)
Parallel = BeforeValidator(_parallel)


def written(value: Any, kind: str) -> str:
    """Format a default or a bound as a user would write it."""
    if isinstance(value, list):
        return "[" + ", ".join(str(part) for part in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "":
        return "none"
    if kind.startswith("a duration"):
        return "0" if not value else _compact_duration(float(value))
    if kind.startswith("a size"):
        return format_bytes(value).replace(" ", "").replace(".00", "")
    if kind.startswith("dollars"):
        return format_usd(value)
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _compact_duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


# YOUR is matched only in upper case, as the documentation writes it, because a real bucket may be called your-models.
_PLACEHOLDER = re.compile(r"\bYOUR[_-][A-Z0-9_-]*|<[^<>]*>|\bREPLACE_ME\b|\bCHANGE_?ME\b|\bTODO\b|\byourusername\b")


def is_placeholder(text: str) -> bool:
    return _PLACEHOLDER.search(text) is not None


def _filled(text: str) -> str:
    if is_placeholder(text):
        raise ValueError(f"{text!r} is a placeholder: replace it with your own value, or delete the line")
    return text


Filled = Annotated[Text, AfterValidator(_filled)]
FilledList = Annotated[Texts, AfterValidator(lambda texts: [_filled(text) for text in texts])]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def key(about: str, *, default: Any = None, example: Any, derived: str = "", **limits: Any) -> Any:
    """Declare a field with its description. `derived` says where the value comes from if the key is omitted."""
    extra: dict[str, Any] = {"derived": derived}
    if isinstance(default, (list, dict)):
        copy = default
        return Field(
            default_factory=lambda: copy.copy(), description=about, examples=[example], json_schema_extra=extra
        )
    return Field(default, description=about, examples=[example], json_schema_extra=extra, **limits)
