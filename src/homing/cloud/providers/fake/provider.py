"""The fake cloud as a provider: simulated machines that cost nothing, accessed over real HTTP.

Its address comes from $HOMING_HOME/fake/server.json, else from HOMING_FAKE_URL and HOMING_FAKE_KEY. Without an address,
the fake cloud is not queried.

The adapter is written like one for a real cloud. Every call goes through `rest`, create is never repeated without
first looking for an instance with our mark, an unrecognized state is `unknown` and counts as billing, and an instance
is gone only if the provider says so.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from homing.api_address import api_address
from homing.cloud.check_numbers import Figures, read_figure, read_moment
from homing.cloud.ledger import meter
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.providers.base import (
    Connection,
    Feature,
    Instance,
    InstanceState,
    Needs,
    Offer,
    Order,
    Place,
    Request,
    Resource,
    lack,
)
from homing.cloud.providers.fake.cloud import INSTANCE_KEY_ENV, KEY_HEADER
from homing.cloud.providers.once import Once
from homing.cloud.providers.rest import Api, Unwelcome, legible
from homing.errors import NoOffer, ProviderRefused, ProviderSilent, UsageError
from homing.wire import codec, file_names
from homing.wire.boot_json import EndBilling
from homing.wire.guard_timing import PROVIDER, allowed_s, reserve_s
from homing.world import World

__all__ = ["KEY_ENV", "SERVER", "URL_ENV", "WORK_DIR", "Fake"]

URL_ENV = "HOMING_FAKE_URL"
KEY_ENV = "HOMING_FAKE_KEY"
SERVER = "fake/server.json"  # file in $HOMING_HOME with the address and key of its fake cloud's server
# The root of a machine's own disk. The fake machines share this computer's disk, so the server replaces this path with
# the machine's folder.
ROOT_DIR = "/fake-machine"
WORK_DIR = f"{ROOT_DIR}/work"

log = logging.getLogger(__name__)
_MOST_S = 86400
_DESCRIBE_EVERY_S = 7.5  # eight queries per minute, which is enough while waiting for an instance
_STATES: dict[str, InstanceState] = {
    "requested": "requested",
    "booting": "booting",
    "ready": "ready",
    "preempting": "ready",  # still running: if it were destroyed now, its last checkpoint would be lost
    "deleting": "destroying",
    "deleted": "gone",
}
_ENDED_BY = {
    "preempted": "preempted by the provider",
    "guard": "ended by the provider's spend guard",
    "deleted": "deleted",
}


class Fake:
    name = "fake"
    page = ""

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world = home, world
        self._prefix = owner_prefix(owner)
        self._ours: set[str] = set()  # ids of instances that this process has seen with our mark
        self._looked: dict[str, tuple[float, Instance]] = {}

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        return bool(world.environment().get(URL_ENV)) or world.exists(home / SERVER)

    # --- properties of this cloud ---

    def account(self) -> str:
        return str(self._about["account"])

    @property
    def guard(self) -> str:
        return "The fake cloud ends an instance at the limit." if self._about["has_guard"] else ""

    @property
    def cannot(self) -> dict[Feature, str]:
        lacking: dict[Feature, str] = {
            "ssh": "A fake instance is a folder and processes on this computer; there is no SSH.",
            "multi_node": "The fake cloud rents single instances.",
        }
        if not self._about["has_guard"]:
            lacking["native_deadline"] = "This fake cloud has no timer: only the agent ends an instance."
            lacking["native_spend_limit"] = "This fake cloud has no spend guard."
        return lacking

    @property
    def settle_s(self) -> float:
        return float(read_figure(self._about["settle_s"], _MOST_S) or 0)

    # --- offers ---

    def offers(self, needs: Needs) -> list[Offer]:
        found = [self._offer(body) for body in self._api.items("/offers", "offers")]
        return [offer for offer in found if offer is not None and not lack(offer, needs)]

    def place(self, mark: str) -> Place:
        """Return the machine's folders and the request that ends it. The request's key can end only this machine."""
        end = EndBilling(
            kind="request",
            method="DELETE",
            url=f"{self._api.url}/instances/self",
            header_env={KEY_HEADER: INSTANCE_KEY_ENV},
        )
        return Place(WORK_DIR, self._world.python(), end)

    def plan(self, offer: Offer, order: Order) -> Request:
        boot = dataclasses.replace(order.boot, notice_url=f"{self._api.url}/notices/{order.mark}")
        return Request(
            provider=self.name,
            mark=order.mark,
            offer=offer,
            order=dataclasses.replace(order, boot=boot),
            argv=(self._world.python(), "-I", f"{WORK_DIR}/agent.zip", f"{WORK_DIR}/{file_names.BOOT}"),
            env={},
        )

    # --- instances ---

    @legible
    def create(self, request: Request) -> Instance:
        body = self._create_body(request)
        once = Once(self.name, self.settle_s, self._world, self._with_mark, self._end)
        made = once.create(request, lambda: self._api.post("/instances", body), _refused)
        return dataclasses.replace(self._instance(made), twins=tuple(once.twins))

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Do nothing, because the create call delivered everything."""

    @legible
    def describe(self, instance_id: str) -> Instance:
        at, known = self._looked.get(instance_id, (0.0, None))
        if known is not None and self._world.monotonic() - at < _DESCRIBE_EVERY_S:
            return known
        body = self._api.find(f"/instances/{quote(instance_id, safe='')}")
        if body is None:
            return Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="unknown to the provider")
        return self._instance(self._own(body))

    @legible
    def list_owned(self) -> list[Instance]:
        bodies = self._with_mark(self._prefix, is_prefix=True)
        self._looked.clear()  # clear the cache, so that an instance that is no longer listed is looked up again
        found = [self._instance(body) for body in bodies]
        return [instance for instance in found if instance.state != "gone"]

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        path = f"/instances/{quote(instance_id, safe='')}"
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # delete the instance even if its data is unreadable
                body = self._api.find(path)
                if body is not None:
                    self._own(body)
        self._api.delete(path)

    def log(self, instance_id: str) -> str:
        body = self._api.find(f"/instances/{quote(instance_id, safe='')}/log")
        return "" if body is None else str(body["log"])

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Set the instance's maximum total cost and its latest end time by our clock."""
        if not self._about["has_guard"]:
            return  # `cannot` already reports that there is no guard, and launch warns the user
        body: dict[str, Any] = {"spend_limit_usd": str(spend_limit_usd), "end_by": None}
        if end_by is not None:
            # The provider's guard uses the provider's clock, which may differ from ours.
            body["end_by"] = end_by + self._skew_s(self._api.get("/account"))
        try:
            self._api.put(f"/instances/{quote(instance_id, safe='')}/guard", body)
        except Unwelcome as exc:
            if exc.status != 404:  # an instance that is gone needs no guard
                raise

    # --- other resources ---

    @legible
    def list_resources(self) -> list[Resource]:
        found = []
        for kind in ("volume", "key"):
            bodies = self._api.items(f"/{kind}s?prefix={quote(self._prefix)}", f"{kind}s")
            found += [self._resource(kind, body) for body in bodies]
        return found

    def destroy_resource(self, resource: Resource) -> None:
        if not resource.mark.startswith(self._prefix):
            raise _not_ours(resource.id, self._prefix)
        self._api.delete(f"/{resource.kind}s/{quote(resource.id, safe='')}")

    def connection(self, instance_id: str) -> Connection | None:
        return None

    # --- helpers, in the order they are called ---

    @cached_property
    def _api(self) -> Api:
        # The home directory's own server takes precedence over the environment, because a rehearsal must use the cloud
        # that it started.
        env, path = self._world.environment(), self._home / SERVER
        if not self._world.exists(path) and env.get(URL_ENV):
            return self._open(api_address(env, URL_ENV, ""), env.get(KEY_ENV, ""))
        if not self._world.exists(path):
            raise UsageError(
                what="No fake cloud is running.",
                why=f"{URL_ENV} is not set, and {path} does not exist.",
                fix="Start one for the duration of a rehearsal: homing rehearse RUN",
            )
        server = json.loads(self._world.read(path))
        return self._open(server["url"], server["api_key"])

    def _open(self, url: str, key: str) -> Api:
        fix = f"Use the api_key from the server's server.json: export {KEY_ENV}=..."
        return Api("fake", url.rstrip("/"), {KEY_HEADER: key}, self._world, fix)

    @cached_property
    def _about(self) -> dict[str, Any]:
        return self._api.get("/account")

    def _offer(self, body: dict[str, Any]) -> Offer | None:
        """Return the offer, or None if its figures are implausible."""
        read = Figures(self.name)
        rate = read.rate("total_usd_per_hour", body["total_usd_per_hour"])
        shape = {name: read.whole(name, body[name]) for name in ("num_gpus", "num_cores", "memory_bytes", "disk_gb")}
        boot_s = read.seconds("boot_s", body["boot_s"], _MOST_S)
        known = {name: value for name, value in shape.items() if value is not None}
        if rate is None or boot_s is None or len(known) < len(shape):
            log.warning("Skipping offer %s: %s", body["name"], " ".join(read.problems))
            return None
        return Offer(
            provider=self.name,
            name=body["name"],
            device=body["device"],
            num_gpus=known["num_gpus"],
            num_cores=known["num_cores"],
            memory_bytes=known["memory_bytes"],
            rate_usd_per_hour=rate,
            disk_bytes=known["disk_gb"] * 10**9,
            boot_s=boot_s + 5.0,
            is_spot=body["is_spot"],
        )

    def _create_body(self, request: Request) -> dict[str, Any]:
        order, boot = request.order, request.order.boot
        files = {file.path: self._world.read(file.source) for file in order.files}
        files[file_names.BOOT] = codec.dumps(boot, indent=1).encode()
        body: dict[str, Any] = {
            "offer": request.offer.name,
            "name": request.mark,
            "argv": list(request.argv),
            "env": {**request.env, **order.secrets},
            "files": {path: base64.b64encode(data).decode("ascii") for path, data in files.items()},
        }
        if self._about["has_guard"]:
            # Set the guard in the create call itself, because this process may die before a separate call.
            guard: dict[str, Any] = {"spend_limit_usd": None, "end_by": None}
            if boot.spend_limit_usd is not None:
                # This guard acts after all others, but before the limit, because a disk may remain and keep billing.
                rate, before = request.offer.rate_usd_per_hour, Decimal(boot.spent_before_usd)
                kept_s = reserve_s(PROVIDER, allowed_s(rate, Decimal(boot.spend_limit_usd), before, 0.0))
                guard["spend_limit_usd"] = str(Decimal(boot.spend_limit_usd) - before - meter.cost(rate, kept_s))
            if boot.time_limit_s > 0:
                skew_s = self._skew_s(self._api.get("/account"))
                guard["end_by"] = boot.started_at + boot.time_limit_s + meter.MARGIN_S + skew_s
            body["guard"] = guard
        return body

    def _with_mark(self, mark: str, *, is_prefix: bool = False) -> list[dict[str, Any]]:
        """Return the live instances with this mark, oldest first, because the oldest of several duplicates is kept."""
        bodies = self._api.items(f"/instances?prefix={quote(mark)}", "instances")
        found = [body for body in bodies if body["name"] == mark or (is_prefix and body["name"].startswith(mark))]
        return sorted(found, key=lambda body: (read_moment(body["created_at"]) or 0.0, body["id"]))

    def _end(self, instance_id: str) -> None:
        self._api.delete(f"/instances/{quote(instance_id, safe='')}")

    def _own(self, body: dict[str, Any]) -> dict[str, Any]:
        if not str(body["name"]).startswith(self._prefix):
            raise _not_ours(str(body["id"]), self._prefix)
        return body

    def _instance(self, body: dict[str, Any]) -> Instance:
        state = _STATES.get(body["state"], "unknown")
        skew_s, is_over, read = self._skew_s(body), state == "gone", Figures(self.name)
        now = self._world.now() + skew_s
        created_at = read.moment("created_at", body["created_at"], now)
        ended_at = read.moment("ended_at", body["ended_at"], now)
        instance = Instance(
            id=body["id"],
            mark=body["name"],
            provider=self.name,
            state=state,
            billing="no" if is_over else "yes",
            rate_usd_per_hour=read.rate("rate_usd_per_hour", body["rate_usd_per_hour"]) or Decimal(0),
            created_at=created_at - skew_s if created_at is not None else None,
            ended_at=ended_at - skew_s if ended_at is not None else None,
            spend_usd=read.usd("spend_usd", body["spend_usd"]),
            is_running=bool(body["is_running"]) and not is_over,
            detail=_ENDED_BY.get(body["ended_by"], body["ended_by"]) or body["state"],
            problems=tuple(read.problems),
        )
        self._ours.add(instance.id)
        self._looked.pop(instance.id, None)
        if state in ("requested", "booting", "ready", "unknown"):
            self._looked[instance.id] = (self._world.monotonic(), instance)
        return instance

    def _skew_s(self, body: dict[str, Any]) -> float:
        """Return how many seconds the provider's clock is ahead of ours."""
        now = read_moment(body["now"])
        return 0.0 if now is None else now - self._world.now()

    def _resource(self, kind: str, body: dict[str, Any]) -> Resource:
        read = Figures(self.name)
        rate = read.rate("rate_usd_per_hour", body.get("rate_usd_per_hour")) or Decimal(0)
        created_at = read.moment("created_at", body["created_at"], self._world.now())
        return Resource(kind, body["id"], body["name"], self.name, rate, created_at, " ".join(read.problems))


def _refused(exc: Unwelcome, request: Request) -> NoOffer | ProviderRefused:
    if exc.status != 400 or "available" not in exc.text:
        return exc
    return NoOffer(
        what=f"fake cannot start {request.offer.name} now.",
        why=exc.text,
        fix=f"Choose another offer: {request.order.words.to('plan')}",
    )


def _not_ours(thing_id: str, prefix: str) -> ProviderRefused:
    return ProviderRefused(
        what=f"{thing_id} does not belong to this homing home directory.",
        why=f"The names of its resources start with {prefix!r}.",
        fix="List its resources: homing runs",
    )
