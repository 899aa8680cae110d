"""A thousand races of two clients on one run: exactly one owner each, and never two machines.

    python benchmarks/races.py [--races 1000] [--seed 0] [--quick]
    python benchmarks/races.py --replay SEED

Two homes that share a store, or two processes of one home, launch, resume, destroy and adopt at once in the simulator;
the seed interleaves their calls. Passes when no lease number has two owners, at most one home takes the run for its own
afterwards, at most one of two launches succeeds, and nothing is left when both have tidied up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from tests.sim.races import Raced, race  # noqa: E402
from tests.sim.stage import pace  # noqa: E402

from _result import write_proof  # noqa: E402

QUICK = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} races; nothing is kept")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one race, with its trace on stderr")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay)
    num = QUICK if arguments.quick else arguments.races
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        raced = pool.map(_race, range(arguments.seed, arguments.seed + num), chunksize=10)
    figures = summary(raced, time.monotonic() - began)
    for name, value in figures.items():
        print(f"{name:<14} {value}")
    broken = [each for each in raced if each.broken]
    for each in broken[:20]:
        print(f"BROKEN {each.kind}: {each.broken}\n    python benchmarks/races.py --replay {each.seed}")
    passed = not broken and figures["most_machines_at_once"] == 1
    if not arguments.quick:
        write_proof("races", figures, passed=passed)
    print(f"{'PASS' if passed else 'FAIL'} {num:,} races, {len(broken)} broken")
    return 0 if passed else 1


def _race(seed: int) -> Raced:
    with pace():
        return race(seed)


def replay(seed: int) -> int:
    err = sys.stderr
    with pace():
        raced = race(seed, trace=lambda line: print(line, file=err))
    print(raced.where)
    print(f"{'FAIL' if raced.broken else 'PASS'} {raced.kind}: {raced.broken or 'one owner'}")
    return 1 if raced.broken else 0


def summary(raced: list[Raced], seconds: float) -> dict[str, Any]:
    return {
        "races": len(raced),
        "seconds": round(seconds, 1),
        "broken": sum(1 for each in raced if each.broken),
        "most_machines_at_once": max(each.most_live for each in raced),
        "kinds": dict(sorted(Counter(each.kind for each in raced).items())),
    }


if __name__ == "__main__":
    sys.exit(main())
