"""A world with a number as its clock and a FakeCloud as its network: a bad hour takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.toy_world import CloudWorld

from homing.cloud.providers.fake.cloud import FakeCloud, FakeOffer, Settings
from homing.cloud.providers.fake.faults import Faults
from homing.cloud.providers.fake.provider import KEY_ENV, URL_ENV

KEY = "key-of-the-account"
OFFERS = [
    FakeOffer("cpu-small", "Some CPU", 0, 2, 8 * 10**9, "0.36"),
    FakeOffer("h100", "H100", 1, 16, 80 * 10**9, "2.49"),
]


@dataclass
class ToyMachines:
    """Records the calls of the cloud. A machine runs until it is ended or a test removes it."""

    running: list[str] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    env: dict[str, dict[str, str]] = field(default_factory=dict)

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        self.calls.append(("start", instance_id, sorted(files), argv))
        self.env[instance_id] = env
        self.running.append(instance_id)

    def end(self, instance_id: str) -> None:
        self.calls.append(("end", instance_id))
        if instance_id in self.running:
            self.running.remove(instance_id)

    def is_running(self, instance_id: str) -> bool:
        return instance_id in self.running

    def notice(self, instance_id: str, seconds: float) -> None:
        self.calls.append(("notice", instance_id, seconds))

    def freeze(self, instance_id: str) -> None:
        self.calls.append(("freeze", instance_id))

    def log(self, instance_id: str) -> str:
        return f"log of {instance_id}"


class FakeWorld(CloudWorld):
    def __init__(self, faults: Faults | None = None, settings: Settings | None = None, seed: int = 0) -> None:
        super().__init__()
        self.key = KEY  # that is set here
        self.machines = ToyMachines()
        self.cloud = FakeCloud(
            now=lambda: self.t,
            machines=self.machines,
            offers=OFFERS,
            api_key=KEY,
            settings=settings,
            faults=faults,
            seed=seed,
        )

    def together(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
        """One after another: the clock is a number, and threads would race for it."""
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(call())
            except Exception as exc:
                answers.append(exc)
        return answers

    def environment(self) -> dict[str, str]:
        return {URL_ENV: "https://cloud.test", KEY_ENV: self.key}

    def asked(self, method: str, path: str = "") -> int:
        """The number of requests of this kind to the cloud."""
        return sum(1 for r in self.requests if r.method == method and path in r.url)
