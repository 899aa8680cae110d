"""Several accounts behind one address: the key selects the account, and account B shows nothing that A rents.

An account may have several keys, as after a rotation; each is put in the place of the one that its cloud knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from homing.world import HttpRequest, HttpResponse

__all__ = ["Accounts"]


class Accounts:
    """Replaces the cloud of a world. `clouds`: key -> the cloud of its account, and the key that it knows."""

    def __init__(self, header: str, clouds: Mapping[str, tuple[Any, str]]) -> None:
        self._header, self._clouds = header, dict(clouds)

    def handle(self, request: HttpRequest) -> HttpResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        start, _, given = headers.get(self._header, "").rpartition(" ")
        cloud, known = self._clouds[given]
        headers[self._header] = f"{start} {known}".strip()
        answer: HttpResponse = cloud.handle(dataclasses.replace(request, headers=headers))
        return answer

    def tick(self) -> None:
        for cloud, _ in self._clouds.values():
            cloud.tick()
