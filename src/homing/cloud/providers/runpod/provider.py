"""RunPod as a provider, through its REST API v2. Pods are containers in RunPod's data centers or on community hosts.

    RUNPOD_API_KEY, else ~/.runpod/config.toml as written by runpodctl     the account's key, which stays local
    RUNPOD_API_URL                                                         an alternative API address, for tests

RunPod has no timer and no spend limit for a pod, it restarts a container that has ended, and its create call is not
idempotent. So the pod's first command starts our own timer, the pod terminates itself with the key that RunPod gave it,
and we create a pod only after checking that no pod has our mark. The account-wide list of SSH keys is never changed,
because our key is in the pod's own environment.
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
from homing.cloud.check_numbers import Figures, read_port
from homing.cloud.contact.ssh_access import find_host_key, host_key, known_hosts_line, login_key
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import startup_script
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
from homing.cloud.providers.runpod import create_request
from homing.cloud.providers.runpod import offers as runpod_catalogue
from homing.cloud.providers.runpod.api import CONSOLE, not_ours, read_account, read_balance, read_log, refused
from homing.cloud.providers.runpod.hand_over import EVERY_S, Start
from homing.cloud.providers.runpod.offers import ANYWHERE, COUNTS, Choice, Wanted
from homing.cloud.providers.runpod.storage import (
    Volume,
    check_volume,
    find_volume,
    list_volumes,
    make_volume,
    monthly_usd,
    resource,
)
from homing.config.schema.provider_settings import RUNPOD_IMAGE, RunpodCloud, cuda_of_image
from homing.doctor.check import Balance, Check, fault, ok, warning
from homing.errors import ProviderRefused, ProviderSilent, UsageError
from homing.redact import register
from homing.units import format_bytes, format_usd
from homing.wire.guard_timing import DEAD_MAN, allowed_s, reserve_s
from homing.world import World

__all__ = ["KEY_ENV", "URL_ENV", "Runpod"]

log = logging.getLogger(__name__)
KEY_ENV = create_request.KEY_ENV
URL_ENV = "RUNPOD_API_URL"
_URL = "https://api.runpod.io/v2"
_DESCRIBE_EVERY_S = 7.5  # RunPod allows about 60 requests per minute per account
_BILL = "/billing/pods?bucketSize=day&lastN=31"
_BILL_EVERY_S = 300.0
_ACCOUNT_EVERY_S = 300.0
_SSH_S = 120.0  # how long to wait for a new pod's address
_TIMER_S = 300.0  # if there is no hand-over, the pod terminates itself this long after the start limit
# Tolerance for clock differences. If a pod's first command starts later than this after the start limit, it counts as
# a restart.
_LATE_S = 120.0
_SAME_CLOCK_S = 10.0  # smaller clock differences are ignored, because a Date header has whole seconds and arrives late
_ENVIRONMENT_BYTES = 15 * 10**9  # disk space for torch with its CUDA libraries, plus pip's temporary files
_LEAST_DISK_GB = 20
_SPARE = 1.1
_MOST_ENV = 50


@dataclasses.dataclass(frozen=True)
class _Bill:
    """What RunPod has billed for a pod. `usd` is None if the amount is not known yet or the key may not read it."""

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
        "native_deadline": "RunPod has no timer for pods: only the pod's agent and the local guard end it.",
        "native_spend_limit": "RunPod has no spend limit for pods: only the agent and the local guard enforce it.",
        "spot": "RunPod's API no longer offers spot pods.",
        "multi_node": "homing rents single pods on RunPod, not clusters.",
        "file_store": "A RunPod pod cannot read a local folder.",
    }

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world = home, world
        self._prefix = owner_prefix(owner)
        self._configured: dict[str, Any] | None = None  # the run file's cloud.runpod section
        self._ours: set[str] = set()  # ids of pods that this process has seen with our mark
        self._looked: dict[str, tuple[float, Instance]] = {}
        self._made: dict[str, float] = {}  # ids of pods created by this process -> time of creation
        self._bills: dict[str, _Bill] = {}
        self._account = (0.0, "")  # the time of the last account query, and its result

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        return bool(_find_key(world))

    def configure(self, settings: dict[str, Any]) -> None:
        self._configured = {**_DEFAULTS, **settings}

    def cautions(self) -> list[str]:
        """Return warnings that the user must see before anything is rented."""
        settings, said = self._settings, []
        if settings["volume"]:
            volume = self._volume()
            num_gb = volume.num_gb if volume else math.ceil(settings["volume_size"] / 10**9)
            usd = monthly_usd(num_gb, volume.kind if volume else "STANDARD")
            which = f"{'uses' if volume else 'creates'} the network volume {settings['volume']} of {num_gb} GB"
            said.append(f"runpod {which}: {format_usd(usd)} a month on top of the spend limit, until you delete it.")
        if "community" in self._clouds() and self._configured is not None:
            said.append("cloud.runpod.cloud allows community hosts, whose owners can read the data on them.")
        if not settings["must_end_itself"]:
            said.append(
                "cloud.runpod.must_end_itself is false:"
                " if a pod cannot terminate itself, only the local guard can terminate it."
            )
        return said

    def checks(self) -> list[Check]:
        """Run the checks for `homing doctor`. Only a launch can show whether the key is allowed to start a pod."""
        found = [ok("runpod.bill", "The key can read billing data: homing compares the ledger with it.")]
        try:
            self._api.items(_BILL, "records")
        except Unwelcome as exc:
            text, page = f"The key cannot read billing: {exc.text}", f"{CONSOLE}/user/settings"
            fix = "Grant the key read access to billing; without it costs come from homing's own meter only."
            found = [warning("runpod.bill", text, fix, page)]
        if self._settings["volume"]:
            try:
                volume = self._volume()
                where = f"is in {volume.data_center}" if volume else "is created by the first launch"
                found.append(ok("runpod.volume", f"{self._settings['volume']} {where}."))
            except UsageError as exc:
                found.append(fault("runpod.volume", f"{exc.what} {exc.why}", exc.fix, f"{CONSOLE}/user/storage"))
        return found

    def balance(self) -> Balance | None:
        return read_balance(self._graphql)

    def account(self) -> str:
        """Return the account's id, or a name derived from the key if the key may not query the id.

        In the latter case the id is queried again from time to time, because GraphQL does not distinguish a temporary
        failure from a refusal.
        """
        now, (at, account) = self._world.monotonic(), self._account
        if not account or (account.startswith(KEY_ACCOUNT) and now - at >= _ACCOUNT_EVERY_S):
            account = read_account(self._graphql) or key_account(self.name, self._key)
            self._account = (now, account)
        return account

    def account_names(self) -> tuple[str, ...]:
        return self.account(), key_account(self.name, self._key)

    # --- offers ---

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
        place = startup_script.place(create_request.end_billing(self._url))
        if not self._settings["volume"]:
            return place
        # A cache on the volume lets later pods reuse installed packages and fetched files.
        return dataclasses.replace(place, cache_dir=f"{self._settings['volume_path']}/cache/homing")

    def plan(self, offer: Offer, order: Order) -> Request:
        env = dict(line.split("=", 1) for line in self._settings["env"])
        if len(env) + 1 > _MOST_ENV:
            raise UsageError(
                what=f"cloud.runpod.env has {len(env)} variables, which is too many.",
                why=f"RunPod allows {_MOST_ENV} per pod, and homing needs one of them.",
                fix="Remove some variables from cloud.runpod.env.",
            )
        argv = tuple(booting.agent_argv("python3", startup_script.WORK_DIR))
        return Request(self.name, order.mark, offer, order, argv, env)

    # --- instances ---

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
        # The rate that RunPod reports may be below the offered rate, or unknown until the pod runs. So use at least the
        # offered rate for now; hand_over checks the rate again.
        rate = max(instance.rate_usd_per_hour, request.offer.rate_usd_per_hour)
        return dataclasses.replace(instance, rate_usd_per_hour=rate, twins=tuple(once.twins))

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Wait until the pod can be reached, send files and secrets, and check that its own key can terminate it."""
        limit_s = min(float(self._settings["start_limit"]), request.order.start_within_s)
        start = Start(request, instance_id, limit_s, self._world, self.page)
        connection = self._connection(start.reach(lambda: self._find(instance_id), self._instance))
        assert connection is not None, "the host key of a launch is generated before its create call"
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
            return known  # the pod was just created and is not listed yet
        gone = Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="no longer known to RunPod")
        bill = self._bill(instance_id)
        return dataclasses.replace(gone, spend_usd=bill.usd, problems=bill.problems)

    @legible
    def list_owned(self) -> list[Instance]:
        pods = [pod for pod in self._pods() if str(pod.get("name")).startswith(self._prefix)]
        self._looked.clear()  # clear the cache, so that a pod that is no longer listed is looked up again
        found = [self._instance(pod) for pod in pods]
        return [instance for instance in found if instance.state != "gone"]

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        self._made.pop(instance_id, None)
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # delete the pod even if its data is unreadable
                pod = self._find(instance_id)
                if pod is not None:
                    self._own(pod)
        self._api.delete(_path(instance_id))

    def log(self, instance_id: str) -> str:
        return read_log(self._api, f"{_path(instance_id)}/logs")

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Do nothing: RunPod has no guard. The agent and the dead-man process read new limits from the store."""

    # --- other resources ---

    @legible
    def list_resources(self) -> list[Resource]:
        return [resource(each) for each in list_volumes(self._api) if each.name.startswith(self._prefix)]

    def destroy_resource(self, resource: Resource) -> None:
        if not resource.mark.startswith(self._prefix):
            raise not_ours(resource.id, self._prefix)
        self._api.delete(f"/network-volumes/{quote(resource.id, safe='')}")

    def connection(self, instance_id: str) -> Connection | None:
        """Return the SSH connection. Never use a cached address, because a restarted pod has a different port."""
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
        """Return the API key. It is read only once, because the file may later contain a different account's key."""
        key = _find_key(self._world)
        if not key:
            raise UsageError(
                what="No RunPod API key found.",
                why=f"{KEY_ENV} is not set, and there is no apikey in ~/.runpod/config.toml.",
                fix=f"Create a key at {CONSOLE}/user/settings, then: export {KEY_ENV}=...   or: homing setup runpod",
            )
        return key

    @cached_property
    def _api(self) -> Api:
        headers = {"authorization": f"Bearer {self._key}", "user-agent": f"homing/{__version__}"}
        fix = f"Check {KEY_ENV} and the permissions of that key: {CONSOLE}/user/settings"
        return Api("runpod", self._url, headers, self._world, fix)

    @property
    def _graphql(self) -> Api:
        return dataclasses.replace(self._api, url=self._url.removesuffix("/v2"))

    @property
    def _settings(self) -> dict[str, Any]:
        return self._configured if self._configured is not None else _DEFAULTS

    def _disk_gb(self, needs: Needs) -> int:
        """Return the disk size in GB: the one set in the run file, or else what the run needs plus headroom."""
        needed = math.ceil((needs.disk_bytes + _ENVIRONMENT_BYTES) * _SPARE / 10**9)
        if self._settings["disk"] is None:
            return max(_LEAST_DISK_GB, needed)
        given = int(self._settings["disk"])
        if given < needs.disk_bytes + _ENVIRONMENT_BYTES:
            raise UsageError(
                what=f"cloud.runpod.disk of {format_bytes(given)} is too small for this run.",
                why=f"Data and checkpoints need {format_bytes(needs.disk_bytes)}, and the Python environment needs"
                f" {format_bytes(_ENVIRONMENT_BYTES)}.",
                fix=f"Set cloud.runpod.disk: {needed}GB   or remove the setting",
            )
        return math.ceil(given / 10**9)

    def _clouds(self) -> tuple[str, ...]:
        # Without a run file, show all offers. With one, show community machines only if it allows them.
        cloud = "any" if self._configured is None else self._configured["cloud"]
        if self._settings["volume"]:
            return ("secure",)
        return ("secure", "community") if cloud == "any" else (cloud,)

    def _data_centers(self) -> tuple[str, ...]:
        named = tuple(self._settings["data_centers"])
        volume = self._volume()
        return named if volume is None else (volume.data_center,)

    def _volume(self) -> Volume | None:
        """Return the volume that the run file names, or None if it names none or if the volume does not exist yet."""
        settings = self._settings
        if not settings["volume"]:
            return None
        volume = find_volume(list_volumes(self._api), settings["volume"], self._prefix)
        if volume is not None:
            check_volume(volume, settings)
        elif not settings["volume_size"] or len(settings["data_centers"]) != 1:
            raise UsageError(
                what=f"runpod has no network volume {settings['volume']!r}.",
                why="To create it, homing needs a size and exactly one data center, because a volume cannot be moved.",
                fix="Set cloud.runpod: {volume_size: 1TB, data_centers: [EU-RO-1]}   or use an existing volume's id",
            )
        return volume

    def _create_body(self, request: Request) -> dict[str, Any]:
        settings = self._settings
        key = login_key(self._home, self._world).public_line
        end_within_s, begin_by = self._times(request)
        script = startup_script.startup_script(
            mark=request.mark,
            end_command=create_request.end_command(self._url),
            end_within_s=end_within_s,
            login_key=key,
            host_key=host_key(self._home, request.mark, self._world),
            is_container=True,
            begin_by=begin_by,
            prepare=create_request.probe_command(self._url),
        )
        volume = self._volume_to_mount()
        return create_request.body_of(
            request.mark,
            Choice.of(request.offer.name),
            {
                **settings,
                "image": settings["image"] or ("" if settings["template"] else RUNPOD_IMAGE),
                "disk_gb": math.ceil((request.offer.disk_bytes + _ENVIRONMENT_BYTES) / 10**9),
                "env": {**request.env, "PUBLIC_KEY": key},
                "data_centers": [] if request.offer.region == ANYWHERE else [request.offer.region],
                "volume_id": volume.id if volume else "",
            },
            args=create_request.args_of(script),
            min_cuda=self._min_cuda,
        )

    @property
    def _min_cuda(self) -> str:
        return str(self._settings["min_cuda"] or cuda_of_image(self._settings["image"]))

    def _times(self, request: Request) -> tuple[float, float]:
        """Return how long the pod's timer waits for the hand-over, and when the first command must have started.

        A restart empties the disk, so the first command cannot tell whether it has run before. If a restarted command
        is still within the latest start time, it starts a new timer, which must also fire before the limit. The latest
        start time is a time on RunPod's clock, which may differ from ours by hours.
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
        settings, volume = self._settings, self._volume()
        if volume is not None or not settings["volume"]:
            return volume
        num_gb = math.ceil(settings["volume_size"] / 10**9)
        return make_volume(
            self._api, f"{self._prefix}{settings['volume']}", num_gb, settings["data_centers"][0], self.settle_s
        )

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
        """Return the live pods with this mark, oldest first, because the oldest of several duplicates is kept."""
        found = [pod for pod in self._pods() if pod.get("name") == mark and pod["status"] != "TERMINATED"]
        return sorted(found, key=lambda pod: (str(pod["createdAt"]), str(pod["id"])))

    def _connection(self, pod: dict[str, Any]) -> Connection | None:
        direct, key = pod["ssh"]["direct"], find_host_key(self._home, str(pod["name"]), self._world)
        if direct is None or key is None:
            return None
        host, port = str(direct["host"]), read_port(direct["port"])
        if port is None:
            raise ProviderSilent(
                what=f"runpod reports an invalid SSH port, {direct['port']!r}, for {pod['id']}.",
                why="homing cannot connect to the pod without a valid port.",
                fix=f"Try again in a minute, or look at {self.page}",
            )
        private = str(login_key(self._home, self._world).private_path)
        return Connection(str(direct["username"]), host, port, private, known_hosts_line(key, host, port))

    def _own(self, pod: dict[str, Any]) -> dict[str, Any]:
        if not str(pod["name"]).startswith(self._prefix):
            raise not_ours(str(pod["id"]), self._prefix)
        return pod

    def _instance(self, pod: dict[str, Any]) -> Instance:
        bill = self._bill(str(pod["id"]))
        shown = create_request.instance_of(pod, page=self.page, now=self._world.now(), spend_usd=bill.usd)
        instance = dataclasses.replace(shown, problems=shown.problems + bill.problems)
        if instance.mark.startswith(self._prefix):
            self._ours.add(instance.id)
        self._looked.pop(instance.id, None)
        if instance.is_running:
            self._looked[instance.id] = (self._world.monotonic(), instance)
        return instance

    def _bill(self, instance_id: str) -> _Bill:
        """Return the pod's cost as reported by RunPod, which lags behind.

        If RunPod has no new figure, return the last known one.
        """
        now, known = self._world.monotonic(), self._bills.get(instance_id, _Bill())
        if now - known.at < _BILL_EVERY_S:
            return known
        usd, problems = None, tuple[str, ...]()
        try:
            usd, problems = self._read_bill(instance_id)
        except ProviderRefused as exc:  # billing data is optional, because homing meters costs itself
            log.info("runpod returned no billing data: %s", exc.why)
        self._bills[instance_id] = _Bill(now, usd or known.usd, problems)
        return self._bills[instance_id]

    @legible
    def _read_bill(self, instance_id: str) -> tuple[Decimal | None, tuple[str, ...]]:
        records = self._api.items(f"{_BILL}&podId={quote(instance_id, safe='')}", "records")
        read = Figures("runpod")
        amounts = [read.usd("totalAmount of the billing record", record["totalAmount"]) for record in records]
        known = [amount for amount in amounts if amount is not None]
        return (sum(known, Decimal(0)) if len(known) == len(amounts) else None), tuple(read.problems)


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
