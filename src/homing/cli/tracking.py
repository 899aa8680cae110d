"""What `launch`, `train`, `watch` and `tensorboard` share about trackers: which are wanted, and a follower for each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from homing.cli import talk
from homing.trackers.base import check_tracker
from homing.trackers.start import Following, start
from homing.trackers.to_mlflow import URI_ENV, check_uri
from homing.trackers.to_wandb import mode_of
from homing.wire.run import Run
from homing.world import World

__all__ = ["begin", "following", "go_on", "wanted"]

_FOLDER = "trackers"  # in the run's folder at home


def wanted(trackers: list[str] | None, *, wandb: bool, verb: str) -> list[str]:
    """Without doubles; refused before anything starts if one is unknown, not installed or not to be reached."""
    names = list(dict.fromkeys([*(trackers or []), *(["wandb"] if wandb else [])]))
    for name in names:
        check_tracker(name, verb=verb)
    if "mlflow" in names:
        check_uri(os.environ.get(URI_ENV, ""))
    if "wandb" in names and mode_of(dict(os.environ)) == "offline":
        talk.say("W&B has no key here (WANDB_API_KEY): it is recorded offline, and `wandb sync` sends it later.")
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
    """Never in the way: a follower that cannot be started is a warning, and the run goes on."""
    try:
        if start(each, world):
            talk.say(f"{each.tracker} is told, from here, until the run ends: {each.path('log')}")
    except OSError as exc:
        talk.say(f"warning: {each.tracker} is not told: {exc}")


def go_on(home: Path, run_id: str, world: World) -> None:
    """Followers that were asked for once and died with a computer that was shut down."""
    folder = home / "runs" / run_id / _FOLDER
    orders = [name for name in world.listdir(folder) if name.endswith(".order")] if world.exists(folder) else []
    for name in orders:
        begin(Following(**json.loads(world.read(folder / name))), world)


def _config(run: Run) -> dict[str, Any]:
    """What a person compares runs by."""
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
