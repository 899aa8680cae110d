"""Absurd figures in a cloud's answers: each number, numeric text and time of a reply can be replaced, by its name.

figures_of(reply)              the names of all figures in a reply, JSON or XML
spoil(reply, {name: value})    the same reply with these values in their place
chance(reply, dice, rate)      one figure of a reply, drawn by chance, for the simulated days; chance_in: of a mapping

Python's JSON parser takes NaN and Infinity, so a cloud that sends them reaches the adapter with them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from homing.world import HttpResponse

__all__ = ["ABSURD", "chance", "chance_in", "figures_of", "figures_of_tags", "spoil"]

ABSURD: tuple[Any, ...] = (
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    1e26,
    -5.0,
    10**400,
    "abc",
    "NaN",
    "sNaN",
    "Infinity",
    "1e999999999",
    "",
    [],
    {},
    True,
    None,
)
_FIGURE = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|\d{4}-\d\d-\d\d[T ][\d:.]+(Z|[+-]\d\d:\d\d)?")
_IDS = {"Account", "UserId", "ownerId", "requesterId", "userId"}  # digits that count nothing
_XML = re.compile(rb"<(\w+)>([^<>]+)</\1>")


def figures_of(reply: HttpResponse) -> set[str]:
    if not 200 <= reply.status < 300 or not reply.body:
        return set()
    if reply.body.lstrip().startswith(b"<"):
        return {found[1].decode() for found in _XML.finditer(reply.body) if _is_figure(found[2].decode())} - _IDS
    try:
        return set(_names(json.loads(reply.body))) - _IDS
    except ValueError:
        return set()


def spoil(reply: HttpResponse, values: Mapping[str, Any]) -> HttpResponse:
    """Every figure under one of these names has its value; whatever else is there stays."""
    if not figures_of(reply) & set(values):
        return reply
    if reply.body.lstrip().startswith(b"<"):

        def put(found: re.Match[bytes]) -> bytes:
            name = found[1].decode()
            if name not in values or not _is_figure(found[2].decode()):
                return found[0]
            return b"<%s>%s</%s>" % (found[1], _text(values[name]).encode(), found[1])

        body = _XML.sub(put, reply.body)
    else:
        body = json.dumps(_replaced(json.loads(reply.body), values)).encode()
    headers = {name: text for name, text in reply.headers.items() if name.lower() != "content-length"}
    return dataclasses.replace(reply, headers=headers, body=body)


def figures_of_tags(tags: Mapping[str, str]) -> set[str]:
    return {name for name, text in tags.items() if _is_figure(text)}


def chance_in(values: Mapping[str, Any], dice: Random, rate: float) -> dict[str, Any]:
    """The same of tags or of a list of rates, which an SDK hands over as they are."""
    is_struck, which, value = dice.random() < rate, dice.random(), dice.choice(ABSURD)
    names = sorted(name for name, figure in values.items() if _is_figure(str(figure))) if is_struck else []
    is_text = bool(names) and isinstance(values[names[int(which * len(names))]], str)
    return {**values, names[int(which * len(names))]: _text(value) if is_text else value} if names else dict(values)


def chance(reply: HttpResponse, dice: Random, rate: float) -> HttpResponse:
    """Always three throws, whatever there is to spoil: one reply must not shift the next."""
    is_struck, which, value = dice.random() < rate, dice.random(), dice.choice(ABSURD)
    names = sorted(figures_of(reply)) if is_struck else []
    return spoil(reply, {names[int(which * len(names))]: value}) if names else reply


def _names(body: Any, name: str = "") -> Iterator[str]:
    if isinstance(body, dict):
        for key, value in body.items():
            yield from _names(value, key)
    elif isinstance(body, list):
        for each in body:
            yield from _names(each, name)
    elif _is_figure(body):
        yield name


def _replaced(body: Any, values: Mapping[str, Any], name: str = "") -> Any:
    if isinstance(body, dict):
        return {key: _replaced(value, values, key) for key, value in body.items()}
    if isinstance(body, list):
        return [_replaced(each, values, name) for each in body]
    return values[name] if name in values and _is_figure(body) else body


def _is_figure(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    return isinstance(value, str) and _FIGURE.fullmatch(value) is not None


def _text(value: Any) -> str:
    """As XML can say it."""
    return "" if value is None else "9" * 400 if value == 10**400 else str(value)
