"""Every point of the life of a run, struck once: killed there, and in a second pass, failed there. Then recovered.

    python benchmarks/kill_points.py [--quick] [--only simulated [--provider NAME] [--sample N] | --only NAME]
    python benchmarks/kill_points.py --replay STORY ROLE WHICH CALL kill|fail      one of them again, with its trace

Simulated: launch, watch, recovery, landing and destroy, each process in them, its 1st, 2nd, ... last call that could
have changed anything, on the fake cloud and on the four clouds' doubles. Real: kill -9 of real processes, on these and
on `local` and over SSH on loopback, at points spread over a launch and at random moments of the instance's life.

Passes with 0 leaked, 0 doubled, nothing hidden, no receipt below the bill, and every run recoverable. The parts may be
run one by one: each is stored in the proof with its own commit and date, and the proof passes when
every part is there and passed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from tests.e2e.real_kills import PROVIDERS, is_here, strikes  # noqa: E402
from tests.sim.stage import CLOUDS, pace  # noqa: E402
from tests.sim.stories import SAME_EVERYWHERE, Point, Struck, points, strike  # noqa: E402
from tests.sim.stories import strikes as strikes_of  # noqa: E402

from _result import PROOFS, origin, write_proof  # noqa: E402

REAL_POINTS = 45  # on each provider
LEAST_REAL = 40
LEAST_SIMULATED = 2500  # fewer would mean that a story is not played to its end
NEEDED = (*(f"simulated {cloud}" for cloud in CLOUDS), *PROVIDERS)
QUICK_EVERY = 97  # prime, so that the points that are taken do not fall on the same call of every loop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK_EVERY}th simulated point; nothing is kept")
    parser.add_argument("--only", choices=("simulated", *PROVIDERS), help="a NAME: kill -9 of real processes on it")
    parser.add_argument("--provider", choices=CLOUDS, help="of the simulated ones only those on this cloud")
    parser.add_argument("--sample", type=int, default=1, help="of trainer and sync, the same on every cloud: each Nth")
    parser.add_argument("--replay", nargs=5, metavar=("STORY", "ROLE", "WHICH", "CALL", "KIND"))
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(*arguments.replay, provider=arguments.provider or "fake")
    figures: dict[str, Any] = {}
    broken = []
    for cloud in clouds_of(arguments):
        broken += simulated(cloud, figures, QUICK_EVERY if arguments.quick else 1, arguments.sample)
    for provider in providers_of(arguments):
        if is_here(provider):
            broken += real(provider, figures)
        else:
            print(f"left out: this machine lacks what {provider} needs")
    show(figures)
    for line in broken[:30]:
        print(line)
    passed = not broken
    num = sum(part["points"] for part in figures.values())
    said = f"{num:,} points struck, {len(broken)} broken"
    if not arguments.quick:
        proof = {**kept_parts(), **{name: {**part, **origin()} for name, part in figures.items()}}
        lacking = [name for name in (*NEEDED, *proof) if not is_proved(name, proof.get(name))]
        write_proof("kill_points", proof, passed=not lacking)
        passed = passed and (not lacking or bool(arguments.only or arguments.provider))
        said += f"; the proof lacks {', '.join(lacking)}" if lacking else "; every part of the proof holds"
    print(f"{'PASS' if passed else 'FAIL'} {said}")
    return 0 if passed else 1


def clouds_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Where points are struck in the simulator."""
    if arguments.only not in (None, "simulated"):
        return ()
    if arguments.provider:
        return (arguments.provider,)
    return ("fake",) if arguments.quick else CLOUDS


def providers_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Where real processes are killed."""
    if arguments.only in PROVIDERS:
        return (arguments.only,)
    return () if arguments.only or arguments.provider or arguments.quick else PROVIDERS


def kept_parts() -> dict[str, Any]:
    """Returns the parts that the proof file already has, each with its own commit."""
    try:
        figures = json.loads((PROOFS / "kill_points.json").read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError):
        return {}
    return {name: part for name, part in figures.items() if name in NEEDED}


def is_proved(name: str, part: dict[str, Any] | None) -> bool:
    least = LEAST_SIMULATED if name.startswith("simulated") else LEAST_REAL
    return part is not None and part["broken"] == 0 and part["points"] >= least


def simulated(cloud: str, figures: dict[str, Any], every: int, sample: int) -> list[str]:
    began = time.monotonic()
    with pace():
        found = strikes_of(cloud)
    same = [(point, kind) for point, kind in found if point.role in SAME_EVERYWHERE]
    kept = [(point, kind) for point, kind in found if point.role not in SAME_EVERYWHERE] + same[::sample]
    tasks = [(point, kind, cloud) for point, kind in kept]
    struck = list(strike_all(tasks[::every]))
    whole = {"of": len(found), "trainer_and_sync_every": sample}
    figures[f"simulated {cloud}"] = {**summary(struck, time.monotonic() - began), **whole}
    said = []
    for each in [each for each in struck if each.broken]:
        p = each.point
        said += [
            f"BROKEN {each.kind} {p.story}: {p.role} {p.which}, call {p.call} ({p.name.strip()}): {each.broken}",
            "    python benchmarks/kill_points.py"
            f" --provider {cloud} --replay {p.story} {p.role} {p.which} {p.call} {each.kind}",
        ]
    return said


def real(provider: str, figures: dict[str, Any]) -> list[str]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        struck = list(strikes(provider, REAL_POINTS, Path(folder)))
    figures[provider] = {
        "points": sum(1 for each in struck if each.what != "a whole trip"),
        "trips": sum(1 for each in struck if each.what == "a whole trip"),
        "seconds": round(time.monotonic() - began, 1),
        "broken": sum(1 for each in struck if each.broken),
    }
    return [f"BROKEN {each.provider}, {each.what}: {each.broken}" for each in struck if each.broken]


def _points(story: str, cloud: str) -> list[Point]:
    with pace():
        return points(story, cloud)


def strike_all(tasks: list[tuple[Point, str, str]]) -> Iterator[Struck]:
    context = multiprocessing.get_context("fork")
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(_strike, tasks, chunksize=10)


def _strike(task: tuple[Point, str, str]) -> Struck:
    point, kind, cloud = task
    with pace():
        return strike(point, kind, provider=cloud)


def replay(story: str, role: str, which: str, call: str, kind: str, *, provider: str) -> int:
    wanted = [p for p in _points(story, provider) if (p.role, p.which, p.call) == (role, int(which), int(call))]
    if not wanted:
        print(f"FAIL there is no such point in {story}")
        return 1
    err = sys.stderr
    with pace():
        struck = strike(wanted[0], kind, trace=lambda line: print(line, file=err), provider=provider)
    print(struck.where)
    print(f"{'FAIL' if struck.broken else 'PASS'} {struck.broken or 'recovered'}")
    return 1 if struck.broken else 0


def summary(struck: list[Struck], seconds: float) -> dict[str, Any]:
    return {
        "points": len(struck),
        "seconds": round(seconds, 1),
        "not_reached": sum(1 for each in struck if not each.was_hit),
        "broken": sum(1 for each in struck if each.broken),
        "by_story": dict(Counter(f"{each.kind} {each.point.story}" for each in struck)),
        "by_role": dict(Counter(f"{each.kind} {each.point.role}" for each in struck)),
    }


def show(figures: dict[str, Any]) -> None:
    for part, values in figures.items():
        print(part)
        for name, value in values.items():
            shown = (
                ", ".join(f"{kind} {count:,}" for kind, count in value.items()) if isinstance(value, dict) else value
            )
            print(f"    {name:<12} {shown}")


if __name__ == "__main__":
    sys.exit(main())
