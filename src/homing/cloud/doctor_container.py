"""Questions about containers on this computer: does Docker's engine answer, and how did the last `training` end.

Nobody needs Docker to rent a machine; `homing image build` does, and leaves a container that died where its log is.
"""

from __future__ import annotations

from homing.cloud.checks import Check, ok, skipped, warning
from homing.cloud.examined import Examined
from homing.cloud.image import CONTAINER

__all__ = ["check_container"]

_ASK_S = 20.0
_PAGE = "docs/image.md"
_STATUS = ["docker", "ps", "--all", "--filter", f"name=^{CONTAINER}$", "--format", "{{.Status}}"]


def check_container(examined: Examined) -> list[Check]:
    world = examined.home.world
    if world.run(["docker", "--version"], timeout_s=_ASK_S).code:
        return [skipped("container.engine", "Docker is not here; only `homing image build` needs it.", page=_PAGE)]
    shown = world.run(_STATUS, timeout_s=_ASK_S)
    if shown.code:
        said = (shown.err.strip().splitlines() or ["no answer"])[-1]
        fix = "sudo systemctl start docker   or, without the right: sudo usermod -aG docker $USER, and log in again"
        return [skipped("container.engine", f"Docker's engine cannot be asked: {said}", fix, _PAGE)]
    status = shown.out.strip()
    if status.startswith("Exited") and not status.startswith("Exited (0)"):
        text = f"The container `{CONTAINER}` here died: {status}."
        fix = f"docker logs {CONTAINER}   then by hand: docker run -it IMAGE bash, and again: homing image build RUN"
        return [warning("container.training", text, fix, _PAGE)]
    return [ok("container.engine", f"Docker's engine answers; `{CONTAINER}` is {status.lower() or 'not there'}.")]
