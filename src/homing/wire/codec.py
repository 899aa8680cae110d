"""Dataclasses to JSON and back: strict when we write, lenient when we read.

A writer checks every field against its annotation, so that a wrong type fails on the machine that made it.
A reader ignores keys it does not know and fills defaults for keys it misses, so that an older `homing` can read
what a newer one wrote; it refuses only what it cannot use, naming the path of the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from typing import Any, Callable, Dict, List, Type, TypeVar, Union

__all__ = ["WireError", "dump", "dumps", "load", "loads", "record", "schema_of"]

T = TypeVar("T")


class WireError(ValueError):
    """A document that is not what its name promises."""


def record(name: str, version: int) -> Callable[[Type[T]], Type[T]]:
    """Marks a dataclass as a document of its own: it is written with `schema: homing.NAME/VERSION`."""

    def mark(cls: Type[T]) -> Type[T]:
        cls.SCHEMA = f"homing.{name}/{version}"  # type: ignore[attr-defined]
        return cls

    return mark


def schema_of(obj: object) -> str:
    return str(getattr(obj, "SCHEMA", ""))


def dump(obj: Any) -> Dict[str, Any]:
    """A JSON-ready dict; raises WireError where a value does not fit its annotation."""
    out: Dict[str, Any] = {"schema": schema_of(obj)} if schema_of(obj) else {}
    hints = typing.get_type_hints(type(obj))
    for field in dataclasses.fields(obj):
        path = f"{type(obj).__name__}.{field.name}"
        out[field.name] = _encode(getattr(obj, field.name), hints[field.name], path)
    return out


def dumps(obj: Any, indent: Union[int, None] = None) -> str:
    return json.dumps(dump(obj), indent=indent, ensure_ascii=False, allow_nan=False)


def load(cls: Type[T], data: Any, path: str = "") -> T:
    """`data` as `cls`: unknown keys ignored, missing ones defaulted, everything else checked."""
    path = path or cls.__name__
    if not isinstance(data, dict):
        raise WireError(f"{path}: expected an object, got {type(data).__name__}")
    wanted, got = schema_of(cls), data.get("schema")
    if wanted and got is not None and str(got).split("/")[0] != wanted.split("/")[0]:
        raise WireError(f"{path}: this is a {got} document, not a {wanted}")
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in data:
            values[field.name] = _decode(data[field.name], hints[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise WireError(f"{path}.{field.name} is missing")
    return cls(**values)


def loads(cls: Type[T], text: Union[str, bytes]) -> T:
    try:
        data = json.loads(text)
    except ValueError as exc:
        raise WireError(f"{cls.__name__}: not JSON: {exc}") from exc
    return load(cls, data)


def _encode(value: Any, hint: Any, path: str) -> Any:
    checked = _decode_scalar_or_none(value, hint, path)
    if dataclasses.is_dataclass(checked) and not isinstance(checked, type):
        return dump(checked)
    origin = typing.get_origin(_strip_optional(hint)) if value is not None else None
    if origin in (list, tuple):
        return [_encode(v, _args(hint)[0], f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        return {_key(k, path): _encode(v, _args(hint)[1], f"{path}.{k}") for k, v in value.items()}
    return checked


def _decode(value: Any, hint: Any, path: str) -> Any:
    inner = _strip_optional(hint)
    if value is None:
        return _decode_scalar_or_none(value, hint, path)
    if dataclasses.is_dataclass(inner):
        return load(inner, value, path)  # type: ignore[arg-type]
    origin = typing.get_origin(inner)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise WireError(f"{path}: expected a list, got {type(value).__name__}")
        return [_decode(v, _args(hint)[0], f"{path}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise WireError(f"{path}: expected an object, got {type(value).__name__}")
        return {k: _decode(v, _args(hint)[1], f"{path}.{k}") for k, v in value.items()}
    return _decode_scalar_or_none(value, hint, path)


def _decode_scalar_or_none(value: Any, hint: Any, path: str) -> Any:
    inner = _strip_optional(hint)
    if value is None:
        if inner is hint and hint is not Any:
            raise WireError(f"{path}: null where a value is needed")
        return None
    if inner is Any:
        return _plain_json(value, path)
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if inner in (str, int, float, bool):
        is_bool_as_int = isinstance(value, bool) and inner is not bool
        if not isinstance(value, inner) or is_bool_as_int:
            raise WireError(f"{path}: expected {inner.__name__}, got {value!r}")
        if inner is float and not math.isfinite(value):
            raise WireError(f"{path}: {value!r} is not a finite number")
    elif dataclasses.is_dataclass(inner) and not isinstance(value, inner):  # type: ignore[arg-type]
        raise WireError("{}: expected {}, got {}".format(path, getattr(inner, "__name__", inner), type(value).__name__))
    return value


def _plain_json(value: Any, path: str) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise WireError(f"{path}: {exc}") from exc
    return value


def _strip_optional(hint: Any) -> Any:
    if typing.get_origin(hint) is Union:
        inner: List[Any] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        assert len(inner) == 1, f"a wire field is one type, or one type and None: {hint!r}"
        return inner[0]
    return hint


def _args(hint: Any) -> Any:
    return typing.get_args(_strip_optional(hint))


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise WireError(f"{path}: key {key!r} is not a string")
    return key
