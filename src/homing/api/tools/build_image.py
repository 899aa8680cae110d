"""Build and push a container image with the tested package versions, using your own Docker: `homing image build`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.api import notices
from homing.cloud.launch.build_image import BASE, Built, Context, build, check_name, write_context
from homing.config import load_run
from homing.config.load import as_typed
from homing.world import World

__all__ = ["BASE", "BuiltImage", "build_image"]


@dataclass(frozen=True)
class BuiltImage:
    context: Context
    image: str
    built: Built | None  # None if Docker was not run
    run: str  # as the user would type it

    def to_dict(self) -> dict[str, Any]:
        built = self.built
        return {
            "folder": str(self.context.folder),
            "base": self.context.base,
            "lock_sha256": self.context.lock_sha256,
            "image": self.image,
            "id": built.id if built else None,
            "pushed": built.pinned if built and built.digest else None,
        }


def build_image(
    run: str,
    *,
    push: str | None = None,
    no_docker: bool = False,
    base: str | None = None,
    folder: Path | None = None,
    sets: Sequence[str] = (),
) -> BuiltImage:
    """Write a Dockerfile for a run, build and test the image, and push it under the name `push`. Rents nothing."""
    image = check_name(push) if push else ""
    loaded = load_run(run, list(sets))
    notices.say_problems(loaded.warnings)
    name, world = loaded.run.name, World()
    image = image or f"homing-{name}"
    context = write_context(loaded.run, folder or Path("image") / name, world, base=base or BASE)
    notices.say(f"Wrote {context.folder}/Dockerfile: {context.num_packages} packages on {context.base}")
    built = None if no_docker else build(context, image, world, is_pushed=push is not None, notify=notices.listener())
    return BuiltImage(context, image, built, f"{name}{as_typed(list(sets))}")
