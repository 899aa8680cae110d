"""A world with a number as its clock and a RunpodDouble as its network: a bad hour takes milliseconds.

`ssh` is answered as a pod would answer it that runs our startup script: it takes what is handed over, and says what its
own key may do. `ssh-keygen` is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.doubles.runpod import RunpodDouble
from tests.doubles.toy_world import CloudWorld

from homing.cloud.machine_setup import receive_hand_over
from homing.world import Completed, HttpRequest, HttpResponse

KEY = "rpa_canary-key-of-the-account"
URL = "https://runpod.test/v2"


@dataclass
class ToyPods:
    """Remembers what was done with them. A pod runs until it is ended or a test says that it died."""

    running: list[str] = field(default_factory=list)
    argv: dict[str, list[str]] = field(default_factory=dict)
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=lambda: ["homing: ready; waiting for the hand-over"])
    has_address: bool = True

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        self.running.append(instance_id)
        self.argv[instance_id], self.env[instance_id] = argv, env

    def end(self, instance_id: str) -> None:
        if instance_id in self.running:
            self.running.remove(instance_id)

    def is_running(self, instance_id: str) -> bool:
        return instance_id in self.running

    def notice(self, instance_id: str, seconds: float) -> None:
        pass

    def freeze(self, instance_id: str) -> None:
        pass

    def log(self, instance_id: str) -> str:
        return "\n".join(self.lines)

    def address(self, instance_id: str) -> tuple[str, str, int] | None:
        return ("root", "203.0.113.7", 34446) if self.has_address else None


class RunpodWorld(CloudWorld):
    def __init__(self, faults: Faults | None = None, settings: Settings | None = None, seed: int = 0) -> None:
        super().__init__()
        self.handed: list[dict[str, Any]] = []  # orders that came in by ssh
        self.commands: list[list[str]] = []
        self.may_end = "yes: REST v2"
        self.env = {"RUNPOD_API_URL": URL, "RUNPOD_API_KEY": KEY, "HOME": "/nonexistent"}
        self.pods = ToyPods()
        self.cloud = RunpodDouble(
            now=lambda: self.t, machines=self.pods, api_key=KEY, faults=faults, settings=settings, seed=seed
        )

    def environment(self) -> dict[str, str]:
        return dict(self.env)

    def stream(self, request: HttpRequest, seconds: float) -> HttpResponse:
        self.pass_time(request.timeout_s)
        return self.http(request)

    def run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
    ) -> Completed:
        if argv[0] != "ssh":
            return super().run(argv, timeout_s, env, stdin)
        self.commands.append(list(argv))
        if not self.pods.running:
            return Completed(255, "", "ssh: connect to host 203.0.113.7 port 34446: Connection refused")
        if "may_end" in argv[-1]:
            return Completed(0, f"{self.may_end}\n" if self.may_end else "", "")
        self.handed.append(json.loads(stdin)["order"])
        return Completed(0, f'\n{receive_hand_over.SIGN}{{"state": "done"}}\n', "")

    def asked(self, method: str, path: str = "") -> int:
        """How many requests of a kind reached for the cloud."""
        return sum(1 for r in self.requests if r.method == method and path in r.url)
