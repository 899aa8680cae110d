"""`homing explain [KEY]`: print the description of a run file key, or the JSON schema of the run file."""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

import typer

from homing.api.tools.explain_key import explain_key, run_file_schema
from homing.cli import output
from homing.cli.complete import key_words
from homing.cli.options import Json
from homing.errors import UsageError

__all__ = ["command"]


def command(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Key or section, such as model.depth or limits.", autocompletion=key_words),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the run file, for completion in an editor.")
    ] = False,
    json_: Json = False,
) -> None:
    """Explain a key of the run file. Without a key, list all sections and keys."""
    if schema:
        _print_schema(key)
        return
    found = explain_key(key)
    output.emit("explain/1", found.to_dict())
    if found.sections is not None:
        _show_all(found.sections, found.keys)
    elif found.section is not None:
        if not output.is_json():
            print(f"{found.section}: {found.about}\n")
        _table(found.keys)
        output.say(f"\nExplain one of them: homing explain {found.keys[0].path.replace('.N.', '.0.')}")
    elif not output.is_json():
        print("\n\n".join(_words(entry) for entry in found.keys))


def _print_schema(key: str | None) -> None:
    if key is not None:
        raise UsageError(
            what="--schema and KEY cannot be combined.",
            why=f"--schema prints the schema of the whole run file, but you also typed the key {key!r}.",
            fix=f"homing explain --schema   or explain the key: homing explain {shlex.quote(key)}",
        )
    output.emit("run-file-schema/1", {"json_schema": (found := run_file_schema())})
    if not output.is_json():
        print(json.dumps(found, indent=1, ensure_ascii=False))


def _show_all(sections: dict[str, str], keys: list[Any]) -> None:
    if output.is_json():
        return
    for section, about in sections.items():
        inside = [entry.name for entry in keys if entry.section == section]
        print(f"{section or '(top)'}: {about}\n    {', '.join(inside)}")
    output.say("\nExplain one key: homing explain model.depth")


def _table(found: list[Any]) -> None:
    output.table(
        ("key", "default", "allowed", "description"),
        [(entry.name, entry.default, entry.allowed or entry.kind, entry.about) for entry in found],
    )


def _words(entry: Any) -> str:
    shown = entry.path.replace(".N", ".0")
    lines = [shown, f"  {entry.about}", f"  type     {entry.kind}", f"  default  {entry.default}"]
    if entry.allowed:
        lines.append(f"  allowed  {entry.allowed}")
    lines.append(f"  example  {entry.name}: {entry.example}        or  --set {shlex.quote(f'{shown}={entry.example}')}")
    return "\n".join(lines)
