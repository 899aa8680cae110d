"""Reads the chat template of a tokenizer as text: from its own file, or from tokenizer_config.json.

Does not evaluate Jinja: only `lm.chat.template`, at home, interprets a template. config and the trainer only need to
know whether there is one, and which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict

from homing.wire import file_names

__all__ = ["FoundTemplate", "Unreadable", "read_chat_template", "refuse_link_outside"]


class Unreadable(ValueError):
    """The file at `path` exists and cannot be read; the message says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


@dataclass(frozen=True)
class FoundTemplate:
    source: str  # the template; "" if there is none
    path: Path  # the file it was read from
    config: Dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json, {} if there is none


def read_chat_template(folder: Path) -> FoundTemplate:
    """Return the chat template next to the tokenizer in `folder`: data, a checkpoint or a model. Raises Unreadable."""
    path = folder / file_names.TOKENIZER_CONFIG
    refuse_link_outside(path)
    config = _object(path) if path.is_file() else {}
    own = folder / file_names.CHAT_TEMPLATE
    refuse_link_outside(own)
    # Newer writers use this file, and it takes precedence in transformers too; a trailing line break from an editor is
    # kept.
    if own.is_file():
        try:
            return FoundTemplate(own.read_text(encoding="utf-8"), own, config)
        except (OSError, UnicodeDecodeError) as exc:
            raise Unreadable(own, str(exc)) from exc
    return FoundTemplate(_default(config.get("chat_template")), path, config)


def refuse_link_outside(path: Path) -> None:
    """Raise Unreadable if `path` is a symlink that leads outside its folder.

    A folder from an untrusted source could link to any file on this computer, which would then be sent with the run. A
    snapshot in the Hub cache may link to the blobs of its own repository.
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
    """Return the template called "default" if there are several by name."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
