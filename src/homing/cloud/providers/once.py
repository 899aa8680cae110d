"""One create call under one mark, at providers that would start two: look first, ask, and after no clear answer look.

    look for the mark -> POST -> made
                              -> no clear answer: look again and again while the list may be late -> POST once more
                              -> a clear no: the adapter says what it means
    after any unclear answer: of two under one mark the older stays

Whatever is not known at the end is said, with the id of what was made where there is one.
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

LOOKS = 3  # for our mark, over the time by which the list may be late
TRIES = 2


@dataclass(frozen=True)
class Once:
    name: str  # of the provider
    settle_s: float
    world: World
    find: Callable[[str], list[dict[str, Any]]]  # what lives under a mark, the oldest first
    end: Callable[[str], None]  # by id
    twins: list[str] = field(default_factory=list)  # made beside the one that is kept, and ended: they have billed

    def create(
        self,
        request: Request,
        post: Callable[[], dict[str, Any]],
        refused: Callable[[Unwelcome, Request], HomingError],
    ) -> dict[str, Any]:
        """The provider's own words about the one that is there now. `post` may raise Unsure; called twice at most."""
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
                break  # no clear no: the call before may still take effect, and be what this one was refused for
        if made is None:
            raise CreateFailed(
                what=f"{self.name} did not start {request.offer.name}: asked {TRIES} times, it gave no clear answer.",
                why=f"Its list was looked at {LOOKS} times in between and showed nothing under {request.mark}.",
                fix=f"Try again: {request.order.words.to('launch')}",
            )
        if num_unsure:
            self._end_twins(request.mark, made)
        return made

    def _look_for(self, mark: str, why: Unsure) -> dict[str, Any] | None:
        return look_for(mark, partial(self.find, mark), self.name, why, self.settle_s, self.world)

    def _end_twins(self, mark: str, kept: dict[str, Any]) -> None:
        """A call that seemed lost may have taken effect after we asked again."""
        try:
            for body in self.find(mark):
                if body["id"] != kept["id"]:
                    self.twins.append(str(body["id"]))
                    self.end(str(body["id"]))
        except ProviderRefused as exc:
            raise CreateFailed(
                what=f"Whether {self.name} started {mark} twice is not known.",
                why=exc.why,
                fix="homing runs   shows it as soon as the provider answers",
                instance_id=str(kept["id"]),
            ) from exc


def look_for(
    mark: str, find: Callable[[], list[dict[str, Any]]], name: str, why: Exception | None, settle_s: float, world: World
) -> dict[str, Any] | None:
    """The oldest that lives under a mark after no clear answer (`why`), while the list of `name` may be late."""
    for look in range(LOOKS):
        if look:
            world.sleep(settle_s / (LOOKS - 1))
        try:
            found = find()
        except ProviderRefused as exc:  # also a 4xx: it is the list that was refused, not the create
            raise CreateFailed(
                what=f"Whether {name} started {mark} is not known.",
                why=f"{why}. Then: {exc.why}",
                fix="homing runs   shows it as soon as the provider answers",
            ) from exc
        if found:
            return found[0]
    return None
