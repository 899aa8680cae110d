"""Creates exactly one instance per mark on providers whose create call is not idempotent.

    list by mark -> POST -> created
                         -> no clear answer: list again until the list can no longer be stale -> POST once more
                         -> a definite refusal: the adapter interprets it
    after any unclear answer: if several instances have the mark, keep the oldest and destroy the others

If the outcome is still unknown at the end, CreateFailed is raised, with the id of the created instance if it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from homing.cloud.providers.base import Request
from homing.cloud.providers.rest import Unsure, Unwelcome
from homing.errors import CreateFailed, HomingError, ProviderRefused
from homing.world import World

__all__ = ["LOOKS", "TRIES", "Once", "look_for"]

LOOKS = 3  # how many times to look for an instance with our mark while the list may be stale
TRIES = 2


@dataclass(frozen=True)
class Once:
    name: str  # the provider's name
    settle_s: float
    world: World
    find: Callable[[str], list[dict[str, Any]]]  # mark -> the instances with that mark, oldest first
    end: Callable[[str], None]  # destroys the instance with this id
    # ids of duplicates that were created and destroyed, and that incurred charges
    twins: list[str] = field(default_factory=list)

    def create(
        self,
        request: Request,
        post: Callable[[], dict[str, Any]],
        refused: Callable[[Unwelcome, Request], HomingError],
    ) -> dict[str, Any]:
        """Return the provider's data for the instance, whether new or existing; raise CreateFailed if there is none.

        `post` may raise Unsure, and is called at most twice.
        """
        made = next(iter(self.find(request.mark)), None)
        num_unsure = 0
        while made is None and num_unsure < TRIES:
            try:
                made = post()
            except Unsure as exc:
                num_unsure += 1
                made = self._look_for(request.mark, exc)
            except Unwelcome as exc:
                if not num_unsure:
                    raise refused(exc, request) from exc
                # This refusal is inconclusive: the earlier call may still take effect, and may have caused the refusal.
                break
        if made is None:
            raise CreateFailed(
                what=f"{self.name} did not start {request.offer.name}: the create call got no clear answer.",
                why=f"After each try, homing listed the instances {LOOKS} times and found none named {request.mark}.",
                fix=f"Try again: {request.order.words.to('launch')}",
            )
        if num_unsure:
            self._end_duplicates(request.mark, made)
        return made

    def _look_for(self, mark: str, why: Unsure) -> dict[str, Any] | None:
        return look_for(mark, partial(self.find, mark), self.name, why, self.settle_s, self.world)

    def _end_duplicates(self, mark: str, kept: dict[str, Any]) -> None:
        """Destroy duplicates, because a call that seemed lost may have taken effect after the retry."""
        try:
            for body in self.find(mark):
                if body["id"] != kept["id"]:
                    self.twins.append(str(body["id"]))
                    self.end(str(body["id"]))
        except ProviderRefused as exc:
            raise CreateFailed(
                what=f"{self.name} may have started {mark} twice.",
                why=exc.why,
                fix="Check again once the provider responds: homing runs",
                instance_id=str(kept["id"]),
            ) from exc


def look_for(
    mark: str, find: Callable[[], list[dict[str, Any]]], name: str, why: Exception | None, settle_s: float, world: World
) -> dict[str, Any] | None:
    """Return the oldest instance with this mark, or None. Keep looking until the list can no longer be stale.

    `name` is the provider's name, and `why` is the error that left the outcome of the create call unclear.
    """
    for look in range(LOOKS):
        if look:
            world.sleep(settle_s / (LOOKS - 1))
        try:
            found = find()
        except ProviderRefused as exc:  # even a 4xx, because it refuses the list call, not the create call
            raise CreateFailed(
                what=f"{name} may have started {mark}.",
                why=f"{why}. Listing the instances failed too: {exc.why}",
                fix="Check again once the provider responds: homing runs",
            ) from exc
        if found:
            return found[0]
    return None
