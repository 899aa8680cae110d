"""Explain a key or a section of the run file, or return the JSON schema of the run file for editors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from homing.api import notices
from homing.errors import UsageError

__all__ = ["Explained", "explain_key", "run_file_schema"]


@dataclass(frozen=True)
class Explained:
    keys: list[Any]  # entries of homing.config.schema.keys
    section: str | None = None  # set if `keys` lists all keys of one section
    sections: dict[str, str] | None = None  # set if `keys` lists the keys of every section

    @property
    def about(self) -> str:
        from homing.config.schema.keys import sections

        return sections()[self.section] if self.section is not None else ""

    def to_dict(self) -> dict[str, Any]:
        keys = [vars(entry) for entry in self.keys]
        if self.sections is not None:
            return {"sections": self.sections, "keys": keys}
        if self.section is not None:
            return {"section": self.section, "about": self.about, "keys": keys}
        return {"keys": keys}


def explain_key(key: str | None = None) -> Explained:
    """Return the keys for a path, the last part of a path, a section, or another trainer's key name; None: all keys."""
    from homing.config.schema.keys import all_keys, find_keys, sections

    if key is None:
        return Explained(list(all_keys().values()), sections=sections())
    section = _section(key)
    if section is not None:
        return Explained([entry for entry in all_keys().values() if entry.section == section], section)
    return Explained(find_keys(key) or _by_other_name(key))


def run_file_schema() -> dict[str, Any]:
    """Return the JSON schema of the run file, with which an editor completes keys and marks mistakes.

    It accepts whatever a run file may contain: numbers with units as strings (2B, 30m, $12.00), and one string
    instead of a list. It checks less than `homing verify`: neither rules that involve two keys nor numbers in strings.
    """
    from pydantic.json_schema import GenerateJsonSchema

    from homing.config.schema.run_file import RunFile

    class AsWritten(GenerateJsonSchema):
        """JSON schema of the values that a person writes, not of those that the validators return."""

        def function_before_schema(self, schema: Any) -> dict[str, Any]:
            inner = super().function_before_schema(schema)
            types = {each.get("type") for each in inner.get("anyOf", [inner])}
            if types & {"integer", "number"}:
                return {"anyOf": [inner, {"type": "string"}]}
            return {"anyOf": [inner, {"type": "string" if "array" in types else "boolean"}]}

    return {
        "$schema": AsWritten.schema_dialect,
        **RunFile.model_json_schema(schema_generator=AsWritten),
        "title": "homing run file",
    }


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
        notices.say(f"In homing, {key} is called {FOREIGN[last].replace('phases.N.', 'phases.0.')}.\n")
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
