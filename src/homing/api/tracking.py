"""Trackers for `launch`, `train`, `watch` and `tensorboard`: which ones to use, and a follower process for each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from homing.api import notices
from homing.trackers.follower import Following, start
from homing.trackers.sinks import URI_ENV, check_tracker, check_uri, mode_of
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["begin", "following", "go_on", "wanted"]

_FOLDER = "trackers"  # a subfolder of the run's local folder


def wanted(trackers: list[str] | None, *, wandb: bool, verb: str) -> list[str]:
    """Return the trackers without duplicates.

    Before anything starts, raise an error if one is unknown, not installed or unreachable.
    """
    names = list(dict.fromkeys([*(trackers or []), *(["wandb"] if wandb else [])]))
    for name in names:
        check_tracker(name, verb=verb)
    if "mlflow" in names:
        check_uri(os.environ.get(URI_ENV, ""))
    if "wandb" in names and mode_of(dict(os.environ)) == "offline":
        notices.say("No W&B key (WANDB_API_KEY): logging offline; upload later with `wandb sync`.")
    return names


def following(
    tracker: str,
    home: Path,
    run_id: str,
    name: str | None,
    *,
    run: Run | None = None,
    store: str = "",
    run_dir: str = "",
) -> Following:
    return Following(
        tracker=tracker,
        run_id=run_id,
        name=name or run_id,
        folder=str(home / "runs" / run_id / _FOLDER),
        files=str(home),
        run_dir=run_dir,
        store=store,
        config=_config(run) if run is not None else {},
    )


def begin(each: Following, world: World) -> None:
    """Start a follower process. If it cannot be started, print a warning; the run continues."""
    try:
        if start(each, world):
            notices.say(f"Logging to {each.tracker} from this computer until the run ends: {each.path('log')}")
    except OSError as exc:
        notices.say(f"warning: not logging to {each.tracker}: {exc}")


def go_on(home: Path, run_id: str, world: World) -> None:
    """Restart follower processes that were requested earlier and died when the computer was shut down."""
    folder = home / "runs" / run_id / _FOLDER
    orders = [name for name in world.listdir(folder) if name.endswith(".order")] if world.exists(folder) else []
    for name in orders:
        begin(Following(**json.loads(world.read(folder / name))), world)


def _config(run: Run) -> dict[str, Any]:
    """Return the settings that users compare between runs."""
    first = run.phases[0]
    return {
        "family": run.model.family,
        "layers": run.model.num_layers,
        "width": run.model.width,
        "context": run.model.context,
        "vocab_size": run.model.vocab_size,
        "num_params": run.sizes.num_params,
        "phases": "+".join(phase.kind for phase in run.phases),
        "batch_tokens": first.batch_tokens,
        "seed": run.seed,
    }
