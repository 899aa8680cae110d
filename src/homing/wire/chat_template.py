"""Reads a tokenizer's chat template as text, from its own file or tokenizer_config.json, and defines turns.json.

turns.json contains the text that the template puts around messages. `lm.data.chat.text_around_turns` extracts it:

begin USER end | begin_system SYSTEM system_user USER end | ... USER user_assistant ASSISTANT assistant_user USER end

This module does not evaluate Jinja; only `lm.data.chat.template` does, on the user's computer. `config` and the trainer
only need to know whether there is a template, and which one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Optional

from homing.wire import file_names
from homing.wire.codec import record

__all__ = ["FoundTemplate", "Turns", "Unreadable", "read_chat_template", "refuse_link_outside"]


@record("turns", 1)
@dataclass(frozen=True)
class Turns:
    """The text that a template puts around messages. A field is None if the template forbids that sequence of roles."""

    template_sha256: str  # sha256 of the template's text
    begin: str  # the text before the first message, if that message is from the user
    end: str  # the text after the last message, including the start of the assistant's turn
    markers: Dict[str, int] = field(default_factory=dict)  # special token, as it appears in the text -> id
    end_id: Optional[int] = None  # id of the token with which the assistant ends a turn
    is_trimmed: bool = False  # whether the template strips the whitespace around messages
    begin_system: Optional[str] = None
    system_user: Optional[str] = None
    user_assistant: Optional[str] = None
    assistant_user: Optional[str] = None
    user_user: Optional[str] = None


class Unreadable(ValueError):
    """Raised if the file at `path` exists but cannot be read. The message says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


@dataclass(frozen=True)
class FoundTemplate:
    source: str  # the text of the template, or "" if there is none
    path: Path  # the file from which the template was read
    config: Dict[str, Any] = field(default_factory=dict)  # the content of tokenizer_config.json, or {} if there is none


def read_chat_template(folder: Path) -> FoundTemplate:
    """Return the chat template in `folder` (data, a checkpoint or a model). Raise Unreadable if it cannot be read."""
    path = folder / file_names.TOKENIZER_CONFIG
    refuse_link_outside(path)
    config = _object(path) if path.is_file() else {}
    own = folder / file_names.CHAT_TEMPLATE
    refuse_link_outside(own)
    # Newer tools write chat_template.jinja, which takes precedence in transformers too. Keep a trailing line break,
    # even one that an editor added.
    if own.is_file():
        try:
            return FoundTemplate(own.read_text(encoding="utf-8"), own, config)
        except (OSError, UnicodeDecodeError) as exc:
            raise Unreadable(own, str(exc)) from exc
    return FoundTemplate(_default(config.get("chat_template")), path, config)


def refuse_link_outside(path: Path) -> None:
    """Raise Unreadable if `path` is a symlink that leads outside its folder.

    A folder from an untrusted source could link to any file on this computer, which would then be uploaded with the
    run. A snapshot in the Hub cache, however, may link to the blobs of its own repository.
    """
    if not path.is_symlink():
        return
    target, folder = path.resolve(), path.parent.resolve()
    is_blob = target.parent == folder.parent.parent / "blobs" and folder.parent.name == "snapshots"
    if folder not in target.parents and not is_blob:
        raise Unreadable(path, f"It is a link to {target}, outside its folder.")


def _object(path: Path) -> Dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise Unreadable(path, str(exc)) from exc
    if not isinstance(found, dict):
        raise Unreadable(path, f"It is {type(found).__name__}, not an object.")
    return found


def _default(value: Any) -> str:
    """Return the chat template, or the one named "default" if there are several."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
