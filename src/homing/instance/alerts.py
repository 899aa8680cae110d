"""The monitor, called `lookout` in logs: a process on the instance that reports problems to the user and to the agent.

    metrics, limits  -> alert, limit_warning     each reported once, with `stops` if the run file says to stop the run
    notice_url       -> preemption_notice        the provider is about to take the instance away
    leave_s          -> preemption_notice        the instance is close to its maximum lifetime, so the run must move
    /proc, the GPU   -> use.json                 utilization, shown in heartbeats and in the event that reports a stop

Like the sync process, the monitor runs from the code folder on the instance: `python -m homing.instance.alerts
boot.json`. The agent starts the monitor alongside the trainer, restarts it if it dies, and reads its events. The agent
enforces all limits even if the monitor is not running.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from decimal import ROUND_UP, Decimal
from typing import Any

from homing.instance.agent.folder import Folder
from homing.instance.agent.watchdog import Limits
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot
from homing.wire.control_files import Use
from homing.wire.event_lines import Event, Metric
from homing.wire.guard_timing import LAND
from homing.world import HttpRequest, Machine, NetworkError, World

__all__ = ["Lookout", "main", "use_of_machine"]

log = logging.getLogger(__name__)

LOOK_S, USE_S = 5.0, 60.0  # seconds between checks, and between utilization measurements
WARN_AT = (0.8, 0.6)  # warn at these fractions of a limit, once each; only the highest fraction reached is reported
MAX_LOSSES = 200
DIVERGED_LINES = 10  # the loss has diverged if it is missing or far above normal in this many consecutive metric lines
SLOW_SHARE, SLOW_AFTER_STEPS, SLOW_AFTER_S = 1 / 3, 20, 600.0
_GPU = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
_GPU_S = 5.0
_CENT = Decimal("0.01")
_TOKEN = "X-aws-ec2-metadata-token"


def main(argv: Sequence[str] | None = None, world: World | None = None) -> int:
    path = (argv or sys.argv)[-1]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s lookout %(message)s")
    world = world or World()
    boot = codec.loads(Boot, world.read(path))
    Lookout(boot, world).run()
    return 0


class Lookout(Limits):
    def __init__(self, boot: Boot, world: World) -> None:
        super().__init__(Folder(boot, world, "lookout"))
        self._plan = boot
        self._reported: set[str] = set()  # keys of one-time reports already made by this process or an earlier one
        self._last: Metric | None = None
        self._look_s = min(LOOK_S, 5 * boot.heartbeat_s)
        self._use_at = -math.inf
        self._forget(None)

    def run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # keep running after a failed check, because the next one may succeed
                log.exception("a monitor check failed; continuing")
            self._world.sleep(self._look_s)

    def look(self) -> None:
        self.follow()
        self.read()
        stops = {"divergence": self._plan.on_divergence, "slow": self._plan.on_slow}
        for what, key, text in self.alarms():
            if key not in self._reported:
                self._reported.add(key)
                data: dict[str, Any] = {"key": key, "use": use_of_machine(self._world)}
                if stops.get(what) == "stop":
                    data["stops"] = self._plan.mark
                self._folder.event("alert" if what in stops else what, text, **data)
        if self._has_notice():
            text = "The provider is about to take this instance away: it sent a preemption notice."
            self._folder.event("preemption_notice", text, stops=self._plan.mark)
        if self._must_leave():
            key = f"leave {self._plan.mark}"
            self._reported.add(key)
            text = (
                f"The instance is close to its lifetime limit of {self._plan.leave_s:,.0f} s;"
                " another instance will resume the run."
            )
            self._folder.event("preemption_notice", text, stops=self._plan.mark, key=key)
        if self._world.monotonic() - self._use_at >= USE_S:
            self._use_at = self._world.monotonic()
            self._folder.write(file_names.USE, Use(use_of_machine(self._world)))

    def read(self) -> None:
        for event in self._folder.new_lines(file_names.EVENTS, Event):
            self._reported.add(str(event.data.get("key")))
        for metric in self._folder.new_lines(file_names.METRICS, Metric):
            last, self._last = self._last, metric
            if last is None or metric.phase != last.phase or metric.step <= last.step:
                # Forget the earlier metrics: a new phase began, or the trainer resumed from an earlier checkpoint.
                self._forget(metric)
            self._judge(metric)

    def alarms(self) -> Iterator[tuple[str, str, str]]:
        """Yield the kind, key and text of every alarm that applies now. The caller reports each key only once."""
        by_money = float(self.spend() / self.spend_limit) if self.spend_limit else 0.0
        share = max(by_money, self.elapsed_s() / (self.time_limit_s or math.inf))
        for passed in [at for at in WARN_AT if share >= at][:1]:
            limit = self.nearest()[1]
            # Round up, so that the amount shown is never less than the amount spent.
            spent = self.spend().quantize(_CENT, rounding=ROUND_UP)
            text = f"{share:.0%} of a limit is used: ${spent} in {self.elapsed_s():,.0f} s. Nearest limit: {limit}."
            yield "limit_warning", f"{passed} of {self.spend_limit}, {self.time_limit_s:g} s", text
        if self._num_bad >= DIVERGED_LINES:
            text = f"The loss diverged: {self._num_bad} metric lines in a row had no loss or one far above the usual"
            yield "divergence", f"divergence of {self._plan.mark}", f"{text} {_middle(self._losses):.3f}."
        # Use the speed planned for this phase: RL generation, for example, is many times slower than pretraining.
        planned = self._plan.planned_speeds.get(self._last.phase, 0.0) if self._last else 0.0
        speed = _middle(self._speeds)
        if self._is_speed_known() and 0 < speed < planned * SLOW_SHARE:
            text = f"This instance is slow: {speed:,.0f} tokens/s; the plan assumed {planned:,.0f}."
            yield "slow", f"slow {self._plan.mark}", text

    def _forget(self, first: Metric | None) -> None:
        self._first = first
        self._losses: list[float] = []
        self._speeds: list[float] = []
        self._num_bad = 0
        self._begun = self._world.monotonic()

    def _judge(self, metric: Metric) -> None:
        loss, usual = metric.loss, _middle(self._losses)
        is_far = loss is not None and len(self._losses) >= DIVERGED_LINES and loss > max(2 * usual, usual + 1)
        self._num_bad = self._num_bad + 1 if loss is None or is_far else 0
        if loss is not None and not is_far:
            self._losses = [*self._losses[1 - MAX_LOSSES :], loss]
        if metric.tokens_per_s and self._num_steps() <= 2 * SLOW_AFTER_STEPS:
            self._speeds.append(metric.tokens_per_s)

    def _is_speed_known(self) -> bool:
        return self._num_steps() >= SLOW_AFTER_STEPS or self._world.monotonic() - self._begun >= SLOW_AFTER_S

    def _num_steps(self) -> int:
        return self._last.step - self._first.step if self._last and self._first else 0

    def _has_notice(self) -> bool:
        key = f"notice for {self._plan.mark}"
        if not self._plan.notice_url or key in self._reported:
            return False
        try:
            headers = {_TOKEN: self._token()} if self._plan.notice_token_url else {}
            reply = self._world.http(HttpRequest("GET", self._plan.notice_url, headers, timeout_s=2.0))
        except NetworkError:
            log.warning("no response from %s", self._plan.notice_url)
            return False
        if reply.status == 200:
            self._reported.add(key)
        return reply.status == 200

    def _must_leave(self) -> bool:
        """Return True if the run must move to another instance now, and no limit is about to end the run anyway."""
        leave_s, is_reported = self._plan.leave_s, f"leave {self._plan.mark}" in self._reported
        return bool(leave_s) and not is_reported and self.elapsed_s() >= leave_s and self.left_s(LAND) > 0

    def _token(self) -> str:
        """Request a new metadata token. It is not cached, because a request takes only a millisecond."""
        asked = HttpRequest("PUT", self._plan.notice_token_url, {f"{_TOKEN}-ttl-seconds": "60"}, timeout_s=2.0)
        return self._world.http(asked).body.decode("ascii", "replace").strip()


def use_of_machine(world: Machine) -> dict[str, float]:
    """Return the utilization of CPU, memory, GPU and GPU memory, each from 0 to 1, omitting unavailable values."""
    use: dict[str, float] = {}
    try:
        load = float(world.read("/proc/loadavg").split()[0])
        cores = len(re.findall(rb"^cpu\d", world.read("/proc/stat"), re.MULTILINE))
        memory = {name: int(kb) for name, kb in re.findall(rb"^(\w+): +(\d+)", world.read("/proc/meminfo"), re.M)}
        use.update(cpu=load / max(1, cores), memory=1 - memory[b"MemAvailable"] / memory[b"MemTotal"])
    except (OSError, ValueError, LookupError):
        use.clear()
    answer = world.run(_GPU, _GPU_S)
    cards = [[float(word) for word in row] for row in re.findall(r"^(\d+), (\d+), (\d+)$", answer.out, re.M)]
    if answer.code == 0 and cards:
        use.update(gpu=max(card[0] for card in cards) / 100, gpu_memory=max(used / of for _, used, of in cards if of))
    return {name: round(value, 3) for name, value in use.items()}


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda got, _frame: sys.exit(128 + got))
    sys.exit(main())
