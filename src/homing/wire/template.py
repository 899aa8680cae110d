"""The chat template that lies beside a tokenizer, as text: in a file of its own, or in tokenizer_config.json.

Knows no Jinja: what a template means is asked at home alone (`lm.chat.template`), while config and the trainer only
ask whether there is one, and which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict

from homing.wire import names

__all__ = ["Beside", "Unreadable", "refuse_link_outside", "template_beside"]


class Unreadable(ValueError):
    """The file at `path` is there and cannot be read; the message says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


@dataclass(frozen=True)
class Beside:
    source: str  # "" where there is no template
    path: Path  # where it stands
    config: Dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json, {} where there is none


def template_beside(folder: Path) -> Beside:
    """`folder` holds a tokenizer: data, a checkpoint, or somebody's model. Raises Unreadable."""
    path = folder / names.TOKENIZER_CONFIG
    refuse_link_outside(path)
    config = _object(path) if path.is_file() else {}
    own = folder / names.CHAT_TEMPLATE
    refuse_link_outside(own)
    # Newer writers put it there, and it wins in transformers too; also with the line break that editors put at its end.
    if own.is_file():
        try:
            return Beside(own.read_text(encoding="utf-8"), own, config)
        except (OSError, UnicodeDecodeError) as exc:
            raise Unreadable(own, str(exc)) from exc
    return Beside(_default(config.get("chat_template")), path, config)


def refuse_link_outside(path: Path) -> None:
    """A folder from a stranger may link to any file of this computer, which would then travel with the run. Raises
    Unreadable. A snapshot in the cache of the Hub links to the blobs of its own repository, which is allowed."""
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
    """Some models have several templates by name; the one called default is meant."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
