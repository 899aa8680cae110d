"""Ten thousand bad days in minutes: the real client, guard and agent against a cloud that misbehaves, in virtual time.

    python benchmarks/simulate.py [--schedules 10000] [--seed 0] [--quick] [--provider NAME]
    python benchmarks/simulate.py --replay SEED        one of them again, with every call of every process

A schedule is drawn from its seed: what goes wrong (lost answers, 5xx, 429, no capacity, late and failing lists, deletes
that fail or lie, preemption, hung machines, clocks, cut lines, full disks, ill stores, kill -9 of any process at any
call, a laptop that sleeps or never comes back) and what the person does. Invariants are checked at every change of the
cloud, the ledger and the store; at the end the person tidies up with the real verbs.

`--provider` plays them with the real adapter of one of the four clouds against its double; each has a proof of its own.

Passes with 0 leaked, 0 doubled, never "gone" while billed, no wait without a deadline, no receipt below the bill, and 0
over the limit in every schedule where one armed guard lived.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from tests.sim.schedule import Verdict, play  # noqa: E402
from tests.sim.stage import CLOUDS, pace  # noqa: E402

from _result import write_proof  # noqa: E402

QUICK = 120
FULL = {"fake": 10_000}  # schedules that make the proof; for other providers
FULL_CLOUD = 1000
MAX_SECONDS = 900.0  # for the ten thousand of the fake cloud, on two cores
LEAST_LAUNCHED = 0.6
_PER_TASK = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, help="with as many as without this, or more, the figures are kept")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} schedules; nothing is kept")
    parser.add_argument("--provider", choices=CLOUDS, default="fake", help="the provider to simulate")
    parser.add_argument("--replay", type=int, metavar="SEED", help="one schedule, with its trace on stderr")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay, arguments.provider)
    provider, full = arguments.provider, FULL.get(arguments.provider, FULL_CLOUD)
    num = QUICK if arguments.quick else arguments.schedules or full
    began = time.monotonic()
    verdicts = list(run_all(range(arguments.seed, arguments.seed + num), provider))
    seconds = time.monotonic() - began
    figures = summary(verdicts, seconds)
    # What two idle cores would take; this figure is judged, not the wall time here.
    figures["two_core_seconds"] = round(_cpu_seconds() / 2, 1)
    show(figures)
    broken = [verdict for verdict in verdicts if verdict.broken]
    for verdict in broken[:20]:
        print(f"BROKEN seed {verdict.seed}: {verdict.broken}\n    {', '.join(verdict.kinds)}")
        print(f"    python benchmarks/simulate.py --provider {provider} --replay {verdict.seed}")
    is_alive = figures["launched"] >= LEAST_LAUNCHED * num  # days on which nothing was rented prove nothing
    in_time = provider != "fake" or seconds <= MAX_SECONDS
    passed = not broken and is_alive and figures["unannounced"] == 0 and in_time
    if num >= full:
        write_proof("simulate" if provider == "fake" else f"simulate_{provider}", figures, passed=passed)
    print(f"{'PASS' if passed else 'FAIL'} {num:,} schedules in {seconds:.0f} s, {len(broken)} broken")
    return 0 if passed else 1


def run_all(seeds: range, provider: str) -> Iterator[Verdict]:
    """On every core; the order of the answers is that of the seeds."""
    context = multiprocessing.get_context("fork")
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(functools.partial(_play, provider), seeds, chunksize=_PER_TASK)
        pool.close()
        pool.join()


def _cpu_seconds() -> float:
    """Of the workers, which have ended by now, and of this process."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _play(provider: str, seed: int) -> Verdict:
    with pace():
        return play(seed, provider=provider)


def replay(seed: int, provider: str) -> int:
    err = sys.stderr  # the stage keeps what programs print to itself
    with pace():
        verdict = play(seed, trace=lambda line: print(line, file=err), provider=provider)
    print(f"{', '.join(verdict.kinds)}\n{verdict.where}")
    print(f"{'FAIL' if verdict.broken else 'PASS'} seed {seed}: {verdict.broken or verdict.outcome}")
    return 1 if verdict.broken else 0


def summary(verdicts: list[Verdict], seconds: float) -> dict[str, Any]:
    unguarded = [verdict for verdict in verdicts if verdict.is_unguarded]
    return {
        "schedules": len(verdicts),
        "seconds": round(seconds, 1),
        "schedules_per_s": round(len(verdicts) / seconds, 1),
        "virtual_hours": round(sum(verdict.seconds for verdict in verdicts) / 3600, 1),
        "world_calls": sum(verdict.num_calls for verdict in verdicts),
        "broken": sum(1 for verdict in verdicts if verdict.broken),
        "launched": sum("launch: exit 0" in verdict.counts for verdict in verdicts),
        "all_guards_died": len(unguarded),
        "unannounced": sum(1 for verdict in unguarded if not verdict.is_announced),
        "outcomes": dict(sorted(Counter(verdict.outcome for verdict in verdicts).items())),
        "kinds": dict(Counter(kind for verdict in verdicts for kind in verdict.kinds).most_common()),
        "ends": dict(Counter(end for verdict in verdicts for end in verdict.counts).most_common()),
    }


def show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            print(name)
            for kind, count in value.items():
                print(f"    {count:7,}  {kind}")
        else:
            print(f"{name:<18} {value:>12,}")


if __name__ == "__main__":
    sys.exit(main())
