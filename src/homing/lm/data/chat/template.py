"""Renders Jinja chat templates in a sandbox, with the same result as `transformers`.

    chat_template.jinja, else tokenizer_config.json's chat_template  ->  ChatTemplate(...).render(messages) -> text

A third-party template sees only plain data, inside an immutable sandbox, in a process with limited time and memory
(`template_process`). homing's own template is rendered in this process. `{% generation %}` blocks, even inside macros,
are enclosed in two marks that the caller chooses, so that the caller can find the blocks in the rendered text.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from homing.errors import DataError
from homing.lm.ask_child_process import exchange
from homing.lm.data.chat.messages import Fault, Message
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE as OUR_TEMPLATE
from homing.units import format_bytes
from homing.wire.chat_template import Unreadable, read_chat_template
from homing.wire.file_names import CHAT_TEMPLATE as TEMPLATE

__all__ = ["TEMPLATE", "ChatTemplate", "Rendering", "find_template"]

_RENDER_S = 10.0  # maximum time to render one conversation, which usually takes a millisecond
_START_S = 60.0  # maximum time for the process to start and compile the template, even on a busy machine
_MEMORY_BYTES = 1 << 30  # limit on the address space of the rendering process
_MOST_SOURCE = 1 << 20  # characters
_MOST_TEXT_BYTES = 512 << 20  # maximum size of the rendered text, encoded as JSON
_MOST_EXCEEDED = 3  # once this many conversations have exceeded the limits, the template is rejected

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    def __init__(
        self, source: str, names: dict[str, str], *, path: str = "", now: datetime.datetime | None = None
    ) -> None:
        """Check the template; raises DataError if it is not valid Jinja.

        `names` are the special tokens that a template may use: bos_token, eos_token, ... `now` is the time that the
        template sees, by default the current time.
        """
        self.source, self.names, self.path = source, names, path
        self.has_generation = _GENERATION.search(source) is not None
        self._now = now or datetime.datetime.now()
        self._lock = threading.Lock()  # needed because a server renders from several threads at once
        self._child: subprocess.Popen[bytes] | None = None
        self._num_exceeded = 0
        self._own: Rendering | None = None
        try:
            if len(source) > _MOST_SOURCE:
                raise TemplateSyntaxError(f"it has {len(source):,} characters; the maximum is {_MOST_SOURCE:,}", 1)
            if source == OUR_TEMPLATE:  # homing's own template needs no limits
                self._own = Rendering(source, names, self._now)
            else:
                _environment(self._now).parse(source)  # do not compile: constant folding may never terminate
        except (TemplateSyntaxError, RecursionError) as exc:
            line, why = (exc.lineno, exc.message) if isinstance(exc, TemplateSyntaxError) else (1, "nested too deeply")
            raise DataError(
                what=f"The chat template{f' in {path}' if path else ''} is not valid Jinja.",
                why=f"Line {line}: {why}",
                fix=f"Use the model's original {TEMPLATE}.",
            ) from exc

    @property
    def sha256(self) -> str:
        """The hash of the template's source and the special tokens that it may use."""
        return hashlib.sha256(json.dumps([self.source, self.names], sort_keys=True).encode()).hexdigest()

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Render messages to text. `marks` enclose `{% generation %}` blocks. Raises Fault if the template fails."""
        with self._lock:
            if self._own is not None:
                return self._own.render(messages, tools, add_generation_prompt=add_generation_prompt, marks=marks)
            asked = {
                "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt, "marks": marks,
            }  # fmt: skip
            said = self._ask(asked)
        if "fault" in said:
            raise Fault("template", said["fault"])
        return str(said["text"])

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the rendering process; start it if necessary, and kill it if it exceeds its limits."""
        why = f"it used more than {format_bytes(_MEMORY_BYTES)} of memory"
        try:
            if self._child is None:
                self._child = _start(self)
                begin = {"source": self.source, "names": self.names, "now": self._now.isoformat()}
                said = _said(self._child, begin)
                if "ready" not in said:
                    raise EOFError
            said = _said(self._child, asked)
            if "text" in said or "fault" in said:
                return said
        except TimeoutError:
            why = f"it took longer than {_RENDER_S:g} s"
        except (EOFError, OSError):
            pass
        if self._child is not None:
            _end(self._child)
            self._child = None
        self._num_exceeded += 1
        if self._num_exceeded < _MOST_EXCEEDED:
            raise Fault("template", f"the chat template exceeded its limits on this conversation: {why}")
        raise DataError(
            what=f"Cannot use the chat template{f' in {self.path}' if self.path else ''}.",
            why=f"It exceeded its time or memory limit {self._num_exceeded} times. The last time, {why}.",
            fix=f"Use the model's original {TEMPLATE}.",
        )


def _start(template: ChatTemplate) -> subprocess.Popen[bytes]:
    """Start the rendering process with only the environment variables it needs, because others may contain API keys."""
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    argv = [sys.executable, "-m", "homing.lm.data.chat.template_process", str(_MEMORY_BYTES)]
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, start_new_session=True
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    weakref.finalize(template, _end, child)
    return child


def _said(child: subprocess.Popen[bytes], asked: dict[str, Any]) -> dict[str, Any]:
    line = json.dumps(asked).encode() + b"\n"
    timeout_s = _RENDER_S if "source" not in asked else _START_S
    answer = exchange(child, line, timeout_s=timeout_s, most_bytes=_MOST_TEXT_BYTES)
    return dict(json.loads(answer)) if answer else {}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()


class Rendering:
    """A compiled template. The caller must limit the time and memory that it uses."""

    def __init__(self, source: str, names: dict[str, str], now: datetime.datetime) -> None:
        self._names = names
        environment = _environment(now)
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation), "the environment must contain our extension"
        self._generation = generation
        self._template = environment.from_string(source)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        marks: tuple[str, str],
    ) -> str:
        self._generation.marks = marks
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except TemplateError as exc:
            raise Fault(
                "template", f"the chat template rejects this conversation: {exc.message or type(exc).__name__}"
            ) from exc
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as exc:
            # The template has a bug, such as adding a number to text, and perhaps only this conversation triggers it.
            raise Fault(
                "template", f"the chat template fails on this conversation: {type(exc).__name__}: {exc}"
            ) from exc


def find_template(folder: Path, *, now: datetime.datetime | None = None) -> ChatTemplate | None:
    """Return the chat template in a model folder, or None if there is none."""
    try:
        found = read_chat_template(folder)
    except Unreadable as exc:
        raise DataError(f"{exc.path} cannot be read.", str(exc), "Use the model's original file.") from exc
    names = {name: text for name in _NAMES if (text := _token(found.config.get(name)))}
    return ChatTemplate(found.source, names, path=str(found.path), now=now) if found.source else None


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""


def _with_reasoning(message: Message) -> Message:
    """Add `thinking` as a second name for the message's `reasoning_content`, because templates use either name."""
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
    """Provides `dict(...)` to templates without exposing the class `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """Provides `namespace(...)` to templates; rejects names with a leading underscore, which expose internals."""

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
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize a value as JSON. jinja2's own tojson filter adds HTML escapes, which models never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """Create the sandboxed Jinja environment. `now` is fixed, so that all texts of one prep have the same date."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment
