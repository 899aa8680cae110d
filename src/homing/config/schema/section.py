"""Base class of run file sections, and `key` to declare a key with everything that `homing explain` prints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Section", "key"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def key(about: str, *, default: Any = None, example: Any, derived: str = "", **limits: Any) -> Any:
    """Declare a field with its description. `derived` says where the value comes from if the key is omitted."""
    extra: dict[str, Any] = {"derived": derived}
    if isinstance(default, (list, dict)):
        copy = default
        return Field(
            default_factory=lambda: copy.copy(), description=about, examples=[example], json_schema_extra=extra
        )
    return Field(default, description=about, examples=[example], json_schema_extra=extra, **limits)
