"""The chat template: Jinja from a folder, rendered in a sandbox exactly as `transformers` renders it.

    chat_template.jinja, else tokenizer_config.json's chat_template  ->  ChatTemplate(...).render(messages) -> text

A template may come from strangers, so it sees plain data and an immutable sandbox, and nothing else. `{% generation %}`
blocks are remembered by two marks that the caller chooses, so they are found again in the text, also inside macros.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from homing.errors import DataError
from homing.lm.chat.messages import Fault, Message
from homing.wire.names import CHAT_TEMPLATE as TEMPLATE
from homing.wire.template import Unreadable, template_beside

__all__ = ["TEMPLATE", "ChatTemplate", "find_template"]

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    def __init__(
        self, source: str, names: dict[str, str], *, path: str = "", now: datetime.datetime | None = None
    ) -> None:
        """`names` are the special tokens that a template may ask for: bos_token, eos_token, ... `now`: the time
        that it is told; the clock's where none is given."""
        self.source, self.names, self.path = source, names, path
        self.has_generation = _GENERATION.search(source) is not None
        environment = _environment(now or datetime.datetime.now())
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation), "it is there by that name"
        self._generation = generation
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as exc:
            raise DataError(
                what=f"The chat template{f' in {path}' if path else ''} is not Jinja that can be read.",
                why=f"Line {exc.lineno}: {exc.message}",
                fix=f"Take {TEMPLATE} as it came with the model.",
            ) from exc

    @property
    def sha256(self) -> str:
        """Of all that decides what is rendered."""
        return hashlib.sha256(json.dumps([self.source, self.names], sort_keys=True).encode()).hexdigest()

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """`marks` come before and after what stands in `{% generation %}`. What a template refuses is a Fault."""
        self._generation.marks = marks
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.names,
            )
        except TemplateError as exc:
            raise Fault("template", f"the chat template refuses it: {exc.message or type(exc).__name__}") from exc
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as exc:
            # A template's own slip, such as adding a number to text; only this conversation may bring it about.
            raise Fault("template", f"the chat template fails on it: {type(exc).__name__}: {exc}") from exc


def find_template(folder: Path, *, now: datetime.datetime | None = None) -> ChatTemplate | None:
    """None where the folder has none."""
    try:
        found = template_beside(folder)
    except Unreadable as exc:
        raise DataError(f"{exc.path} cannot be read.", str(exc), "Take it as it came with the model.") from exc
    names = {name: text for name in _NAMES if (text := _token(found.config.get(name)))}
    return ChatTemplate(found.source, names, path=str(found.path), now=now) if found.source else None


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""


def _with_reasoning(message: Message) -> Message:
    """Templates ask for a model's reasoning under two names."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.marks = ("", "")

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        before, after = self.marks
        return f"{before}{caller()}{after}"


class _SafeDict:
    """`dict(...)` for templates, without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """`namespace(...)`: no names with an underscore, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes for HTML, which no model was taught on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """`now` once, so that all conversations of one prep have one date."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment
