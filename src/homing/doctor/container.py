"""Checks of containers on this computer: does Docker's engine answer, and how did the last `training` container end.

Renting a machine does not need Docker; `homing image build` does, and keeps a dead container for its log.
"""

from __future__ import annotations

from homing.cloud.launch.container_image import CONTAINER
from homing.doctor.check import Check, ok, skipped, warning
from homing.doctor.subject import Examined

__all__ = ["check_container"]

_ASK_S = 20.0
_PAGE = "docs/guides/image.md"
_STATUS = ["docker", "ps", "--all", "--filter", f"name=^{CONTAINER}$", "--format", "{{.Status}}"]


def check_container(examined: Examined) -> list[Check]:
    world = examined.home.world
    if world.run(["docker", "--version"], timeout_s=_ASK_S).code:
        return [skipped("container.engine", "Docker is not installed; only `homing image build` needs it.", page=_PAGE)]
    shown = world.run(_STATUS, timeout_s=_ASK_S)
    if shown.code:
        said = (shown.err.strip().splitlines() or ["no answer"])[-1]
        fix = "sudo systemctl start docker   or, without permission: sudo usermod -aG docker $USER, and log in again"
        return [skipped("container.engine", f"Cannot reach the Docker engine: {said}", fix, _PAGE)]
    status = shown.out.strip()
    if status.startswith("Exited") and not status.startswith("Exited (0)"):
        text = f"The container `{CONTAINER}` failed: {status}."
        fix = f"docker logs {CONTAINER}   then manually: docker run -it IMAGE bash, and retry: homing image build RUN"
        return [warning("container.training", text, fix, _PAGE)]
    return [ok("container.engine", f"The Docker engine is running; `{CONTAINER}` is {status.lower() or 'absent'}.")]
