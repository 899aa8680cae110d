"""The lookout on an instance: tells what a person should hear of, and what the agent should know.

    metrics, limits  -> alert, limit_warning     once each; `stops` where the run file says that the run should stop
    notice_url       -> preemption_notice        the machine will be taken away
    leave_s          -> preemption_notice        the machine lives no longer, and the run has not come to its end
    /proc, the card  -> use.json                 how busy the machine is, for heartbeats and beside a stop

`python -m homing.lookout boot.json`, from our code there, as sync is. The agent starts it beside the trainer and again
where it died, reads its events, and guards all limits without it.
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

from homing.agent.folder import Folder
from homing.agent.limits import Limits
from homing.wire import codec, names
from homing.wire.boot import Boot
from homing.wire.control import Use
from homing.wire.event import Event, Metric
from homing.wire.limit import LAND
from homing.world import HttpRequest, Machine, NetworkError, World

__all__ = ["Lookout", "main", "use_of_machine"]

log = logging.getLogger(__name__)

LOOK_S, USE_S = 5.0, 60.0  # how often it looks, and how often at how busy the machine is
WARN_AT = (0.8, 0.6)  # of a limit; the highest that was passed is told, once
MAX_LOSSES = 200
DIVERGED_LINES = 10  # metric lines in a row without a loss, or with one far above what was usual
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
        self._told: set[str] = set()  # keys of what was said once and for all, also by a lookout before this one
        self._last: Metric | None = None
        self._look_s = min(LOOK_S, 5 * boot.heartbeat_s)
        self._use_at = -math.inf
        self._forget(None)

    def run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # it only tells; what it cannot see now it may see later
                log.exception("the lookout goes on")
            self._world.sleep(self._look_s)

    def look(self) -> None:
        self.follow()
        self.read()
        stops = {"divergence": self._plan.on_divergence, "slow": self._plan.on_slow}
        for what, key, text in self.alarms():
            if key not in self._told:
                self._told.add(key)
                told: dict[str, Any] = {"key": key, "use": use_of_machine(self._world)}
                if stops.get(what) == "stop":
                    told["stops"] = self._plan.mark
                self._folder.event("alert" if what in stops else what, text, **told)
        if self._has_notice():
            text = "The machine will be taken away: its notice of preemption is there."
            self._folder.event("preemption_notice", text, stops=self._plan.mark)
        if self._must_leave():
            key = f"leave {self._plan.mark}"
            self._told.add(key)
            text = f"The machine ends soon after {self._plan.leave_s:,.0f} s, whatever the limits; another goes on."
            self._folder.event("preemption_notice", text, stops=self._plan.mark, key=key)
        if self._world.monotonic() - self._use_at >= USE_S:
            self._use_at = self._world.monotonic()
            self._folder.write(names.USE, Use(use_of_machine(self._world)))

    def read(self) -> None:
        for event in self._folder.new_lines(names.EVENTS, Event):
            self._told.add(str(event.data.get("key")))
        for metric in self._folder.new_lines(names.METRICS, Metric):
            last, self._last = self._last, metric
            if last is None or metric.phase != last.phase or metric.step <= last.step:
                self._forget(metric)  # another phase, or another trainer, which starts from a good checkpoint
            self._judge(metric)

    def alarms(self) -> Iterator[tuple[str, str, str]]:
        """Kind, key and sentence of what a person should hear once."""
        by_money = float(self.spend() / self.spend_limit) if self.spend_limit else 0.0
        share = max(by_money, self.elapsed_s() / (self.time_limit_s or math.inf))
        for passed in [at for at in WARN_AT if share >= at][:1]:
            limit = self.nearest()[1]
            spent = self.spend().quantize(_CENT, rounding=ROUND_UP)  # nobody reads less than they pay
            text = f"{share:.0%} of a limit is used up: ${spent} in {self.elapsed_s():,.0f} s; the {limit}."
            yield "limit_warning", f"{passed} of {self.spend_limit}, {self.time_limit_s:g} s", text
        if self._num_bad >= DIVERGED_LINES:
            text = f"The loss has left its course: {self._num_bad} lines in a row without a usual loss"
            yield "divergence", f"divergence of {self._plan.mark}", f"{text} ({_middle(self._losses):.3f})."
        # Each phase has a pace of its own: what answers in rl is many times slower than what reads in pretrain.
        planned = self._plan.planned_speeds.get(self._last.phase, 0.0) if self._last else 0.0
        speed = _middle(self._speeds)
        if self._is_speed_known() and 0 < speed < planned * SLOW_SHARE:
            text = f"This machine is slow: {speed:,.0f} tokens/s, where {planned:,.0f} were planned."
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
        if not self._plan.notice_url or key in self._told:
            return False
        try:
            headers = {_TOKEN: self._token()} if self._plan.notice_token_url else {}
            reply = self._world.http(HttpRequest("GET", self._plan.notice_url, headers, timeout_s=2.0))
        except NetworkError:
            log.warning("no answer from %s", self._plan.notice_url)
            return False
        if reply.status == 200:
            self._told.add(key)
        return reply.status == 200

    def _must_leave(self) -> bool:
        """Unless a limit is as near: then it lands and is over, and nobody needs to go on with it."""
        leave_s, is_told = self._plan.leave_s, f"leave {self._plan.mark}" in self._told
        return bool(leave_s) and not is_told and self.elapsed_s() >= leave_s and self.left_s(LAND) > 0

    def _token(self) -> str:
        """A new one each time: it costs a millisecond, and an old one would have to be watched."""
        asked = HttpRequest("PUT", self._plan.notice_token_url, {f"{_TOKEN}-ttl-seconds": "60"}, timeout_s=2.0)
        return self._world.http(asked).body.decode("ascii", "replace").strip()


def use_of_machine(world: Machine) -> dict[str, float]:
    """Shares of processor, memory and cards, 0..1 each; what cannot be asked here is left out."""
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
