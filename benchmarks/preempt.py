"""A preempted run loses time but no work: 20 preemptions, and the same losses bit for bit.

    1. an undisturbed run, by the trainer alone
    2. the same run launched; at random steps its machine gets a preemption notice (SIGTERM to the agent, which
       saves and pushes) or disappears (SIGKILL to all its processes), and `launch --resume` continues on a new one
    3. losses, gradient norms, rates, evaluations and final weights of both, to the last bit

    python benchmarks/preempt.py [--quick] [--seed N]

What resume.py does to the trainer alone, this does to the whole instance.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "lm"), str(ROOT / "benchmarks")]
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}

from tiny import make_data, make_run, make_run_dir  # noqa: E402

from _result import write_proof  # noqa: E402
from homing.cloud.destroy import destroy_lines  # noqa: E402
from homing.cloud.home import Home  # noqa: E402
from homing.cloud.launch.launch import LaunchOrder, draft, launch  # noqa: E402
from homing.cloud.plan.speed import estimate  # noqa: E402
from homing.cloud.plan.timing import timing_of  # noqa: E402
from homing.cloud.providers.base import Needs  # noqa: E402
from homing.cloud.reconcile.reconcile import refresh  # noqa: E402
from homing.wire import file_names  # noqa: E402
from homing.wire.run_json import Run  # noqa: E402
from homing.world import World  # noqa: E402
from resume import differences, read_figures, to_the_end  # noqa: E402

DEADLINE_S = 180.0
LIMIT = Decimal(100)


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the machine away again and again; compare every number.")
    parser.add_argument("--quick", action="store_true", help="2 preemptions")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    num_preemptions, num_steps = (2, 60) if arguments.quick else (20, 300)
    begun, chance = time.monotonic(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="homing-preempt-") as folder:
        make_data(Path(folder) / "data")
        run = make_run(Path(folder) / "data", num_steps=num_steps, save_every=5, eval_every=20, batch_tokens=512)
        run = dataclasses.replace(run, store=f"file:{folder}/home/store", id="")
        whole = make_run_dir(Path(folder) / "whole", run)
        print(f"a run of {num_steps} steps, never disturbed ...", flush=True)
        to_the_end(whole)
        home = Home(Path(folder) / "home", World())
        lived = _Lives(home, run)
        try:
            lived.through(sorted(chance.sample(range(3, num_steps - 10), num_preemptions)), chance)
        finally:
            left = lived.end_all()
        problems = lived.problems + [f"still there: {instance}" for instance in left]
        there = Path(folder) / "home/store/runs" / lived.run.id
        problems += differences(whole, there, num_steps, not_judged=frozenset(lived.reported_at))
    figures: dict[str, Any] = {
        "preemptions": lived.counts,
        "steps": num_steps,
        "steps_done_twice": lived.steps_twice,
        "problems": problems,
        "seconds": round(time.monotonic() - begun, 1),
    }
    for problem in problems:
        print(f"problem: {problem}")
    if not arguments.quick:
        write_proof("preempt", figures, passed=not problems)
    print(
        f"{'FAIL' if problems else 'PASS'} {lived.counts['notice']} preemptions with notice and {lived.counts['none']}"
        f" without, losses bit-identical over {num_steps} steps, {lived.steps_twice} steps done twice,"
        f" {figures['seconds']} s"
    )
    return 1 if problems else 0


class _Lives:
    """One run and its instances, one after the other."""

    def __init__(self, home: Home, run: Run) -> None:
        self.home, self.run, self.problems = home, run, list[str]()
        self.counts, self.steps_twice, self.world = {"notice": 0, "none": 0}, 0, World()
        self.reported_at: list[int] = []  # steps of the checkpoints that a notice brought about
        self.offer = home.provider("local").offers(Needs())[0]
        self.timing = timing_of(run, self.offer, estimate(run, self.offer, home, may_probe=False), home)

    def through(self, at_steps: list[int], chance: random.Random) -> None:
        mark = self._launch(is_first=True)
        for number, step in enumerate(at_steps):
            has_notice = chance.random() < 0.5 if len(at_steps) > 2 else number == 0
            reached = self._wait_for(mark, step + chance.random())
            if reached is None:
                return self.problems.append(f"it ended before step {step}")
            self._take_away(mark, has_notice=has_notice)
            saved = self._saved_step()
            self.counts["notice" if has_notice else "none"] += 1
            self.reported_at += [saved] if has_notice else []
            self.steps_twice += max(0, reached - saved)
            how = "preempted with notice" if has_notice else "lost without notice"
            print(f"{number + 1}/{len(at_steps)}: {how} at step {reached}; {saved} in the store", flush=True)
            mark = self._launch(is_first=False)
        row = self._wait(lambda: self._ended(), "the run did not end")
        if row is None or row.state != "done":
            self.problems.append(f"it ended as {row.state if row else '?'}: {row.reason if row else ''}")

    def end_all(self) -> list[str]:
        destroy_lines(self.home, [line for line in self.home.ledger.lines() if line.destroyed_at is None])
        return [instance.id for instance in self.home.provider("local").list_owned()]

    def _launch(self, *, is_first: bool) -> str:
        order = LaunchOrder(
            run=self.run, run_file_text="name: tiny\n", is_prepared=True, offer=self.offer, spend_limit_usd=LIMIT,
            resume=not is_first, heartbeat_s=0.3, timing=self.timing,
        )  # fmt: skip
        launched = launch(draft(order, self.home), self.home)
        self.run = dataclasses.replace(self.run, id=launched.run.id)
        return launched.instance.id

    def _wait_for(self, mark: str, step: float) -> int | None:
        """Waits until the trainer's metrics file reaches this step; returns None if the run ended before."""
        path = self.home.path / "local" / mark / "work/run" / file_names.METRICS

        def reached() -> int | None:
            lines = read_figures(path.parent) if path.exists() else []
            return lines[-1][0] if lines and lines[-1][0] >= step else None

        return self._wait(lambda: reached() or (-1 if self._ended() else None), f"step {step:g} was not reached")

    def _take_away(self, mark: str, *, has_notice: bool) -> None:
        processes = [process.pid for process, value in self.world.marked(file_names.MARK_ENV, mark) if value == mark]
        if has_notice:
            # To all of them, as a machine that shuts down does.
            for pid in processes:
                self.world.signal(pid, signal.SIGTERM)
            self._wait(lambda: self._ended(), "it did not end after the notice")
            return
        deadline = time.monotonic() + DEADLINE_S
        while processes and time.monotonic() < deadline:
            for pid in processes:
                self.world.signal(pid, signal.SIGKILL)
            time.sleep(0.1)
            processes = [
                process.pid for process, value in self.world.marked(file_names.MARK_ENV, mark) if value == mark
            ]
        destroy_lines(self.home, [line for line in self.home.ledger.lines(self.run.id) if line.mark == mark])
        refresh(self.home)

    def _ended(self) -> Any:
        refresh(self.home)
        row = self.home.ledger.run(self.run.id)
        is_open = any(line.destroyed_at is None for line in self.home.ledger.lines(self.run.id))
        return row if row is not None and not row.is_live and not is_open else None

    def _saved_step(self) -> int:
        folder = self.home.path / "store/runs" / self.run.id / file_names.CHECKPOINTS / "pretrain"
        found = [file_names.parse_step(path.parent.name) or 0 for path in folder.glob(f"step-*/{file_names.MANIFEST}")]
        return max(found, default=0)

    def _wait(self, look: Any, on_timeout: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            found = look()
            if found is not None:
                return None if found == -1 else found
            time.sleep(0.05)
        self.problems.append(on_timeout)
        return None


if __name__ == "__main__":
    sys.exit(main())
