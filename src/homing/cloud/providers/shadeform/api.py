"""Shadeform's API calls, and functions that interpret its data about an instance.

    types, instances, info, create, update, delete     ssh_keys, add_key, delete_key

All changes are POSTs. Delete and update return 200 with an empty body. They may be repeated, but create may not. This
module makes no decisions. It never calls GET /sshkeys/ID/info, which may return a private key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from homing.cloud.check_numbers import Figures
from homing.cloud.providers.base import InstanceState
from homing.cloud.providers.rest import Api, Unsure, Unwelcome
from homing.cloud.providers.shadeform.auto_delete import Thresholds, moment_of
from homing.cloud.providers.shadeform.offers import SPOT, rate_of

__all__ = ["Account", "detail_of", "is_over", "mark_of", "rate_now", "state_of"]

_LOOKS = 3  # how many times to read back the guard, because a response may be stale
_STATES: dict[str, InstanceState] = {
    "creating": "requested",
    "pending_provider": "requested",
    "pending": "booting",
    "active": "ready",
    # An instance in the state `deleting` is no longer billed, although the machine may take minutes to disappear.
    "deleting": "gone",
    "deleted": "gone",
}


@dataclass
class Account:
    api: Api
    settle_s: float

    # --- instances ---

    def types(self) -> list[dict[str, Any]]:
        return self.api.items("/instances/types?available=true", "instance_types")

    def instances(self) -> list[dict[str, Any]]:
        return self.api.items("/instances", "instances")

    def info(self, instance_id: str) -> dict[str, Any] | None:
        """Return an instance's data, or None only if Shadeform says that there is no such instance."""
        return self.api.find(f"/instances/{_path(instance_id)}/info")

    def create(self, body: dict[str, Any]) -> str:
        """Create an instance and return its id; raises Unsure if it may have been created despite an error."""
        try:
            made = self.api.post("/instances/create", body)
        except Unwelcome as exc:
            # Shadeform reports internal errors with status 409, which does not show whether anything was created.
            if "INTERNAL_SERVER_ERROR" in exc.text:
                raise Unsure(exc.why) from exc
            raise
        if not made.get("id"):
            raise Unsure("Shadeform answered a create call without an id")
        return str(made["id"])

    def update(self, instance_id: str, guard: Thresholds) -> None:
        body = {"auto_delete": guard.auto_delete(), "alert": guard.alert()}
        self.api.post_again(f"/instances/{_path(instance_id)}/update", body)

    def delete(self, instance_id: str) -> None:
        self.api.post_again(f"/instances/{_path(instance_id)}/delete")

    def with_mark(self, mark: str) -> list[dict[str, Any]]:
        """Return the live instances with this mark, oldest first, because the oldest of several duplicates is kept."""
        found = [body for body in self.instances() if mark_of(body) == mark and not is_over(body)]
        return sorted(found, key=lambda body: (moment_of(body.get("created_at")) or 0.0, str(body["id"])))

    def read_back(
        self, instance_id: str, guard: Thresholds, *, is_earlier_fine: bool = False
    ) -> tuple[dict[str, Any] | None, str]:
        """Return the instance, and how its guard differs from `guard` ("" if it does not).

        Retry while responses may be stale.
        """
        body, why = None, ""
        for _ in self._looks():
            body, why = self.info(instance_id), "it is not listed"
            if body is not None:
                why = guard.why_not(body.get("auto_delete"), is_earlier_fine=is_earlier_fine)
            if not why:
                break
        return body, why

    def _looks(self) -> Iterator[int]:
        for look in range(_LOOKS):
            if look:
                self.api.world.sleep(self.settle_s / (_LOOKS - 1))
            yield look

    # --- SSH keys ---

    def ssh_keys(self) -> list[dict[str, Any]]:
        return self.api.items("/sshkeys", "ssh_keys")

    def add_key(self, name: str, public_line: str) -> str:
        """Register a public key and return its id. If Shadeform rejects a duplicate, return the existing key's id."""
        try:
            return str(self.api.post("/sshkeys/add", {"name": name, "public_key": public_line})["id"])
        except (Unsure, Unwelcome, KeyError) as exc:
            known = self.ssh_keys()
            same = [body for body in known if body["name"] == name]
            same += [body for body in known if body["public_key"] == public_line]
            if same:
                return str(same[0]["id"])
            if isinstance(exc, Unwelcome):
                raise
            words = "Shadeform did not accept the SSH key."
            raise Unwelcome(words, f"Its response was unclear: {exc}", "Try again in a minute.") from exc

    def delete_key(self, key_id: str) -> None:
        self.api.post_again(f"/sshkeys/{_path(key_id)}/delete")


# --- interpreting an instance's data ---


def state_of(body: dict[str, Any]) -> InstanceState:
    """Return our name for the instance's state. An undocumented state becomes `unknown` and counts as billing."""
    return _STATES.get(str(body.get("status")), "unknown")


def is_over(body: dict[str, Any]) -> bool:
    return state_of(body) == "gone"


def mark_of(body: dict[str, Any]) -> str:
    """Return the instance's mark from its tags, else from its name, which can be changed in the console."""
    tags = [str(tag) for tag in body.get("tags") or [] if str(tag).startswith("homing-")]
    return tags[0] if tags else str(body.get("name") or "")


def rate_now(body: dict[str, Any], read: Figures) -> Decimal | None:
    """Return the instance's current rate, or None if Shadeform reports no plausible rate."""
    terms = body.get("rental_terms") or {}
    return rate_of(
        read, body.get("hourly_price"), terms.get("hourly_price") if terms.get("rental_type") == SPOT else None
    )


def detail_of(body: dict[str, Any]) -> str:
    status, details = str(body["status"]), str(body.get("status_details") or "")
    if "preempted" in details:
        return "preempted by the provider"
    if status == "deleting":
        return "deleting; no longer billing"
    ending_at = (body.get("rental_terms") or {}).get("ending_at")
    if ending_at and status != "deleted":
        return f"{status}; the provider ends it at {ending_at}"
    return f"{status}: {details}" if details else status


def _path(thing_id: str) -> str:
    return quote(thing_id, safe="")
