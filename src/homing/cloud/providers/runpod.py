"""RunPod by its REST API v2: pods that are containers, in its own data centers or on other people's machines.

    RUNPOD_API_KEY, else ~/.runpod/config.toml as runpodctl writes it      the account's key; it stays at home
    RUNPOD_API_URL                                                         another address of the API, for tests

RunPod has no timer and no spend limit for a pod, it restarts a container that has ended, and create is not idempotent:
so the pod's first command is our own timer, the pod ends itself with the key that RunPod put into it, and we create
only after looking for our mark. Its account-wide list of SSH keys is never touched: our key is in the pod's own
environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from homing import __version__
from homing.api_address import api_address
from homing.cloud import boot as booting
from homing.cloud import startup
from homing.cloud.checks import Check, fault, ok, warning
from homing.cloud.doctor_balance import Balance
from homing.cloud.figures import Figures, read_port
from homing.cloud.mark import owner_prefix
from homing.cloud.providers import runpod_catalogue, runpod_pod
from homing.cloud.providers.base import (
    KEY_ACCOUNT,
    Connection,
    Feature,
    Instance,
    Needs,
    Offer,
    Order,
    Place,
    Request,
    Resource,
    key_account,
    lack,
    wait_until,
)
from homing.cloud.providers.once import TRIES, Once
from homing.cloud.providers.rest import Api, Unwelcome, legible
from homing.cloud.providers.runpod_balance import read_account, read_balance
from homing.cloud.providers.runpod_catalogue import ANYWHERE, COUNTS, Choice, Wanted
from homing.cloud.providers.runpod_log import read_log
from homing.cloud.providers.runpod_refusals import CONSOLE, not_ours, refused
from homing.cloud.providers.runpod_start import EVERY_S, Start
from homing.cloud.providers.runpod_volume import (
    Volume,
    check_volume,
    find_volume,
    list_volumes,
    make_volume,
    monthly_usd,
    resource,
)
from homing.cloud.ssh_keys import find_host_key, host_key, known_hosts_line, login_key
from homing.config.clouds.runpod import IMAGE, RunpodCloud, cuda_of_image
from homing.errors import ProviderRefused, ProviderSilent, UsageError
from homing.redact import register
from homing.units import format_bytes, format_usd
from homing.wire.limit import DEAD_MAN, allowed_s, reserve_s
from homing.world import World

__all__ = ["KEY_ENV", "URL_ENV", "Runpod"]

log = logging.getLogger(__name__)
KEY_ENV = runpod_pod.KEY_ENV
URL_ENV = "RUNPOD_API_URL"
_URL = "https://api.runpod.io/v2"
_DESCRIBE_EVERY_S = 7.5  # the account has some 60 requests a minute for all that it does
_BILL = "/billing/pods?bucketSize=day&lastN=31"
_BILL_EVERY_S = 300.0
_WHOSE_EVERY_S = 300.0
_SSH_S = 120.0  # until a pod that was just made shows its address
_TIMER_S = 300.0  # beyond the start limit: then the pod's own timer ends what nobody took over
_LATE_S = 120.0  # beyond the start limit, clocks being what they are: who begins after that has been here before
_SAME_CLOCK_S = 10.0  # an answer's Date has whole seconds and was a while on its way: less is no difference
_ENVIRONMENT_BYTES = 15 * 10**9  # torch with its CUDA parts, unpacked, and what pip keeps meanwhile
_LEAST_DISK_GB = 20
_SPARE = 1.1
_MOST_ENV = 50


@dataclasses.dataclass(frozen=True)
class _Bill:
    """What RunPod says a pod has cost; None where it has no figure yet, or the key may not see it."""

    at: float = -math.inf
    usd: Decimal | None = None
    problems: tuple[str, ...] = ()


class Runpod:
    name = "runpod"
    page = f"{CONSOLE}/pods"
    guard = ""
    settle_s = 20.0
    num_creates = TRIES
    cannot: Mapping[Feature, str] = {
        "native_deadline": "RunPod has no timer for a pod: only the pod itself and the guard at home end it.",
        "native_spend_limit": "RunPod has no spend limit for a pod: only the pod itself and the guard at home hold it.",
        "spot": "RunPod's API has no spot pods any more.",
        "multi_node": "homing rents single pods at RunPod, no clusters.",
        "file_store": "A pod at RunPod cannot read a folder on this computer.",
    }

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world = home, world
        self._prefix = owner_prefix(owner)
        self._told: dict[str, Any] | None = None  # cloud.runpod of the run file
        self._ours: set[str] = set()  # ids that this process has seen under our mark
        self._looked: dict[str, tuple[float, Instance]] = {}
        self._made: dict[str, float] = {}  # ids that this process created, and when
        self._bills: dict[str, _Bill] = {}
        self._whose = (0.0, "")  # when it was asked for, and what was told

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        return bool(_find_key(world))

    def configure(self, settings: dict[str, Any]) -> None:
        self._told = {**_DEFAULTS, **settings}

    def cautions(self) -> list[str]:
        """What a person must hear before anything is rented."""
        told, said = self._settings, []
        if told["volume"]:
            volume = self._volume()
            num_gb = volume.num_gb if volume else math.ceil(told["volume_size"] / 10**9)
            usd = monthly_usd(num_gb, volume.kind if volume else "STANDARD")
            which = f"{'uses' if volume else 'makes'} the network volume {told['volume']} of {num_gb} GB"
            said.append(f"runpod {which}: {format_usd(usd)} a month beside the limit, until you delete it.")
        if "community" in self._clouds() and self._told is not None:
            said.append("cloud.runpod.cloud allows other people's machines: whoever owns one can read what is on it.")
        if not told["must_end_itself"]:
            said.append(
                "cloud.runpod.must_end_itself is false: where a pod may not end itself, only a guard at home can."
            )
        return said

    def checks(self) -> list[Check]:
        """For `homing doctor`: what shows only when it is needed. The right to start a pod shows at a launch."""
        found = [ok("runpod.bill", "The key may read the bill: the ledger is compared with it.")]
        try:
            self._api.items(_BILL, "records")
        except Unwelcome as exc:
            text, page = f"The key may not read the bill: {exc.text}", f"{CONSOLE}/user/settings"
            fix = "Give the key the right to read billing; without it only our own meter counts."
            found = [warning("runpod.bill", text, fix, page)]
        if self._settings["volume"]:
            try:
                volume = self._volume()
                where = f"is in {volume.data_center}" if volume else "will be made by the first launch"
                found.append(ok("runpod.volume", f"{self._settings['volume']} {where}."))
            except UsageError as exc:
                found.append(fault("runpod.volume", f"{exc.what} {exc.why}", exc.fix, f"{CONSOLE}/user/storage"))
        return found

    def balance(self) -> Balance | None:
        return read_balance(self._graphql)

    def account(self) -> str:
        """By its id; where the key may not ask for it, by the key: asked again now and then, for that may have been
        a bad moment of GraphQL, which refuses and fails in the same words."""
        now, (at, told) = self._world.monotonic(), self._whose
        if not told or (told.startswith(KEY_ACCOUNT) and now - at >= _WHOSE_EVERY_S):
            told = read_account(self._graphql) or key_account(self.name, self._key)
            self._whose = (now, told)
        return told

    def account_names(self) -> tuple[str, ...]:
        return self.account(), key_account(self.name, self._key)

    # --- what it would rent ---

    def offers(self, needs: Needs) -> list[Offer]:
        disk_gb = self._disk_gb(needs)
        wanted = Wanted(
            counts=(needs.num_gpus,) if needs.num_gpus else COUNTS,
            clouds=self._clouds(),
            disk_gb=disk_gb,
            free_bytes=disk_gb * 10**9 - _ENVIRONMENT_BYTES,
            data_centers=self._data_centers(),
            min_cuda=self._min_cuda,
        )
        return [offer for offer in runpod_catalogue.find(self._api, wanted) if not lack(offer, needs)]

    def place(self, mark: str) -> Place:
        place = startup.place(runpod_pod.end_billing(self._url))
        if not self._settings["volume"]:
            return place
        # What was installed and fetched once is there for the next pod.
        return dataclasses.replace(place, cache_dir=f"{self._settings['volume_path']}/cache/homing")

    def plan(self, offer: Offer, order: Order) -> Request:
        env = dict(line.split("=", 1) for line in self._settings["env"])
        if len(env) + 1 > _MOST_ENV:
            raise UsageError(
                what=f"cloud.runpod.env has {len(env)} variables.",
                why=f"RunPod takes {_MOST_ENV}, and one of them is ours.",
                fix="cloud.runpod.env",
            )
        argv = tuple(booting.agent_argv("python3", startup.WORK_DIR))
        return Request(self.name, order.mark, offer, order, argv, env)

    # --- its life ---

    @legible
    def create(self, request: Request) -> Instance:
        body: dict[str, Any] = {}

        def post() -> dict[str, Any]:
            body.update({} if body else self._create_body(request))
            return self._api.post("/pods", body)

        once = self._once
        made = once.create(request, post, refused)
        self._made[str(made["id"])] = self._world.monotonic()
        instance = self._instance(made)
        # Not dearer than it was offered, or not told before it runs: counted as it was offered; hand_over looks again.
        rate = max(instance.rate_usd_per_hour, request.offer.rate_usd_per_hour)
        return dataclasses.replace(instance, rate_usd_per_hour=rate, twins=tuple(once.twins))

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Waits until the pod can be reached, then brings files and secrets, and asks what the pod's own key may do."""
        limit_s = min(float(self._settings["start_limit"]), request.order.start_within_s)
        start = Start(request, instance_id, limit_s, self._world, self.page)
        connection = self._connection(start.reach(lambda: self._find(instance_id), self._instance))
        assert connection is not None, "the host key of a launch is made before its create call"
        start.hand_over(connection)
        start.check_right(connection, must_end_itself=self._settings["must_end_itself"])

    @legible
    def describe(self, instance_id: str) -> Instance:
        at, known = self._looked.get(instance_id, (0.0, None))
        if known is not None and self._world.monotonic() - at < _DESCRIBE_EVERY_S:
            return known
        pod = self._find(instance_id)
        if pod is not None:
            return self._instance(self._own(pod))
        made_at = self._made.get(instance_id)
        if made_at is not None and self._world.monotonic() - made_at < self.settle_s and known is not None:
            return known  # made a moment ago, and not shown yet
        gone = Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="not known to RunPod any more")
        bill = self._bill(instance_id)
        return dataclasses.replace(gone, spend_usd=bill.usd, problems=bill.problems)

    @legible
    def list_owned(self) -> list[Instance]:
        pods = [pod for pod in self._pods() if str(pod.get("name")).startswith(self._prefix)]
        self._looked.clear()  # what is no longer listed must be looked at afresh
        found = [self._instance(pod) for pod in pods]
        return [instance for instance in found if instance.state != "gone"]

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        self._made.pop(instance_id, None)
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # not shown, or not legibly: it is asked for all the same
                pod = self._find(instance_id)
                if pod is not None:
                    self._own(pod)
        self._api.delete(_path(instance_id))

    def log(self, instance_id: str) -> str:
        return read_log(self._api, f"{_path(instance_id)}/logs")

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """It has none of its own; the agent and the dead-man learn a new limit through the store."""

    # --- beside instances ---

    @legible
    def list_resources(self) -> list[Resource]:
        return [resource(each) for each in list_volumes(self._api) if each.name.startswith(self._prefix)]

    def destroy_resource(self, resource: Resource) -> None:
        if not resource.mark.startswith(self._prefix):
            raise not_ours(resource.id, self._prefix)
        self._api.delete(f"/network-volumes/{quote(resource.id, safe='')}")

    def connection(self, instance_id: str) -> Connection | None:
        """Asked for afresh each time: a pod that was stopped and started has another port."""
        found: list[dict[str, Any] | None] = [None]

        def is_settled() -> bool:
            found[0] = self._find(instance_id)
            pod = found[0]
            return pod is None or pod["ssh"]["direct"] is not None or not self._instance(pod).is_running

        wait_until(is_settled, timeout_s=_SSH_S, every_s=EVERY_S, world=self._world)
        return self._connection(found[0]) if found[0] is not None else None

    # --- helpers, in the order they are called ---

    @property
    def _url(self) -> str:
        return api_address(self._world.environment(), URL_ENV, _URL)

    @cached_property
    def _key(self) -> str:
        """Read once: the file may come to hold another account's while this process asks with the first."""
        key = _find_key(self._world)
        if not key:
            raise UsageError(
                what="There is no key for RunPod here.",
                why=f"{KEY_ENV} is not set, and there is no ~/.runpod/config.toml with an apikey.",
                fix=f"Make one at {CONSOLE}/user/settings, then: export {KEY_ENV}=...   or: homing setup runpod",
            )
        return key

    @cached_property
    def _api(self) -> Api:
        headers = {"authorization": f"Bearer {self._key}", "user-agent": f"homing/{__version__}"}
        fix = f"Check {KEY_ENV}, and the rights of that key: {CONSOLE}/user/settings"
        return Api("runpod", self._url, headers, self._world, fix)

    @property
    def _graphql(self) -> Api:
        return dataclasses.replace(self._api, url=self._url.removesuffix("/v2"))

    @property
    def _settings(self) -> dict[str, Any]:
        return self._told if self._told is not None else _DEFAULTS

    def _disk_gb(self, needs: Needs) -> int:
        """What the run file says, if that holds what the run needs; else what it needs, with some room."""
        needed = math.ceil((needs.disk_bytes + _ENVIRONMENT_BYTES) * _SPARE / 10**9)
        if self._settings["disk"] is None:
            return max(_LEAST_DISK_GB, needed)
        given = int(self._settings["disk"])
        if given < needs.disk_bytes + _ENVIRONMENT_BYTES:
            raise UsageError(
                what=f"cloud.runpod.disk of {format_bytes(given)} is too small for this run.",
                why=f"Data and checkpoints take {format_bytes(needs.disk_bytes)}, the environment"
                f" {format_bytes(_ENVIRONMENT_BYTES)}.",
                fix=f"cloud.runpod.disk: {needed}GB   or leave it out",
            )
        return math.ceil(given / 10**9)

    def _clouds(self) -> tuple[str, ...]:
        # Without a run file everything is shown; with one, other people's machines only where it says so.
        cloud = "any" if self._told is None else self._told["cloud"]
        if self._settings["volume"]:
            return ("secure",)
        return ("secure", "community") if cloud == "any" else (cloud,)

    def _data_centers(self) -> tuple[str, ...]:
        named = tuple(self._settings["data_centers"])
        volume = self._volume()
        return named if volume is None else (volume.data_center,)

    def _volume(self) -> Volume | None:
        """The one that the run file names; None where it names none, or one that create will make."""
        told = self._settings
        if not told["volume"]:
            return None
        volume = find_volume(list_volumes(self._api), told["volume"], self._prefix)
        if volume is not None:
            check_volume(volume, told)
        elif not told["volume_size"] or len(told["data_centers"]) != 1:
            raise UsageError(
                what=f"There is no network volume {told['volume']!r} at runpod.",
                why="To make one, its size and its one data center must be known: a volume cannot move.",
                fix="cloud.runpod: {volume_size: 1TB, data_centers: [EU-RO-1]}   or the id of one that is there",
            )
        return volume

    def _create_body(self, request: Request) -> dict[str, Any]:
        told = self._settings
        key = login_key(self._home, self._world).public_line
        end_within_s, begin_by = self._times(request)
        script = startup.startup_script(
            mark=request.mark,
            end_command=runpod_pod.end_command(self._url),
            end_within_s=end_within_s,
            login_key=key,
            host_key=host_key(self._home, request.mark, self._world),
            is_container=True,
            begin_by=begin_by,
            prepare=runpod_pod.probe_command(self._url),
        )
        volume = self._volume_to_mount()
        return runpod_pod.body_of(
            request.mark,
            Choice.of(request.offer.name),
            {
                **told,
                "image": told["image"] or ("" if told["template"] else IMAGE),
                "disk_gb": math.ceil((request.offer.disk_bytes + _ENVIRONMENT_BYTES) / 10**9),
                "env": {**request.env, "PUBLIC_KEY": key},
                "data_centers": [] if request.offer.region == ANYWHERE else [request.offer.region],
                "volume_id": volume.id if volume else "",
            },
            args=runpod_pod.args_of(script),
            min_cuda=self._min_cuda,
        )

    @property
    def _min_cuda(self) -> str:
        return str(self._settings["min_cuda"] or cuda_of_image(self._settings["image"]))

    def _times(self, request: Request) -> tuple[float, float]:
        """How long the pod's own timer waits for somebody to take over, and until when a first command may begin.

        A restart empties the disk, so that one which begins in time may be the second; also its timer, which then
        starts anew, must be over before the limit. It goes by the clock there, and ours may be hours away from that.
        """
        boot, start_s = request.order.boot, float(self._settings["start_limit"])
        limit = None if boot.spend_limit_usd is None else Decimal(boot.spend_limit_usd)
        rate, before = request.offer.rate_usd_per_hour, Decimal(boot.spent_before_usd)
        allowed = allowed_s(rate, limit, before, boot.time_limit_s)
        usable = allowed - reserve_s(DEAD_MAN, allowed) if math.isfinite(allowed) else math.inf
        end_within_s = min(start_s + _TIMER_S, usable / 2)
        skew_s = self._api.skew_s if abs(self._api.skew_s) > _SAME_CLOCK_S else 0.0
        return end_within_s, boot.started_at + skew_s + min(start_s + _LATE_S, usable - end_within_s)

    def _volume_to_mount(self) -> Volume | None:
        told, volume = self._settings, self._volume()
        if volume is not None or not told["volume"]:
            return volume
        num_gb = math.ceil(told["volume_size"] / 10**9)
        return make_volume(self._api, f"{self._prefix}{told['volume']}", num_gb, told["data_centers"][0], self.settle_s)

    @property
    def _once(self) -> Once:
        return Once(
            self.name, self.settle_s, self._world, self._with_mark, lambda pod_id: self._api.delete(_path(pod_id))
        )

    def _pods(self) -> list[dict[str, Any]]:
        return self._api.items("/pods", "pods")

    def _find(self, instance_id: str) -> dict[str, Any] | None:
        return self._api.find(_path(instance_id))

    def _with_mark(self, mark: str) -> list[dict[str, Any]]:
        """What lives under a mark, the oldest first: of two under one mark the first is the one that is kept."""
        found = [pod for pod in self._pods() if pod.get("name") == mark and pod["status"] != "TERMINATED"]
        return sorted(found, key=lambda pod: (str(pod["createdAt"]), str(pod["id"])))

    def _connection(self, pod: dict[str, Any]) -> Connection | None:
        direct, key = pod["ssh"]["direct"], find_host_key(self._home, str(pod["name"]), self._world)
        if direct is None or key is None:
            return None
        host, port = str(direct["host"]), read_port(direct["port"])
        if port is None:
            raise ProviderSilent(
                what=f"runpod says that the SSH port of {pod['id']} is {direct['port']!r}.",
                why="That is no port, so the pod cannot be reached.",
                fix=f"Try again in a minute. See {self.page}",
            )
        private = str(login_key(self._home, self._world).private_path)
        return Connection(str(direct["username"]), host, port, private, known_hosts_line(key, host, port))

    def _own(self, pod: dict[str, Any]) -> dict[str, Any]:
        if not str(pod["name"]).startswith(self._prefix):
            raise not_ours(str(pod["id"]), self._prefix)
        return pod

    def _instance(self, pod: dict[str, Any]) -> Instance:
        bill = self._bill(str(pod["id"]))
        shown = runpod_pod.instance_of(pod, page=self.page, now=self._world.now(), spend_usd=bill.usd)
        instance = dataclasses.replace(shown, problems=shown.problems + bill.problems)
        if instance.mark.startswith(self._prefix):
            self._ours.add(instance.id)
        self._looked.pop(instance.id, None)
        if instance.is_running:
            self._looked[instance.id] = (self._world.monotonic(), instance)
        return instance

    def _bill(self, instance_id: str) -> _Bill:
        """RunPod's own figure, which is late, or the last one that can be right."""
        now, known = self._world.monotonic(), self._bills.get(instance_id, _Bill())
        if now - known.at < _BILL_EVERY_S:
            return known
        usd, problems = None, tuple[str, ...]()
        try:
            usd, problems = self._read_bill(instance_id)
        except ProviderRefused as exc:  # no reason to know less of the pod itself; our own meter counts on
            log.info("runpod told nothing of its bill: %s", exc.why)
        self._bills[instance_id] = _Bill(now, usd or known.usd, problems)
        return self._bills[instance_id]

    @legible
    def _read_bill(self, instance_id: str) -> tuple[Decimal | None, tuple[str, ...]]:
        records = self._api.items(f"{_BILL}&podId={quote(instance_id, safe='')}", "records")
        read = Figures("runpod")
        amounts = [read.usd("totalAmount of its bill", record["totalAmount"]) for record in records]
        told = [amount for amount in amounts if amount is not None]
        return (sum(told, Decimal(0)) if len(told) == len(amounts) else None), tuple(read.problems)


_DEFAULTS: dict[str, Any] = RunpodCloud().model_dump()


def _find_key(world: World) -> str:
    env = world.environment()
    if env.get(KEY_ENV):
        return env[KEY_ENV]
    path = Path(env.get("HOME", "/")) / ".runpod" / "config.toml"
    try:
        if not world.exists(path):
            return ""
        return register(str(tomllib.loads(world.read(path).decode()).get("apikey", "")))
    except (OSError, ValueError):
        return ""


def _path(instance_id: str) -> str:
    return f"/pods/{quote(instance_id, safe='')}"
