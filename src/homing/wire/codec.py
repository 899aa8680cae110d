"""Converts dataclasses to JSON and back: strict when writing, lenient when reading.

A writer checks every field against its annotation, so that a wrong type fails on the machine that wrote it. A reader
ignores unknown keys and fills in defaults for missing ones, so that an older `homing` can read what a newer one wrote.
It rejects only values that it cannot use, and the error names the path of the field.

`read_figure` reads a number that another program wrote. JSON may contain NaN, Infinity and 1e308, and text such as
"1e999999999" is a Decimal that no one can compute with. The agent, the guards and the parsers of providers' answers use
this one function where they read a figure. `load` does not: a request with an invalid amount must still be readable, so
that the agent can report that it refused it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from decimal import Decimal
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, TypeVar, Union

T = TypeVar("T")
# the highest plausible cost of one instance; the most expensive 8-GPU machine costs about a million dollars a year
MOST_USD = Decimal(10**7)
MOST_LIMIT_USD = Decimal(10**9)  # the highest spend limit that a person can set
_LONGEST_TEXT = 100  # maximum number of characters in a plausible number
_SMALLEST = Decimal("1e-12")


class WireError(ValueError):
    """Raised if a document does not have the expected form."""


def record(name: str, version: int) -> Callable[[Type[T]], Type[T]]:
    """Return a decorator that makes a class a top-level document with the field `schema: homing.NAME/VERSION`."""

    def mark(cls: Type[T]) -> Type[T]:
        cls.SCHEMA = f"homing.{name}/{version}"  # type: ignore[attr-defined]  # not on every dataclass; see schema_of
        return cls

    return mark


def schema_of(obj: object) -> str:
    return str(getattr(obj, "SCHEMA", ""))


def dump(obj: Any) -> Dict[str, Any]:
    """Return the object as a JSON-ready dict. Raise WireError if a value does not match its annotation."""
    checked = load(type(obj), dataclasses.asdict(obj))
    return {**({"schema": schema_of(obj)} if schema_of(obj) else {}), **dataclasses.asdict(checked)}


def dumps(obj: Any, indent: Optional[int] = None) -> str:
    try:
        return json.dumps(dump(obj), indent=indent, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise WireError(f"{type(obj).__name__}: {exc}") from exc


def load(cls: Type[T], data: Any, path: str = "") -> T:
    """Build a `cls` from `data`, ignoring unknown keys and filling in defaults. Raise WireError for unusable values."""
    shape: Any = cls  # typed as Any, because Type[T] does not say that `cls` is a dataclass
    path = path or cls.__name__
    if not isinstance(data, dict):
        raise WireError(f"{path}: expected an object, got {type(data).__name__}")
    wanted, got = schema_of(cls), data.get("schema")
    if wanted and got is not None and str(got).split("/")[0] != wanted.split("/")[0]:
        raise WireError(f"{path}: this is a {got} document, not a {wanted}")
    values = {}
    for name, hint, kind, is_optional, is_needed in _fields(shape):
        if name in data:
            value = data[name]
            # Fast path: most values are plain and of the right type, and a metrics file contains a great many values.
            if (type(value) is kind and (kind is not float or math.isfinite(value))) or (value is None and is_optional):
                values[name] = value
            else:
                values[name] = _decode(value, hint, f"{path}.{name}")
        elif is_needed:
            raise WireError(f"{path}.{name} is missing")
    return cls(**values)


def loads(cls: Type[T], text: Union[str, bytes]) -> T:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as exc:  # RecursionError: deeply nested lists exhaust the parser's stack
        raise WireError(f"{cls.__name__}: not JSON: {exc}") from exc
    return load(cls, data)


@functools.lru_cache(maxsize=None)  # cached, because resolving annotations takes longer than reading the document
def _hints(cls: Any) -> Dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.lru_cache(maxsize=None)
def _fields(cls: Any) -> List[Tuple[str, Any, Any, bool, bool]]:
    """Return each field's name, annotation, plain type or None, whether it may be None, and whether it is required."""
    found = []
    for field in dataclasses.fields(cls):
        hint = _hints(cls)[field.name]
        inner = _strip_optional(hint)
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        kind = inner if inner in (str, int, float, bool) else None
        found.append((field.name, hint, kind, inner is not hint or hint is Any, is_needed))
    return found


def _decode(value: Any, hint: Any, path: str) -> Any:
    inner = _strip_optional(hint)
    if value is None:
        if inner is hint and hint is not Any:
            raise WireError(f"{path}: null where a value is required")
        return None
    if isinstance(inner, type) and dataclasses.is_dataclass(inner):
        return load(inner, value, path)
    kind = typing.get_origin(inner) or inner
    if kind is Any:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WireError(f"{path}: expected {kind.__name__}, got {value!r:.60}")
    if kind is float and not math.isfinite(value):
        raise WireError(f"{path}: {value!r} is not a finite number")
    if kind is list:
        return [_decode(v, typing.get_args(inner)[0], f"{path}[{i}]") for i, v in enumerate(value)]
    if kind is dict:
        keys, values = typing.get_args(inner)
        return {_decode(k, keys, path): _decode(v, values, f"{path}.{k}") for k, v in value.items()}
    return value


def _strip_optional(hint: Any) -> Any:
    args = typing.get_args(hint)
    assert len(args) == 2 or type(None) not in args, f"a wire field is one type, or one type and None: {hint!r}"
    return args[args[0] is type(None)] if type(None) in args else hint


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
