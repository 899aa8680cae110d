"""A landed run gets more money: resume from its decayed weights, or from before the decay began?

    landed, resumed          99 steps with their decay, then up to 200 with a new warm-up: no step is discarded
    without a warm-up        the same, starting at the peak rate
    back to before           the decay is discarded: of the 200 paid steps, 180 remain in the model
    never landed             200 steps, as planned

Each pays for 200 steps. Figures are losses on held-out text, per seed. Passes if the way that homing uses is not the
worst.

    python benchmarks/going_on.py [--seeds N]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "lm"), str(ROOT / "benchmarks")]

from steady import SteadyPace  # noqa: E402
from tiny import make_run_dir  # noqa: E402

from _result import write_result  # noqa: E402
from homing.lm.train import apply_landing, loop  # noqa: E402
from homing.lm.train.checkpoints.checkpoint_files import TrainState  # noqa: E402
from homing.lm.train.loop import train  # noqa: E402
from homing.lm.train.stop_requests import ControlRequests  # noqa: E402
from homing.wire.run_json import Schedule  # noqa: E402
from landing import make_data, make_long_run, read_metrics  # noqa: E402

PAID, BACK = 200, 180
DEADLINE_S = 105.5  # in steps of a second: a landing at about half


class _Ticking(ControlRequests):
    seconds = DEADLINE_S

    def left_s(self) -> float | None:
        self.seconds -= 1.0
        return self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Four ways to resume after a landing.")
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(1, parser.parse_args().seeds + 1)
    losses: dict[str, list[float]] = {"landed, went on": [], "without a warm-up": [], "back to before": []}
    losses["never landed"] = []
    with tempfile.TemporaryDirectory(prefix="homing-going-on-") as name:
        folder = Path(name)
        make_data(folder / "data")
        for seed in seeds:
            losses["landed, went on"].append(_trained(folder, seed, "on", is_landed=True))
            losses["without a warm-up"].append(_trained(folder, seed, "cold", is_landed=True, is_warm=False))
            losses["back to before"].append(_trained(folder, seed, "back", num_steps=BACK))
            losses["never landed"].append(_trained(folder, seed, "whole"))
            print(seed, {way: round(found[-1], 4) for way, found in losses.items()}, flush=True)
    means = {way: statistics.fmean(found) for way, found in losses.items()}
    passed = means["landed, went on"] < max(means.values())
    write_result("going_on", {"losses": losses, "means": means}, passed=passed)
    print(f"{'PASS' if passed else 'FAIL'} " + ", ".join(f"{way} {mean:.3f}" for way, mean in means.items()))
    return 0 if passed else 1


def _trained(
    folder: Path, seed: int, name: str, *, num_steps: int = PAID, is_landed: bool = False, is_warm: bool = True
) -> float:
    schedule = Schedule("wsd", 10, num_steps // 5, 0.0)
    run = make_long_run(folder / "data", num_steps, schedule, eval_every=0, save_every=0, batch_tokens=512)
    run_dir = make_run_dir(folder / f"{name}-{seed}", dataclasses.replace(run, seed=seed))
    if is_landed:
        _land(run_dir)
    plain = apply_landing.cancel_landing
    if not is_warm:
        apply_landing.cancel_landing = _go_on_cold
    try:
        train(run_dir, say=lambda line: None)
    finally:
        apply_landing.cancel_landing = plain
    last = read_metrics(run_dir)[-1]
    assert last.val_loss is not None, "the last step is evaluated"
    return last.val_loss


def _land(run_dir: Path) -> None:
    plain = loop.Pace
    loop.Pace = SteadyPace  # type: ignore[misc, assignment, attr-defined]
    try:
        outcome = train(run_dir, say=lambda line: None, requests=_Ticking(run_dir))
    finally:
        loop.Pace = plain  # type: ignore[misc, attr-defined]
    assert "Landed" in outcome.reason, outcome


def _go_on_cold(state: TrainState) -> TrainState:
    return dataclasses.replace(state, landing=None)


if __name__ == "__main__":
    sys.exit(main())
