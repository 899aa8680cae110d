"""One section of the run file, and one key of it with all that `homing explain` prints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Section", "key"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def key(about: str, *, default: Any = None, example: Any, derived: str = "", **limits: Any) -> Any:
    """A field with all that `explain` prints. `derived` says where the value comes from when the key is left out."""
    extra: dict[str, Any] = {"derived": derived}
    if isinstance(default, (list, dict)):
        copy = default
        return Field(
            default_factory=lambda: copy.copy(), description=about, examples=[example], json_schema_extra=extra
        )
    return Field(default, description=about, examples=[example], json_schema_extra=extra, **limits)
