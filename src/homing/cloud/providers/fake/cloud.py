"""A simulated cloud as one object. It rents out machines, bills them by its own clock, and fails as configured.

    HttpRequest -> handle -> HttpResponse, or NetworkError if the connection is cut (before or after the effect)
    tick        -> scheduled changes: boots, preemptions, hangs, the guard; `next_due` says when the next is due
    bill        -> every billed resource with its start time, end time and cost; tests compare the ledger with it

Like real clouds, it does not deduplicate by name, and it continues to describe ended instances for a while before it
answers 404. It bills machines and disks for every second from the create call until they are gone. A `Machines` object
runs the machines: as local processes for the server, and as actors for the simulator. The cloud has no clock,
randomness or I/O of its own and depends only on its arguments and the requests, so that the same seed always gives the
same sequence of events.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

from homing.cloud.providers.fake.cloud_types import (
    VOLUME_USD_PER_GB_HOUR,
    BillLine,
    FakeOffer,
    Machines,
    Refusal,
    Settings,
    Thing,
    answer,
    body_of,
    route_of,
    state_of,
    total_rate,
)
from homing.cloud.providers.fake.faults import Dice, Faults
from homing.world import HttpRequest, HttpResponse, NetworkError

__all__ = ["INSTANCE_KEY_ENV", "KEY_HEADER", "BillLine", "FakeCloud", "FakeOffer", "Machines", "Settings"]

KEY_HEADER = "x-api-key"
INSTANCE_KEY_ENV = "FAKE_INSTANCE_KEY"  # set on each machine to a key that can end only that machine
_STATE_VERSION = 1


class FakeCloud:
    def __init__(
        self,
        *,
        now: Callable[[], float],
        machines: Machines,
        offers: list[FakeOffer],
        api_key: str,
        settings: Settings | None = None,
        faults: Faults | None = None,
        seed: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up the cloud. It calls `on_change` to save its state after each change, before it responds."""
        self.settings = settings or Settings()
        self.faults = faults or Faults()
        self.offers = offers
        self._true_now, self._machines, self._api_key = now, machines, api_key
        self.account = f"account-{hashlib.sha256(api_key.encode()).hexdigest()[:8]}"
        self._on_change = on_change
        self._dice = Dice(self.faults, Random(seed))
        self._things: dict[str, Thing] = {}
        self._live: dict[str, Thing] = {}  # the resources that are billing; each tick checks only these
        self._keys: dict[str, dict[str, Any]] = {}
        self._num_made = 0
        self._due = math.inf
        self._is_changed = False

    # --- interface: requests, time, the bill ---

    def now(self) -> float:
        return self._true_now() + self.faults.clock_skew_s

    def handle(self, request: HttpRequest) -> HttpResponse:
        self.tick()
        parts = urlsplit(request.url)
        path = [part for part in parts.path.split("/") if part]
        route = route_of(request.method, path)
        ways = self._dice.throw(route) if route else ()
        if "lost_before" in ways:
            raise NetworkError(f"{request.method} {parts.path}: the connection was cut before the request arrived")
        if "busy" in ways:
            wait = {"retry-after": f"{self.faults.retry_after_s:g}"}
            return answer(429, {"error": "too many requests"}, wait)
        if "error_before" in ways:
            return answer(503, {"error": "service unavailable"})
        try:
            response = self._answer_to(request, route, path, parse_qs(parts.query), ways)
        except Refusal as exc:
            response = answer(exc.status, {"error": exc.text})
        self._save()
        if "lost_after" in ways:
            raise NetworkError(f"{request.method} {parts.path}: the connection was cut before the response")
        if "error_after" in ways:
            return answer(500, {"error": "internal error"})
        return response

    def tick(self) -> None:
        """Advance the cloud to the current time. This is cheap if nothing is due."""
        now = self.now()
        if now < self._due:
            return
        for thing in list(self._live.values()):
            if thing.kind == "instance":
                self._advance(thing, now)
        self._plan_next()
        self._save()

    def next_due(self) -> float | None:
        """Return the true time (without clock skew) of the next scheduled change, or None if none is scheduled."""
        return None if math.isinf(self._due) else self._due - self.faults.clock_skew_s

    def bill(self) -> list[BillLine]:
        now = self.now()
        return [
            BillLine(thing.id, thing.mark, thing.created_at, thing.ended_at, thing.spend(now), thing.kind)
            for thing in self._things.values()
        ]

    def live(self) -> dict[str, int]:
        """Return the number of billing instances for each mark. A count of two means that there is a duplicate."""
        found: dict[str, int] = {}
        for thing in self._live.values():
            if thing.kind == "instance":
                found[thing.mark] = found.get(thing.mark, 0) + 1
        return found

    def preempt(self, instance_id: str, notice_s: float | None = None) -> None:
        """Preempt the instance immediately or, if `notice_s` is set, after that many seconds' notice."""
        thing, now = self._live[instance_id], self.now()
        thing.taken_at = now + (notice_s or 0.0)
        if notice_s is not None:
            thing.notices_at = now
        self._due = now
        self.tick()

    def hang(self, instance_id: str) -> None:
        self._live[instance_id].hangs_at = self._due = self.now()
        self.tick()

    def change_faults(self, faults: Faults) -> None:
        """Use these faults from the next request on, and restart the request count from zero."""
        self.faults = faults
        self._dice = Dice(faults, self._dice.rng)

    # --- saving and loading ---

    def dump(self) -> dict[str, Any]:
        version, numbers, gauss = self._dice.rng.getstate()
        return {
            "version": _STATE_VERSION,
            "num_made": self._num_made,
            "things": [dataclasses.asdict(thing) for thing in self._things.values()],
            "keys": list(self._keys.values()),
            "faults": self.faults.to_dict(),
            "counts": dict(self._dice.counts),
            "rng": [version, list(numbers), gauss],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a `dump`. The next tick starts machines that should be running but are not."""
        assert state["version"] == _STATE_VERSION, state["version"]
        self._num_made = state["num_made"]
        self._things = {body["id"]: Thing(**body) for body in state["things"]}
        self._live = {thing.id: thing for thing in self._things.values() if thing.ended_at is None}
        self._keys = {body["id"]: body for body in state["keys"]}
        self.change_faults(Faults.from_dict(state["faults"]))
        self._dice.counts = dict(state["counts"])
        version, numbers, gauss = state["rng"]
        self._dice.rng.setstate((version, tuple(numbers), gauss))
        for thing in self._things.values():
            if thing.kind == "instance" and thing.ended_at is not None:
                # The server may have crashed after recording that the instance ended, but before ending the machine.
                self._machines.end(thing.id)
        self._due = -math.inf
        self.tick()

    # --- requests ---

    def _answer_to(
        self, request: HttpRequest, route: str, path: list[str], query: dict[str, list[str]], ways: tuple[str, ...]
    ) -> HttpResponse:
        if route == "notice" and path[0] == "notices":
            return self._notice(next((t for t in self._live.values() if t.mark == path[1]), None))
        caller = self._caller(request)
        if not route:
            raise Refusal(404, f"no such path: {request.method} /{'/'.join(path)}")
        if caller is not None and (path[:2] != ["instances", "self"] or request.method == "PUT"):
            raise Refusal(403, "this key belongs to one instance and may only read and end it")
        if route == "account":
            about = {**dataclasses.asdict(self.settings), "now": self.now(), "account": self.account}
            return answer(200, about)
        if route == "offers":
            return answer(200, {"offers": [self._show_offer(offer) for offer in self.offers]})
        if route in ("volumes", "keys"):
            return self._other(route, request, path, query)
        if route == "create":
            return self._create(body_of(request), ways)
        if route == "list":
            return self._list(query.get("prefix", [""])[0], ways)
        thing = self._find(path[1], caller)
        if route == "describe":
            return self._describe(thing, ways)
        if route == "destroy":
            return self._destroy(thing, ways)
        if route == "guard":
            return self._set_guard(thing, body_of(request))
        if route == "log":
            return answer(200, {"log": self._machines.log(thing.id)})
        return self._notice(thing)

    def _caller(self, request: HttpRequest) -> Thing | None:
        """Return the instance that the request's API key belongs to, or None for the account's key."""
        key = next((value for name, value in request.headers.items() if name.lower() == KEY_HEADER), "")
        if key == self._api_key:
            return None
        instance_id, _, _ = key.partition(".")
        if instance_id in self._things and key == self._instance_key(instance_id):
            return self._things[instance_id]
        raise Refusal(401, "the API key is wrong")

    def _instance_key(self, instance_id: str) -> str:
        return f"{instance_id}.{hashlib.sha256(f'{self._api_key} {instance_id}'.encode()).hexdigest()[:32]}"

    def _find(self, instance_id: str, caller: Thing | None) -> Thing:
        thing = caller if caller is not None else self._things.get(instance_id)
        if thing is None or thing.kind != "instance":
            raise Refusal(404, f"no instance {instance_id}")
        if thing.ended_at is not None and self.now() > thing.ended_at + self.settings.retention_s:
            raise Refusal(404, f"no instance {instance_id}")
        return thing

    def _create(self, body: dict[str, Any], ways: tuple[str, ...]) -> HttpResponse:
        offer = next((offer for offer in self.offers if offer.name == body.get("offer")), None)
        mark = str(body.get("name", ""))
        if offer is None or not mark:
            raise Refusal(400, f"there is no offer {body.get('offer')!r}, or the instance has no name")
        if self.settings.deduplicates:
            same = next((t for t in self._live.values() if t.mark == mark and t.kind == "instance"), None)
            if same is not None:
                return answer(200, self._show(same, self.now()))
        if "no_capacity" in ways:
            raise Refusal(400, "There are no longer any instances available with the requested specifications.")
        guard = body.get("guard") or {}
        if guard and not self.settings.has_guard:
            raise Refusal(400, "this account has no spend guard")
        rate = total_rate(offer) * (Decimal(str(self.faults.dearer_by)) if "dearer" in ways else 1)
        thing = self._add("instance", mark, rate)
        thing.offer, thing.files = offer.name, dict(body.get("files") or {})
        thing.argv, thing.env = list(body.get("argv") or []), dict(body.get("env") or {})
        _take_guard(thing, guard)
        self._decide_fate(thing, ways)
        self._plan_next()
        return answer(201, self._show(thing, self.now()))

    def _decide_fate(self, thing: Thing, ways: tuple[str, ...]) -> None:
        now, faults = thing.created_at, self.faults
        thing.boots_at = now + self.settings.boot_s + (faults.slow_boot_s if "boot_slow" in ways else 0.0)
        # Draw this number even if it is not needed, so that one fault does not affect the numbers drawn for others.
        at = now + faults.take_after_s[0] + self._dice.rng.random() * (faults.take_after_s[1] - faults.take_after_s[0])
        if "boot_never" in ways:
            thing.boots_at = math.inf
        if "boot_dies" in ways:
            thing.dies_at, thing.boots_at = thing.boots_at, math.inf
        if "preempt" in ways or "notice_preempt" in ways:
            thing.taken_at = at
        if "notice_preempt" in ways:
            thing.notices_at, thing.taken_at = at, at + faults.notice_s
        if "hang" in ways:
            thing.hangs_at = at
        thing.leaves_volume = "leaves_volume" in ways

    def _list(self, prefix: str, ways: tuple[str, ...]) -> HttpResponse:
        at = self.now()
        if "list_late" in ways:
            at -= self.faults.list_lag_s * self._dice.rng.random()
        found = [t for t in self._things.values() if t.kind == "instance" and t.mark.startswith(prefix)]
        was_there = [
            t for t in found if t.created_at <= at and (t.ended_at is None or t.ended_at > at) and t.hidden_until <= at
        ]
        return answer(200, {"instances": [self._show(thing, at) for thing in was_there]})

    def _describe(self, thing: Thing, ways: tuple[str, ...]) -> HttpResponse:
        body = self._show(thing, self.now())
        if "odd_state" in ways and body["state"] != "deleted":
            body["state"] = "migrating"
        return answer(200, body)

    def _destroy(self, thing: Thing, ways: tuple[str, ...]) -> HttpResponse:
        now = self.now()
        if thing.ended_at is not None:
            raise Refusal(404, f"no instance {thing.id}")
        # Before another destroy may falsely report success, the instance must have been visible for `settle_s`, the
        # maximum staleness of the list. Otherwise, two false successes in a row would look like an actual termination.
        if "destroy_lies" in ways and now >= thing.hidden_until + self.settings.settle_s:
            thing.hidden_until = now + self.faults.lie_s
            self._is_changed = True
            return answer(204)
        if "destroy_stubborn" in ways and not thing.tries_left:
            thing.tries_left = self.faults.stubborn_tries
        if thing.tries_left > 1:
            thing.tries_left -= 1
            self._is_changed = True
            return answer(202, {"state": "deleting"})
        if self.settings.destroy_s:
            thing.leaves_at = min(thing.leaves_at, now + self.settings.destroy_s)
            self._is_changed = True
            self._plan_next()
            return answer(202, {"state": "deleting"})
        self._end(thing, now, "deleted")
        return answer(204)

    def _set_guard(self, thing: Thing, body: dict[str, Any]) -> HttpResponse:
        if not self.settings.has_guard:
            raise Refusal(404, "this account has no spend guard")
        if thing.ended_at is not None:
            raise Refusal(404, f"no instance {thing.id}")
        _take_guard(thing, body)
        self._is_changed = True
        self._plan_next()
        return answer(200, self._show(thing, self.now()))

    def _notice(self, thing: Thing | None) -> HttpResponse:
        if thing is None or not thing.is_noticed:
            raise Refusal(404, "no notice")
        return answer(200, {"action": "terminate", "at": thing.taken_at})

    def _other(self, route: str, request: HttpRequest, path: list[str], query: dict[str, list[str]]) -> HttpResponse:
        """Create, list or delete volumes and keys. Volumes cost money; keys are free."""
        if request.method == "POST":
            body = body_of(request)
            if route == "volumes":
                rate = Decimal(str(body.get("size_gb", 10))) * VOLUME_USD_PER_GB_HOUR
                return answer(201, self._show_volume(self._add("volume", str(body.get("name", "")), rate)))
            self._num_made += 1
            made: dict[str, Any] = {
                "id": f"k-{self._num_made:06d}",
                "name": str(body.get("name", "")),
                "created_at": self.now(),
            }
            self._keys[made["id"]] = made
            self._is_changed = True
            return answer(201, made)
        volumes = {t.id: self._show_volume(t) for t in self._live.values() if t.kind == "volume"}
        found = volumes if route == "volumes" else self._keys
        if request.method == "GET":
            prefix = query.get("prefix", [""])[0]
            return answer(200, {route: [body for body in found.values() if body["name"].startswith(prefix)]})
        if len(path) < 2 or path[1] not in found:
            raise Refusal(404, f"no such thing in {route}")
        if route == "volumes":
            self._end(self._live[path[1]], self.now(), "deleted")
        else:
            del self._keys[path[1]]
        self._is_changed = True
        return answer(204)

    # --- scheduled changes ---

    def _advance(self, thing: Thing, now: float) -> None:
        ends = [
            (thing.leaves_at, "deleted"),
            (thing.taken_at, "preempted"),
            (thing.guarded_until(), "guard"),
        ]
        end_at, ended_by = min(ends, key=lambda pair: pair[0])
        if thing.dies_at <= min(now, end_at) and not thing.is_dead:
            thing.is_dead = self._is_changed = True
        if thing.boots_at <= min(now, end_at) and not thing.is_started:
            self._start(thing)
        if thing.notices_at <= min(now, end_at) and not thing.is_noticed:
            thing.is_noticed = self._is_changed = True
            self._machines.notice(thing.id, thing.taken_at - thing.notices_at)
        if thing.hangs_at <= min(now, end_at) and thing.is_started and not thing.is_hung:
            thing.is_hung = self._is_changed = True
            self._machines.freeze(thing.id)
        if end_at <= now:
            self._end(thing, end_at, ended_by)

    def _start(self, thing: Thing) -> None:
        files = {name: base64.b64decode(data) for name, data in thing.files.items()}
        env = {**thing.env, INSTANCE_KEY_ENV: self._instance_key(thing.id)}
        self._machines.start(thing.id, files, list(thing.argv), env)
        thing.is_started = self._is_changed = True
        # The machine now has its files and variables. Delete them here, because the cloud must not retain secrets.
        thing.files, thing.env = {}, {}

    def _end(self, thing: Thing, at: float, by: str) -> None:
        thing.ended_at, thing.ended_by = at, by
        thing.files, thing.env = {}, {}
        self._live.pop(thing.id, None)
        self._is_changed = True
        if thing.kind != "instance":
            return
        if thing.leaves_volume:
            offer = next((offer for offer in self.offers if offer.name == thing.offer), None)
            size = Decimal(offer.disk_gb if offer else 10)
            self._add("volume", thing.mark, size * VOLUME_USD_PER_GB_HOUR)
        self._save()  # save before ending the machine, because after a crash `load` ends the machines recorded as ended
        self._machines.end(thing.id)

    def _add(self, kind: str, mark: str, rate: Decimal) -> Thing:
        self._num_made += 1
        thing = Thing(f"{kind[0]}-{self._num_made:06d}", mark, str(rate), self.now(), kind)
        self._things[thing.id] = self._live[thing.id] = thing
        self._is_changed = True
        return thing

    def _plan_next(self) -> None:
        self._due = math.inf
        for thing in self._live.values():
            if thing.kind != "instance":
                continue
            waits = [thing.leaves_at, thing.taken_at, thing.guarded_until()]
            waits += [thing.boots_at] if not thing.is_started else []
            waits += [thing.dies_at] if not thing.is_dead else []
            waits += [thing.notices_at] if not thing.is_noticed else []
            waits += [thing.hangs_at] if thing.is_started and not thing.is_hung else []
            self._due = min(self._due, *waits)

    def _save(self) -> None:
        if self._is_changed:
            self._is_changed = False
            self._on_change()

    # --- output ---

    def _show_offer(self, offer: FakeOffer) -> dict[str, Any]:
        return {
            **dataclasses.asdict(offer),
            "total_usd_per_hour": str(total_rate(offer)),
            "boot_s": self.settings.boot_s,
        }

    def _show(self, thing: Thing, at: float) -> dict[str, Any]:
        now = self.now()
        has_ended = thing.ended_at is not None and thing.ended_at <= at
        return {
            "id": thing.id,
            "name": thing.mark,
            "offer": thing.offer,
            "state": state_of(thing, at),
            "rate_usd_per_hour": thing.rate_usd_per_hour,
            "spend_usd": str(thing.spend(at)),
            "created_at": thing.created_at,
            "ended_at": thing.ended_at if has_ended else None,
            "ended_by": thing.ended_by if has_ended else "",
            "is_running": not thing.is_dead and (not thing.is_started or self._machines.is_running(thing.id)),
            "guard": {"spend_limit_usd": thing.guard_usd, "end_by": thing.guard_end_by},
            "now": now,
        }

    def _show_volume(self, thing: Thing) -> dict[str, Any]:
        return {
            "id": thing.id,
            "name": thing.mark,
            "rate_usd_per_hour": thing.rate_usd_per_hour,
            "created_at": thing.created_at,
            "now": self.now(),
        }


def _take_guard(thing: Thing, body: dict[str, Any]) -> None:
    usd, end_by = body.get("spend_limit_usd"), body.get("end_by")
    try:
        limit = None if usd is None else Decimal(str(usd))
        until = None if end_by is None else float(end_by)
    except (ArithmeticError, TypeError, ValueError) as exc:
        raise Refusal(400, f"a guard of {usd!r} dollars until {end_by!r} is not valid") from exc
    # Reject "NaN", which Decimal and float accept, because a guard set to NaN would never act.
    if (limit is not None and not (limit.is_finite() and limit >= 0)) or (until is not None and math.isnan(until)):
        raise Refusal(400, f"a guard of {usd!r} dollars until {end_by!r} is not valid")
    thing.guard_usd, thing.guard_end_by = (None if limit is None else str(limit)), until
