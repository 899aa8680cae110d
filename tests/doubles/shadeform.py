"""Shadeform according to its documentation and reports of its users: a pure state machine on a given clock.

    HttpRequest -> handle -> HttpResponse, or NetworkError where the line is cut (before or after the effect)
    tick        -> what time brings: boots, errors, reclaimed spot machines, auto_delete; `next_due` says when
    bill        -> who billed from when to when: the truth that tests hold our ledger against

faults.py says what fails at random or at the n-th request, Settings how Shadeform works on this day, `Machines` what
its machines run. It has no clock, randomness or I/O of its own. With HOMING_OPENAPI_DIR set, every request and every
successful response is checked against Shadeform's published API document, which describes no others.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import email.utils
import functools
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from random import Random
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from tests.doubles.cloud_state import BillLine
from tests.doubles.faults import Dice, Faults
from tests.doubles.openapi import OpenApi

from homing.world import HttpRequest, HttpResponse, NetworkError

KEY = "canary-key-of-the-shadeform-account"
URL = "https://shadeform.test/v1"
_FORGETS_S = 7 * 86400.0
# What the live API has and the published document lacks, by shadeform's own pages: schema -> fields.
_KNOWN: dict[str, dict[str, Any]] = {
    "CreateRequest": {"rental_type": {"type": "string", "enum": ["on_demand", "spot"]}},
    "Availability": {"rental_type": {"type": "string"}, "hourly_price": {"type": "string"}},
    "Instance": {"rental_terms": {"type": "object"}},
    "InstanceInfoResponse": {"rental_terms": {"type": "object"}},
}
_MAY_BE_NULL = ("Ip", "SshPort")  # until it is active


@functools.cache
def published() -> OpenApi | None:
    found = OpenApi.here("shadeform.yaml")
    if found is not None:
        schemas = found.document["components"]["schemas"]
        for name, fields in _KNOWN.items():
            schemas[name]["properties"].update(fields)
        for name in _MAY_BE_NULL:
            schemas[name]["type"] = [schemas[name]["type"], "null"]
    return found


class Machines(Protocol):
    """What its machines run. Every call may be repeated; none may wait for a machine."""

    def boot(self, instance_id: str, script: str) -> None: ...

    def end(self, instance_id: str) -> None: ...

    def freeze(self, instance_id: str) -> None: ...

    def address(self, instance_id: str) -> tuple[str, int, str]: ...  # host, port, user


@dataclass(frozen=True)
class Settings:
    boot_s: float = 0.0  # from create to active
    delete_s: float = 0.0  # from deleting to deleted
    list_lag_s: float = 0.0  # a new instance is not listed for so long
    guard_lag_s: float = 0.0  # so late auto_delete strikes
    is_port_null: bool = False  # ssh_port stays null, also of an active one
    deletes_only_active: bool = False
    drops_guard: str = ""  # create | update: takes the thresholds and forgets them
    holds_keys: bool = False  # a key is in use until its instance is deleted, not only deleting
    adds_fields: bool = False  # that the document does not declare


def card(
    cloud: str = "hyperstack",
    name: str = "H100",
    cents: int = 249,
    regions: tuple[str, ...] = ("canada-1",),
    *,
    spot_usd: str = "",
    deployment: str = "vm",
    is_available: bool = True,
    **has: Any,
) -> dict[str, Any]:
    """One entry of the catalogue."""
    shape = {
        "memory_in_gb": 180,
        "storage_in_gb": 1000,
        "vcpus": 28,
        "num_gpus": 1,
        "gpu_type": name,
        "interconnect": "pcie",
        "nvlink": False,
        "os_options": ["ubuntu22.04_cuda12.2_shade_os", "ubuntu22.04_cuda12.4_shade_os", "ubuntu22.04", "debian12"],
        "vram_per_gpu_in_gb": 80,
        "gpu_manufacturer": "nvidia",
        **has,
    }
    entries: list[dict[str, Any]] = []
    for region in regions:
        entry = {"region": region, "available": is_available, "display_name": f"The region {region}"}
        entries.append({**entry, "rental_type": "on_demand"})
        if spot_usd:
            entries.append({**entry, "rental_type": "spot", "hourly_price": spot_usd})
    return {
        "cloud": cloud,
        "shade_instance_type": name if shape["num_gpus"] == 1 else f"{name}x{shape['num_gpus']}",
        "cloud_instance_type": f"n3-{name}x{shape['num_gpus']}",
        "configuration": shape,
        "hourly_price": cents,
        "deployment_type": deployment,
        "availability": entries,
        "boot_time": {"min_boot_in_sec": 120, "max_boot_in_sec": 300},
    }


CATALOGUE = [
    card("massedcompute", "A6000", 50, ("us-central-1",), vram_per_gpu_in_gb=48),
    card("hyperstack", "H100", 249, ("canada-1", "norway-1"), spot_usd="1.25"),
    card("lambdalabs", "GH200", 229, ("us-east-3",), vram_per_gpu_in_gb=96),
]


@dataclass
class Rented:
    id: str
    asked: dict[str, Any]  # the create call, as it came
    sold_as: dict[str, Any]  # the catalogue's entry
    rate: Decimal
    created_at: float
    active_at: float = math.inf
    fails_at: float = math.inf
    taken_at: float = math.inf
    hangs_at: float = math.inf
    deleting_at: float | None = None
    deleted_at: float | None = None
    is_booted: bool = False
    is_hung: bool = False
    details: str = ""
    tries_left: int = 0
    auto_delete: dict[str, Any] = field(default_factory=dict)
    alert: dict[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        return str(self.asked["name"])

    # As the simulator's truth looks at a thing of any cloud.
    kind = "instance"

    @property
    def rate_usd_per_hour(self) -> str:
        return str(self.rate)

    @property
    def ended_at(self) -> float | None:
        return self.deleting_at

    @property
    def guard_usd(self) -> str | None:
        return self.auto_delete.get("spend_threshold")

    @property
    def is_spot(self) -> bool:
        return self.asked.get("rental_type") == "spot"

    def spend(self, now: float) -> Decimal:
        until = now if self.deleting_at is None else min(now, self.deleting_at)
        return self.rate * Decimal(str(max(0.0, until - self.created_at))) / 3600

    def guarded_until(self) -> float:
        spend, date = self.auto_delete.get("spend_threshold"), self.auto_delete.get("date_threshold")
        ends = [_seconds(date)] if date is not None else []
        if spend is not None:
            ends.append(self.created_at + float(Decimal(spend) / self.rate) * 3600)
        return min(ends, default=math.inf)


class ShadeformCloud:
    def __init__(
        self,
        *,
        now: Callable[[], float],
        machines: Machines,
        types: list[dict[str, Any]] | None = None,
        api_key: str = KEY,
        settings: Settings | None = None,
        faults: Faults | None = None,
        seed: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings, self.faults = settings or Settings(), faults or Faults()
        self.types = CATALOGUE if types is None else types
        self.api_key = api_key
        self.rented: dict[str, Rented] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self._true_now, self._machines, self._on_change = now, machines, on_change
        self._dice = Dice(self.faults, Random(seed))
        self._num_made = 0
        self._due = math.inf
        self.document = published()

    # --- the outside: requests, time, the bill ---

    def now(self) -> float:
        return self._true_now() + self.faults.clock_skew_s

    def handle(self, request: HttpRequest) -> HttpResponse:
        self.tick()
        parts = urlsplit(request.url)
        path = [part for part in parts.path.split("/") if part][1:]  # after v1
        route = _route(request.method, path)
        self._check(request, None)
        ways = self._dice.throw(route) if route else ()
        if "lost_before" in ways:
            raise NetworkError(f"{request.method} {parts.path}: the line was cut before it arrived")
        if "busy" in ways:
            return self._say(429, {"message": "Too many requests"}, {"retry-after": f"{self.faults.retry_after_s:g}"})
        if "error_before" in ways:
            return self._say(503, {"message": "Service unavailable"})
        try:
            response = self._answer_to(request, route, path, parse_qs(parts.query), ways)
        except Refusal as exc:
            response = self._say(exc.status, exc.body)
        if "odd_state" not in ways:
            self._check(request, response)
        self._plan_next()
        self._on_change()
        if "lost_after" in ways:
            raise NetworkError(f"{request.method} {parts.path}: the line was cut before the answer")
        if "error_after" in ways:
            return self._say(502, {"message": "Bad gateway"})
        return response

    def tick(self) -> None:
        now = self.now()
        if now < self._due:
            return
        for each in self.rented.values():
            if each.deleted_at is None:
                self._advance(each, now)
        self._plan_next()
        self._on_change()

    def next_due(self) -> float | None:
        return None if math.isinf(self._due) else self._due - self.faults.clock_skew_s

    def bill(self) -> list[BillLine]:
        now = self.now()
        return [BillLine(r.id, r.mark, r.created_at, r.deleting_at, r.spend(now)) for r in self.rented.values()]

    def live(self) -> dict[str, int]:
        """Mark -> how many instances under it bill now."""
        found: dict[str, int] = {}
        for each in self._live.values():
            found[each.mark] = found.get(each.mark, 0) + 1
        return found

    @property
    def _things(self) -> dict[str, Rented]:
        return self.rented

    @property
    def _live(self) -> dict[str, Rented]:
        return {each.id: each for each in self.rented.values() if each.deleting_at is None}

    def preempt(self, instance_id: str, notice_s: float | None = None) -> None:
        """Take it away; a notice only sets the time in `rental_terms`: the machine itself gets none."""
        self.rented[instance_id].taken_at = self._due = self.now() + (notice_s or 0.0)
        self.tick()

    def fail(self, instance_id: str) -> None:
        self.rented[instance_id].fails_at = self._due = self.now()
        self.tick()

    def hang(self, instance_id: str) -> None:
        self.rented[instance_id].hangs_at = self._due = self.now()
        self.tick()

    def change_faults(self, faults: Faults) -> None:
        self.faults, self._dice = faults, Dice(faults, self._dice.rng)

    # --- requests ---

    def _check(self, request: HttpRequest, response: HttpResponse | None) -> None:
        if self.document is None or (response is not None and (response.status != 200 or self.settings.adds_fields)):
            return
        there = urlsplit(request.url)
        plain = there._replace(path=there.path.removeprefix("/v1")).geturl()
        self.document.check(dataclasses.replace(request, url=plain), response)

    def _answer_to(
        self, request: HttpRequest, route: str, path: list[str], query: dict[str, list[str]], ways: tuple[str, ...]
    ) -> HttpResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if headers.get("x-api-key") != self.api_key:
            raise Refusal(401, {"message": "Invalid API key"})
        if route == "offers":
            return self._say(200, {"instance_types": self._types(query)})
        if route == "keys":
            return self._ssh_keys(request, path)
        if route == "list":
            return self._say(200, {"instances": self._list(ways)})
        if route == "create":
            return self._say(200, self._create(_body(request), ways))
        found = self.rented.get(path[1]) if route else None
        if found is None or (found.deleted_at is not None and self.now() > found.deleted_at + _FORGETS_S):
            raise Refusal(404, {"message": f"{'/'.join(path)} not found"})
        if route == "describe":
            body = self._show(found, is_info=True)
            return self._say(200, {**body, "status": "migrating"} if "odd_state" in ways else body)
        if route == "destroy":
            self._delete(found, ways)
        else:
            self._update(found, _body(request))
        return HttpResponse(200, self._headers(), b"")

    def _types(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        if query.get("available") != ["true"]:
            return self.types
        kept = [{**t, "availability": [e for e in t["availability"] if e["available"]]} for t in self.types]
        return [body for body in kept if body["availability"]]

    def _create(self, asked: dict[str, Any], ways: tuple[str, ...]) -> dict[str, Any]:
        for name in ("cloud", "region", "shade_instance_type", "shade_cloud", "name"):
            if name not in asked:
                raise Refusal(400, {"message": f"{name} is required"})
        kind, rate = self._find_type(asked)
        if asked.get("os") not in (None, *kind["configuration"]["os_options"]):
            raise Refusal(400, {"message": f"os {asked['os']} is not supported for this instance type"})
        if "ssh_key_id" in asked and asked["ssh_key_id"] not in self.keys:
            raise Refusal(400, {"message": "ssh key not found"})
        guard, alert = _thresholds(asked.get("auto_delete")), _thresholds(asked.get("alert"))
        _script_of(asked)
        if "no_capacity" in ways:
            raise Refusal(409, {"error_code": "OUT_OF_STOCK", "error": "The requested instance type is out of stock."})
        if "dearer" in ways:
            rate *= Decimal(str(self.faults.dearer_by))
        self._num_made += 1
        made = Rented(str(uuid.UUID(int=self._num_made)), asked, kind, rate, self.now())
        if self.settings.drops_guard != "create":
            made.auto_delete, made.alert = guard, alert
        self._decide_fate(made, ways)
        self.rented[made.id] = made
        self._advance(made, self.now())
        return {"id": made.id}

    def _find_type(self, asked: dict[str, Any]) -> tuple[dict[str, Any], Decimal]:
        rental = asked.get("rental_type", "on_demand")
        for kind in self.types:
            if (kind["cloud"], kind["shade_instance_type"]) != (asked["cloud"], asked["shade_instance_type"]):
                continue
            for entry in kind["availability"]:
                if (entry["region"], entry["rental_type"]) == (asked["region"], rental):
                    if not entry["available"]:
                        break
                    dollars = entry["hourly_price"] if rental == "spot" else None
                    return kind, Decimal(dollars) if dollars else Decimal(kind["hourly_price"]) / 100
        raise Refusal(409, {"error_code": "OUT_OF_STOCK", "error": "No such instance is available in this region."})

    def _decide_fate(self, made: Rented, ways: tuple[str, ...]) -> None:
        now, faults = made.created_at, self.faults
        made.active_at = now + self.settings.boot_s + (faults.slow_boot_s if "boot_slow" in ways else 0.0)
        # Thrown whether it is needed or not: one fault must not shift the chances of all that follow.
        at = now + faults.take_after_s[0] + self._dice.rng.random() * (faults.take_after_s[1] - faults.take_after_s[0])
        if "boot_never" in ways:
            made.active_at = math.inf
        if "boot_dies" in ways:
            made.fails_at, made.active_at = made.active_at, math.inf
        if "preempt" in ways or "notice_preempt" in ways:
            made.taken_at = at
        if "hang" in ways:
            made.hangs_at = at

    def _list(self, ways: tuple[str, ...]) -> list[dict[str, Any]]:
        lag_s = self.faults.list_lag_s * self._dice.rng.random() if "list_late" in ways else self.settings.list_lag_s
        now = self.now()
        shown = [r for r in self.rented.values() if r.deleted_at is None and r.created_at <= now - lag_s]
        return [self._show(each, is_info=False) for each in shown]

    def _update(self, found: Rented, asked: dict[str, Any]) -> None:
        for name in ("auto_delete", "alert"):
            if name in asked and self.settings.drops_guard != "update":
                value = asked[name]
                kept = {**getattr(found, name), **_thresholds(value, may_clear=True)} if value is not None else {}
                setattr(found, name, {key: text for key, text in kept.items() if text is not None})
        found.asked = {**found.asked, **{name: asked[name] for name in ("name", "tags") if name in asked}}

    def _delete(self, found: Rented, ways: tuple[str, ...]) -> None:
        if found.deleting_at is not None:
            return
        is_early = self.settings.deletes_only_active and self._status(found) not in ("active", "error")
        if "destroy_stubborn" in ways and not found.tries_left:
            found.tries_left = self.faults.stubborn_tries
        if is_early or found.tries_left > 1:
            found.tries_left = max(0, found.tries_left - 1)
            text = "Instance cannot be deleted in its current state"
            raise Refusal(409, {"error_code": "INVALID_STATE", "error": text})
        if "destroy_lies" not in ways:
            self._end(found, self.now())

    def _ssh_keys(self, request: HttpRequest, path: list[str]) -> HttpResponse:
        if request.method == "GET" and len(path) == 1:
            return self._say(200, {"ssh_keys": list(self.keys.values())})
        if path[1:] == ["add"]:
            asked = _body(request)
            if any(key["name"] == asked["name"] for key in self.keys.values()):
                raise Refusal(400, {"message": "ssh key name must be unique"})
            self._num_made += 1
            made = {"id": str(uuid.UUID(int=2**64 + self._num_made)), "is_default": False, **asked}
            self.keys[made["id"]] = made
            return self._say(200, {"id": made["id"]})
        if path[1] not in self.keys:
            raise Refusal(404, {"message": "ssh key not found"})
        if path[2:] == ["info"]:  # undeclared, and seen in the wild
            return self._say(200, {**self.keys[path[1]], "private_key": "canary-private-key"})
        if any(r.asked.get("ssh_key_id") == path[1] and self._holds(r) for r in self.rented.values()):
            raise Refusal(409, {"error_code": "SSH_KEY_IN_USE", "error": "SSH key is in use by an instance"})
        del self.keys[path[1]]
        return HttpResponse(200, self._headers(), b"")

    def _holds(self, rented: Rented) -> bool:
        return rented.deleted_at is None if self.settings.holds_keys else rented.deleting_at is None

    # --- what time brings ---

    def _advance(self, each: Rented, now: float) -> None:
        if each.deleting_at is not None:
            if each.deleted_at is None and now >= each.deleting_at + self.settings.delete_s:
                each.deleted_at = each.deleting_at + self.settings.delete_s
            return
        guard_at = each.guarded_until() + self.settings.guard_lag_s
        end_at = min(each.taken_at, guard_at)
        if each.active_at <= min(now, end_at) and not each.is_booted and math.isinf(each.fails_at):
            each.is_booted = True
            self._machines.boot(each.id, _script_of(each.asked))
        if each.fails_at <= now and not each.details:
            each.details = "The underlying cloud could not provision this instance"
        if each.hangs_at <= min(now, end_at) and each.is_booted and not each.is_hung:
            each.is_hung = True
            self._machines.freeze(each.id)
        if end_at <= now:
            each.details = "preempted" if each.taken_at <= guard_at else each.details
            self._end(each, end_at)

    def _end(self, each: Rented, at: float) -> None:
        each.deleting_at = at
        if not self.settings.delete_s:
            each.deleted_at = at
        self._machines.end(each.id)

    def _plan_next(self) -> None:
        waits = [math.inf]
        for each in self.rented.values():
            if each.deleting_at is not None:
                waits += [each.deleting_at + self.settings.delete_s] if each.deleted_at is None else []
                continue
            waits += [each.taken_at, each.guarded_until() + self.settings.guard_lag_s]
            waits += [each.active_at] if not each.is_booted else []
            waits += [each.fails_at] if not each.details else []
            waits += [each.hangs_at] if each.is_booted and not each.is_hung else []
        self._due = min(waits)

    # --- how it shows itself ---

    def _status(self, each: Rented) -> str:
        now = self.now()
        if each.deleting_at is not None:
            return "deleted" if each.deleted_at is not None and now >= each.deleted_at else "deleting"
        if each.fails_at <= now:
            return "error"
        if each.is_booted:
            return "active"
        share = (now - each.created_at) / max(self.settings.boot_s, 1e-9)
        return "creating" if share < 0.25 else "pending_provider" if share < 0.5 else "pending"

    def _show(self, each: Rented, *, is_info: bool) -> dict[str, Any]:
        status, asked = self._status(each), each.asked
        host, port, user = self._machines.address(each.id) if status == "active" else (None, None, "shadeform")
        has = {name: value for name, value in each.sold_as["configuration"].items() if name != "os_options"}
        body: dict[str, Any] = {
            "id": each.id,
            "cloud": asked["cloud"],
            "region": asked["region"],
            "shade_instance_type": asked["shade_instance_type"],
            "cloud_instance_type": each.sold_as["cloud_instance_type"],
            "cloud_assigned_id": f"their-{each.id[-4:]}",
            "shade_cloud": asked["shade_cloud"],
            "name": asked["name"],
            "configuration": {**has, "os": asked.get("os") or "ubuntu22.04"},
            "ip": host,
            "ssh_user": user,
            "ssh_port": None if self.settings.is_port_null else port,
            "status": status,
            "status_details": each.details,
            "cost_estimate": f"{each.spend(self.now()):.4f}",
            "hourly_price": int((each.rate * 100).to_integral_value())
            if not each.is_spot
            else each.sold_as["hourly_price"],
            "rental_terms": self._terms(each),
            "tags": asked.get("tags", []),
            "port_mappings": [],
            "active_at": _text(each.active_at if each.is_booted else -math.inf),
            "created_at": _text(each.created_at),
            "deleted_at": _text(each.deleted_at if each.deleted_at is not None else -math.inf),
            "boot_time": each.sold_as["boot_time"],
        }
        if is_info:
            body.update(volume_ids=[], auto_delete=each.auto_delete, alert=each.alert, envs=asked.get("envs", []))
            body.update({name: asked[name] for name in ("ssh_key_id", "launch_configuration") if name in asked})
        return {**body, "wobble": {"not": "declared"}} if self.settings.adds_fields else body

    def _terms(self, each: Rented) -> dict[str, Any]:
        ending = None if math.isinf(each.taken_at) else _text(each.taken_at)
        return {
            "rental_type": "spot" if each.is_spot else "on_demand",
            "hourly_price": f"{each.rate:.2f}",
            "ending_at": ending,
        }

    def _say(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> HttpResponse:
        return HttpResponse(status, {**self._headers(), **(headers or {})}, json.dumps(body).encode())

    def _headers(self) -> dict[str, str]:
        return {"content-type": "application/json", "date": email.utils.formatdate(self.now(), usegmt=True)}


class Refusal(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status} {body}")
        self.status, self.body = status, body


def _route(method: str, path: list[str]) -> str:
    """Return the name under which faults.py knows this request; "" if it never fails at random."""
    if path[:1] == ["sshkeys"]:
        return "keys"
    if path[:1] != ["instances"]:
        return ""
    known = {
        ("GET", "types"): "offers",
        ("GET", ""): "list",
        ("POST", "create"): "create",
        ("GET", "info"): "describe",
        ("POST", "update"): "guard",
        ("POST", "delete"): "destroy",
    }
    last = path[1] if len(path) == 2 and path[1] in ("types", "create") else path[2] if len(path) == 3 else ""
    return known.get((method, last), "")


def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        body = json.loads(request.body or b"null")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, {"message": "the body is no JSON object"})
    return body


def _thresholds(asked: Any, *, may_clear: bool = False) -> dict[str, Any]:
    """Strings both, or a refusal: a number of dollars, a number of seconds or another name are none."""
    if asked is None:
        return {}
    if not isinstance(asked, dict) or not set(asked) <= {"spend_threshold", "date_threshold"}:
        raise Refusal(400, {"message": f"unknown threshold in {asked}"})
    for name, value in asked.items():
        if value is None and may_clear:
            continue
        try:
            is_right = isinstance(value, str) and (
                Decimal(value) > 0 if name == "spend_threshold" else _seconds(value) > 0
            )
        except (InvalidOperation, ValueError):
            is_right = False
        if not is_right:
            raise Refusal(400, {"message": f"{name} {value!r} is not valid"})
    return dict(asked)


def _script_of(asked: dict[str, Any]) -> str:
    messages = asked.get("launch_configuration") or {"type": "script", "script_configuration": {"base64_script": ""}}
    try:
        assert messages["type"] == "script", messages
        return base64.b64decode(messages["script_configuration"]["base64_script"], validate=True).decode()
    except (KeyError, AssertionError, binascii.Error, UnicodeDecodeError) as exc:
        raise Refusal(400, {"message": "launch_configuration is not valid"}) from exc


def _seconds(text: str) -> float:
    at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if at.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return at.timestamp()


def _text(moment: float) -> str:
    """With nine digits behind the point, as Go writes it; "not yet" is the zero date."""
    if math.isinf(moment):
        return "0001-01-01T00:00:00Z"
    at = datetime.datetime.fromtimestamp(moment, tz=datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
