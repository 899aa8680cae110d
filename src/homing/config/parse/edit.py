"""Change keys of a run file and keep every other character, including comments.

  data:                      data.take=2MB       data:
    text: [a.txt]  # mine    ------------->        take: 2MB
                                                   text: [a.txt]  # mine

YAML is edited as text; JSON is rewritten. TOML is not changed, because the standard library has no TOML writer.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from homing.config.parse.source import read_source, yaml_value
from homing.errors import RunFileError

__all__ = ["write_keys"]


def write_keys(path: Path, changes: Mapping[str, str]) -> str:
    """Write keys such as data.take, each with its value in YAML notation, into the run file.

    Return the reason why the file was not changed, or "" on success.
    """
    if path.suffix == ".toml":
        return "homing does not write TOML"
    wanted = copy.deepcopy(read_source(path).data)
    for key, value in changes.items():
        _put(wanted, key, yaml_value(value))
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        text = path.read_text(encoding="utf-8-sig")
        temporary.write_text(_json(wanted) if path.suffix == ".json" else _yaml_with(text, changes), encoding="utf-8")
        # A file may use anchors or an unexpected layout. Keep the original if the result does not parse back to the
        # intended values.
        if read_source(temporary).data != wanted:
            return "the file cannot be edited safely"
        os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except OSError as exc:
        return exc.strerror or str(exc)
    except (RunFileError, YAMLError):
        return "the file cannot be edited safely"
    finally:
        temporary.unlink(missing_ok=True)
    return ""


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    data[section] = {**(data.get(section) or {}), name: value}


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _yaml_with(text: str, changes: Mapping[str, str]) -> str:
    for key, value in changes.items():
        section, name = key.split(".")
        text = _yaml_with_key(text, section, name, value)
    return text


def _yaml_with_key(text: str, section: str, name: str, value: str) -> str:
    root = YAML(typ="rt", pure=True).compose(text)
    found = _pair(root, section)
    if found is None:
        return f"{text.rstrip()}\n\n{section}:\n  {name}: {value}\n"
    if not isinstance(found[1], MappingNode) or not found[1].value:  # `data:` without content, or `data: {}`
        return _replaced(text, *found, f"{{{name}: {value}}}")
    pair = _pair(found[1], name)
    if pair is not None:
        return _replaced(text, *pair, value)
    at = found[1].value[0][0].start_mark
    between = ", " if found[1].flow_style else f"\n{' ' * at.column}"
    return f"{text[: at.index]}{name}: {value}{between}{text[at.index :]}"


def _pair(node: Node | None, name: str) -> tuple[Node, Node] | None:
    assert isinstance(node, MappingNode), "the run file was loaded before"
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _replaced(text: str, key: Node, old: Node, value: str) -> str:
    end = key.end_mark.index + 1
    if not isinstance(old, ScalarNode) or old.value or old.style:  # otherwise the key has no value to replace
        end = _end(old)
    return f"{text[: key.end_mark.index]}: {value}{text[end:]}"


def _end(node: Node) -> int:
    """Return the index after the node's last character.

    For a block list, the parser only reports where the next key begins.
    """
    if isinstance(node, CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
