"""`homing explain [KEY]`: print the description of a run file key from the schema."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

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
    json_: Json = False,
) -> None:
    """Explain a key of the run file. Without a key, list all sections and keys."""
    from homing.config.schema.keys import all_keys, find_keys, sections

    if key is None:
        _show_all()
        return
    section = _section(key)
    if section is not None:
        found = [entry for entry in all_keys().values() if entry.section == section]
        output.emit("explain/1", {"section": section, "about": sections()[section], "keys": [vars(k) for k in found]})
        if not output.is_json():
            print(f"{section}: {sections()[section]}\n")
        _table(found)
        output.say(f"\nExplain one of them: homing explain {found[0].path.replace('.N.', '.0.')}")
        return
    found = find_keys(key) or _by_other_name(key)
    output.emit("explain/1", {"keys": [vars(entry) for entry in found]})
    if not output.is_json():
        print("\n\n".join(_words(entry) for entry in found))


def _section(key: str) -> str | None:
    """Return the section for a path (phases.0.data.chat, also without the index) or a unique last part (runpod).

    None if a key, or more than one section, matches.
    """
    from homing.config.schema.keys import find_keys, sections

    parts = [part for part in key.replace("[", ".").replace("]", "").rstrip(".:").split(".") if part]
    plain = ".".join(part for part in parts if not part.isdigit() and part != "N")
    by_name = {name.replace(".N", ""): name for name in sections() if name}
    if plain in by_name or find_keys(key):
        return by_name.get(plain)
    inner = [name for path, name in by_name.items() if path.endswith(f".{plain}")]
    return inner[0] if len(inner) == 1 else None


def _by_other_name(key: str) -> list[Any]:
    """Resolve another trainer's name for a key. Otherwise raise UsageError with the nearest key."""
    from homing.config.parse.key_suggestions import FOREIGN, suggest_key
    from homing.config.schema.keys import find_keys

    last = key.split(".")[-1].lower().replace("-", "_")
    if last in FOREIGN:
        ours = FOREIGN[last].split(" ")[0]
        output.say(f"In homing, {key} is called {FOREIGN[last].replace('phases.N.', 'phases.0.')}.\n")
        if found := find_keys(ours):
            return found
    path = tuple(
        int(part) if part.isdigit() else part for part in key.replace("[", ".").replace("]", "").split(".") if part
    )
    why = suggest_key(path or ("",))
    words = why.rstrip("?.").split() if why.startswith(("Did you mean ", "It belongs to ")) else []
    meant = next((word for word in words if find_keys(word) or _section(word)), "")
    raise UsageError(
        what=f"Unknown run file key: {key!r}.",
        why=why,
        fix=f"homing explain {meant}".strip() + "   List all sections and keys: homing explain" * bool(meant),
    )


def _show_all() -> None:
    from homing.config.schema.keys import all_keys, sections

    document = {"sections": sections(), "keys": [vars(entry) for entry in all_keys().values()]}
    output.emit("explain/1", document)
    if output.is_json():
        return
    for section, about in sections().items():
        inside = [entry.name for entry in all_keys().values() if entry.section == section]
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
