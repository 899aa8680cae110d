"""RunPod's REST API v2 as one object: it rents, bills by its own clock, and errs in RunPod's own words.

    RunpodDouble(now=..., machines=...).handle(HttpRequest) -> HttpResponse      no socket, clock or chance of its own
    machines           what its pods run: nothing, processes (runpod_server.py), actors of the simulator

Instances, billing and faults come from cloud_state.py: faults by seed or by number, late lists, lost answers, effects
before a 5xx. RunPod's own are a pod's states, names that need not be unique, 400 for no capacity, 422 for an unknown
field, empty 204, server-sent events as the log, a late bill. With HOMING_OPENAPI_DIR set, every request and response is
checked against RunPod's published API document.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from tests.doubles.cloud_state import CloudState, Machines, Refusal, Rental, Settings
from tests.doubles.faults import Faults
from tests.doubles.openapi import OpenApi, Unlike

from homing.world import HttpRequest, HttpResponse, NetworkError

__all__ = ["GPUS", "NO_CAPACITY", "NO_DISK", "Gpu", "PodMachines", "RunpodDouble"]

NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
NO_DISK = "There are no longer any instances available with enough disk space."
_LIMITS = {
    "ratelimit": '"minute";r=58;t=12, "hour";r=2990;t=1812, "day";r=49990;t=45012',
    "ratelimit-policy": '"minute";q=60;w=60, "hour";q=3000;w=3600, "day";q=50000;w=86400',
}
_CREATE_FIELDS = {
    "name", "image", "args", "disk", "env", "ports", "registry", "cloud", "gpu", "cpu", "dataCenterIds",
    "globalNetworking", "mounts", "startSsh", "startJupyter", "templateId",
}  # fmt: skip
_GPU_FIELDS = {"id", "count", "allowedCudaVersions", "minCudaVersion"}
_ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
}
_TITLES = {
    400: "Bad Request", 401: "Unauthorized", 402: "Payment Required", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 409: "Conflict", 422: "Unprocessable Entity", 429: "Too Many Requests",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


class PodMachines(Machines, Protocol):
    """Runs the pods, and knows where a pod's port 22 can be reached from outside."""

    def address(self, instance_id: str) -> tuple[str, str, int] | None: ...  # user, host, port


@dataclass(frozen=True)
class Gpu:
    id: str
    name: str
    memory: int
    secure: float
    community: float = 0.0
    most: int = 8
    stock: str = "HIGH"
    cuda: tuple[str, ...] = ("12.8", "13.0")
    places: tuple[str, ...] = ("EU-RO-1", "US-KS-2")
    manufacturer: str = "NVIDIA"


GPUS = (
    Gpu("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.74, 0.34, places=("EU-RO-1", "EUR-IS-1")),
    Gpu("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.59, 1.39),
    Gpu("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 3.29, 2.69, stock="LOW"),
    Gpu("NVIDIA RTX A4000", "RTX A4000", 16, 0.25, 0.17),
    Gpu("NVIDIA L40", "L40", 48, 0.82, stock="NONE"),
    Gpu("NVIDIA A40", "A40", 48, 0.44, cuda=("12.4",)),  # hosts on which RunPod's images do not start
    Gpu("NVIDIA RTX A5000", "RTX A5000", 24, 0.27, cuda=("12.8",), places=("EU-SE-1",)),  # older drivers
    Gpu("AMD Instinct MI300X OAM", "MI300X", 192, 2.39, manufacturer="AMD", cuda=()),
)


class RunpodDouble(CloudState):
    def __init__(
        self,
        *,
        now: Callable[[], float],
        machines: PodMachines,
        api_key: str,
        gpus: tuple[Gpu, ...] = GPUS,
        faults: Faults | None = None,
        settings: Settings | None = None,
        seed: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        settings = settings or Settings(boot_s=2.0)
        super().__init__(
            now=now, machines=machines, settings=settings, faults=faults, seed=seed, on_change=on_change
        )  # fmt: skip
        self.gpus, self.machines, self._api_key = gpus, machines, api_key
        self.account = f"user_{hashlib.sha256(api_key.encode()).hexdigest()[:12]}"
        self.full: set[str] = set()  # GPU ids, or data centers, that have no room whatever the catalogue says
        self.may_pods_end = True  # whether a pod's own key has the right to its pod
        self.balance_usd: Decimal | None = Decimal(250)  # None: this key may not ask for it
        self.hides_cost = False  # until a pod runs
        self.address_late_s = 0.0  # from RUNNING to an address
        self.bill_late_s = 0.0
        self.breaks_log_after = 0  # events, then the line is cut
        self.ssh_keys_put = 0  # calls of PUT /account/ssh-keys, which homing must never make
        self.violations: list[str] = []
        self.openapi = OpenApi.here("runpod-v2.json")
        self.pods: dict[str, dict[str, Any]] = {}  # id -> what it was made of
        self.volumes: dict[str, dict[str, Any]] = {}
        self._exited: dict[str, float] = {}
        self._odd = ""

    # --- the outside ---

    def handle(self, request: HttpRequest) -> HttpResponse:
        self.tick()
        parts = urlsplit(request.url)
        if parts.path == "/graphql":
            return self._graphql(request)
        path = [unquote(part) for part in parts.path.split("/") if part][1:]  # without v2
        route = _route(request.method, path)
        ways = self._dice.throw(route) if route else ()
        if "lost_before" in ways:
            raise NetworkError(f"{request.method} {parts.path}: the line was cut before it arrived")
        if "busy" in ways:
            wait = {"retry-after": str(round(self.faults.retry_after_s))}
            return self._problem(429, "rate limit exceeded for the minute window", wait)
        if "error_before" in ways:
            return self._problem(503, "upstream unavailable")
        try:
            self._odd = ""
            response = self._reply_to(request, path, {k: v[0] for k, v in parse_qs(parts.query).items()}, ways)
        except Refusal as exc:
            response = self._problem(exc.status, exc.text)
        self._judge(request, response)
        self._publish()
        if "lost_after" in ways:
            raise NetworkError(f"{request.method} {parts.path}: the line was cut before the answer")
        if "error_after" in ways:
            return self._problem(500, "internal error")
        return response

    def lose(self, pod_id: str, how: str = "EXITED") -> None:
        """The host is gone: the pod is shown as EXITED, or is not known any more."""
        thing = self._live[pod_id]
        if how == "gone":
            self._end(thing, self.now(), "preempted")
            return
        self._exited[pod_id] = self.now()
        self._machines.end(pod_id)

    def spend(self, thing: Rental) -> Decimal:
        """Storage for as long as it exists, the GPUs until the pod was stopped."""
        until = thing.ended_at if thing.ended_at is not None else self.now()
        if thing.kind != "instance":
            return thing.spend(until)
        hours = Decimal(str(until - thing.created_at)) / 3600
        card = Decimal(str(min(until, self._exited.get(thing.id, until)) - thing.created_at)) / 3600
        pod = self.pods[thing.id]
        return Decimal(str(pod["cost"])) * card + _storage_usd_per_hour(pod.get("disk", 1)) * hours

    # --- requests ---

    def _reply_to(
        self, request: HttpRequest, path: list[str], query: dict[str, str], ways: tuple[str, ...]
    ) -> HttpResponse:
        caller = self._caller(request)
        head, method = (path[0] if path else ""), request.method
        if caller is not None:
            self._check_own(caller, head, path)
        if head == "account":
            self.ssh_keys_put += method == "PUT"
            raise Refusal(403, "access denied")
        if head == "catalog" and path == ["catalog", "gpus"] and method == "GET":
            return self._catalogue(query)
        if head == "billing" and path == ["billing", "pods"] and method == "GET":
            return self._bill(query)
        if head == "network-volumes":
            return self._volumes(request, path)
        if head == "pods" and len(path) == 1 and method == "POST":
            return self._make(_json(request), ways)
        if head == "pods" and len(path) == 1 and method == "GET":
            return _json_reply(200, {"pods": self._listed(ways)})
        if head == "pods" and len(path) > 1:
            return self._of_pod(request, path, query, ways)
        raise Refusal(404, "resource not found")

    def _caller(self, request: HttpRequest) -> Rental | None:
        """None for the account's own key, the pod for a pod's key."""
        given = next((value for name, value in request.headers.items() if name.lower() == "authorization"), "")
        kind, _, key = given.partition(" ")
        if kind != "Bearer" or not key:
            raise Refusal(401, "missing bearer token")
        if key == self._api_key:
            return None
        pod_id = key.partition(".")[0]
        if pod_id in self._rentals and key == self._pod_key(pod_id):
            return self._rentals[pod_id]
        raise Refusal(401, "invalid API key")

    def _pod_key(self, pod_id: str) -> str:
        """Return the key that RunPod puts into the pod's environment; it may end only this pod."""
        return f"{pod_id}.{hashlib.sha256(f'{self._api_key}/{pod_id}'.encode()).hexdigest()[:24]}"

    def _check_own(self, caller: Rental, head: str, path: list[str]) -> None:
        if not self.may_pods_end or head != "pods" or len(path) < 2 or path[1] != caller.id:
            raise Refusal(403, "access denied")

    def _graphql(self, request: HttpRequest) -> HttpResponse:
        """Only what is asked of it from home. Its schema is not published; the fields are from the fact sheet."""
        try:
            caller, query = self._caller(request), str(_json(request).get("query", ""))
        except Refusal as exc:
            return self._problem(exc.status, exc.text)
        if caller is not None or self.balance_usd is None or "mutation" in query:
            return _json_reply(200, {"errors": [{"message": "not authorized"}], "data": None})
        rate = sum((Decimal(thing.rate_usd_per_hour) for thing in self._live.values()), Decimal(0))
        messages = {"id": self.account, "clientBalance": float(self.balance_usd), "currentSpendPerHr": float(rate)}
        return _json_reply(
            200, {"data": {"myself": {name: messages[name] for name in messages if name in query.split()}}}
        )

    def _catalogue(self, query: dict[str, str]) -> HttpResponse:
        has_stock = query.get("include") == "AVAILABILITY"
        if has_stock != ("product" in query) or (not has_stock and {"count", "cloud", "minCudaVersion"} & set(query)):
            raise Refusal(400, "include=AVAILABILITY and product go together")
        if "cudaVersions" in query and "minCudaVersion" in query:
            raise Refusal(400, "cudaVersions and minCudaVersion are mutually exclusive")
        return _json_reply(200, {"gpus": [self._show_gpu(gpu, query, has_stock=has_stock) for gpu in self.gpus]})

    def _show_gpu(self, gpu: Gpu, query: dict[str, str], *, has_stock: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": gpu.id,
            "name": gpu.name,
            "pool": None,
            "manufacturer": gpu.manufacturer,
            "memory": gpu.memory,
            "secure": gpu.secure > 0,
            "community": gpu.community > 0,
            "price": {"secure": gpu.secure, "community": gpu.community},
            "maxCount": {"secure": gpu.most, "community": gpu.most if gpu.community else 0},
        }
        if has_stock:
            fitting = [v for v in gpu.cuda if _version(v) >= _version(query.get("minCudaVersion", "0.0"))]
            stock = gpu.stock if fitting else "NONE"
            body["availability"] = stock
            if stock != "NONE":
                body["dataCenters"] = [{"id": name, "name": name.title(), "availability": stock} for name in gpu.places]
                body["cudaVersions"] = [{"version": version, "available": True} for version in fitting]
        return body

    def _bill(self, query: dict[str, str]) -> HttpResponse:
        size, last = query.get("bucketSize", "day"), int(query.get("lastN", "30"))
        day = datetime.timedelta(days=1)
        end = datetime.datetime.fromtimestamp(self.now(), datetime.UTC).replace(hour=0, minute=0, second=0) + day
        span = {"startTime": _rfc(end.timestamp() - last * 86400), "endTime": _rfc(end.timestamp())}
        pod_id = query.get("podId")
        thing = self._rentals.get(pod_id or "")
        late = thing is None or self.now() - thing.created_at < self.bill_late_s
        cost = Decimal(0) if late or thing is None else self.spend(thing)
        amounts = {"totalAmount": float(cost), "gpuAmount": float(cost), "cpuAmount": 0.0, "diskAmount": 0.0}
        record = {**span, "startTime": _rfc(end.timestamp() - 86400), "podId": pod_id, **amounts}
        records = [record] if cost else []
        about = {
            "query": {**span, "bucketSize": size, "podId": pod_id},
            "recordCount": len(records),
            "uniquePodCount": len(records),
            "totals": amounts,
        }
        return _json_reply(200, {"records": records, "metadata": about})

    def _volumes(self, request: HttpRequest, path: list[str]) -> HttpResponse:
        if len(path) == 1 and request.method == "GET":
            return _json_reply(200, {"networkVolumes": list(self.volumes.values())})
        if len(path) == 1 and request.method == "POST":
            body = _json(request)
            if set(body) - {"name", "size", "dataCenter", "type"} or not 10 <= int(body.get("size", 0)) <= 4096:
                raise Refusal(422, "Request validation failed.")
            rate = Decimal(body["size"]) * Decimal("0.07") / 730
            thing = self._add("volume", body["name"], rate, f"v-{self._num_made + 1:06d}")
            self.volumes[thing.id] = {"id": thing.id, **body, "type": body.get("type", "HIGH_PERFORMANCE")}
            return _json_reply(201, self.volumes[thing.id])
        if len(path) == 2 and path[1] in self.volumes and request.method == "DELETE":
            del self.volumes[path[1]]
            self._end(self._live[path[1]], self.now(), "deleted")
            return HttpResponse(204, dict(_LIMITS), b"")
        raise Refusal(404, "resource not found")

    def _make(self, body: dict[str, Any], ways: tuple[str, ...]) -> HttpResponse:
        unknown = [name for name in body if name not in _CREATE_FIELDS]
        unknown += [f"gpu.{name}" for name in body.get("gpu", {}) if name not in _GPU_FIELDS]
        if unknown or not body.get("name") or not (body.get("image") or body.get("templateId")):
            raise Refusal(422, f"Request validation failed. unknown or missing: {unknown}")
        if body.get("templateId") == "gone":
            raise Refusal(404, "template not found")
        mounts = body.get("mounts", {})
        if ("gpu" in body) == ("cpu" in body) or {"persistent", "network"} <= set(mounts):
            raise Refusal(400, "exactly one of gpu and cpu, and at most one kind of mount")
        volume = next((self.volumes.get(each["volumeId"]) for each in mounts.get("network", ())), None)
        if mounts.get("network") and volume is None:
            raise Refusal(404, "network volume not found")
        if self.balance_usd is not None and self.balance_usd <= 0:
            raise Refusal(402, "Your account balance is too low to deploy a pod.")
        gpu = next((each for each in self.gpus if each.id == body["gpu"]["id"]), None)
        if gpu is None or body["gpu"].get("count", 1) > gpu.most:
            raise Refusal(400, "request could not be processed")
        places = [name for name in gpu.places if name in (body.get("dataCenterIds") or gpu.places)]
        places = [name for name in places if volume is None or name == volume["dataCenter"]]
        places = [name for name in places if name not in self.full]
        if "no_capacity" in ways or gpu.id in self.full or gpu.stock == "NONE" or not places:
            raise Refusal(400, NO_CAPACITY)
        if body.get("disk", 1) > 10_000:
            raise Refusal(400, NO_DISK)
        price = Decimal(str(gpu.secure if body.get("cloud", "SECURE") == "SECURE" else gpu.community))
        cost = float(price * body["gpu"].get("count", 1))
        cost *= self.faults.dearer_by if "dearer" in ways else 1
        rate = Decimal(str(cost)) + _storage_usd_per_hour(body.get("disk", 1))
        thing = self._add("instance", body["name"], rate, f"i-{self._num_made + 1:06d}")
        self.pods[thing.id] = {**body, "cost": cost, "place": places[0], "volume": volume}
        self._draw_fate(thing, ways)
        return _json_reply(201, self._show_pod(thing))

    def _listed(self, ways: tuple[str, ...]) -> list[dict[str, Any]]:
        at = self.now()
        if "list_late" in ways:
            at -= self.faults.list_lag_s * self._dice.rng.random()
        things = [self._rentals[pod_id] for pod_id in self.pods]
        return [self._show_pod(thing) for thing in things if thing.is_listed(at)]

    def _of_pod(
        self, request: HttpRequest, path: list[str], query: dict[str, str], ways: tuple[str, ...]
    ) -> HttpResponse:
        thing = self._live.get(path[1])
        if thing is None or thing.kind != "instance" or thing.hidden_until > self.now():
            raise Refusal(404, "resource not found")
        if len(path) == 2 and request.method == "GET":
            self._odd = "MIGRATING" if "odd_state" in ways else ""
            return _json_reply(200, self._show_pod(thing))
        if len(path) == 2 and request.method == "DELETE":
            self._request_end(thing, ways)
            return HttpResponse(204, dict(_LIMITS), b"")
        if path[2:] == ["logs"] and request.method == "GET":
            return self._log(thing, request, query)
        if path[2:] == ["action"] and request.method == "POST":
            return self._act(thing, str(_json(request).get("action")))
        raise Refusal(404, "resource not found")

    def _act(self, thing: Rental, action: str) -> HttpResponse:
        status = self._status(thing)
        if action not in _ACTIONS[status]:
            raise Refusal(409, f"{action} is not valid for a pod that is {status}")
        if action == "terminate":
            self._end(thing, self.now(), "deleted")
            return HttpResponse(204, dict(_LIMITS), b"")
        if action == "start":
            raise Refusal(400, "There are not enough free GPUs on the host machine to start this pod.")
        if action == "stop":
            self.lose(thing.id)
        return _json_reply(200, self._show_pod(thing))

    def _log(self, thing: Rental, request: HttpRequest, query: dict[str, str]) -> HttpResponse:
        lines = list(enumerate(self._machines.log(thing.id).splitlines()))
        after = next((value for name, value in request.headers.items() if name.lower() == "last-event-id"), "")
        began = _rfc(thing.created_at)
        if after:
            lines = [each for each in lines if each[0] > int(after.rpartition("/")[2])]
        else:
            lines = lines[-int(query.get("tail", "100")) :]
        text = "".join(
            f"id: {began}/{number:012d}\ndata: {json.dumps({'ts': began, 'source': 'container', 'line': line})}\n\n"
            for number, line in lines[: self.breaks_log_after or None]
        )
        headers = {**_LIMITS, "content-type": "text/event-stream", "cache-control": "no-cache"}
        return HttpResponse(200, headers, (": open\n\n" + text).encode())

    # --- what time brings ---

    def _start(self, thing: Rental) -> None:
        pod = self.pods[thing.id]
        env = {
            **pod.get("env", {}),
            "RUNPOD_POD_ID": thing.id,
            "RUNPOD_API_KEY": self._pod_key(thing.id),
            "RUNPOD_DC_ID": pod["place"],
            "RUNPOD_GPU_COUNT": str(pod["gpu"].get("count", 1)),
            "RUNPOD_GPU_NAME": pod["gpu"]["id"],
        }
        self._machines.start(thing.id, {}, shlex.split(pod.get("args", "")), env)

    # --- how it shows itself ---

    def _status(self, thing: Rental) -> str:
        if thing.id in self._exited:
            return "EXITED"
        if thing.has_failed:
            return "ERROR"
        if thing.booted_at is not None:
            return "RUNNING"
        return "PROVISIONING" if self.now() <= thing.created_at + 1.0 else "STARTING"

    def _show_pod(self, thing: Rental) -> dict[str, Any]:
        pod, status = self.pods[thing.id], self._odd or self._status(thing)
        is_up = status == "RUNNING"
        address = self._address(thing) if is_up else None
        proxy = {"host": "ssh.runpod.io", "port": 22, "username": f"{thing.id}-644", "command": "ssh ..."}
        user, host, port = address or ("", "", 0)
        direct = {"host": host, "port": port, "username": user, "command": f"ssh {user}@{host} -p {port}"}
        ports = [{"private": 22, "public": port, "type": "tcp", "ip": host}] if address else []
        body = {
            "id": thing.id,
            "name": thing.mark,
            "status": status,
            "actions": _ACTIONS.get(status, []),
            "image": pod.get("image", "from/template"),
            "args": pod.get("args", ""),
            "disk": pod.get("disk", 1),
            "mounts": pod.get("mounts", {}),
            "ports": pod.get("ports", []),
            "env": pod.get("env", {}),
            "registry": pod.get("registry"),
            "gpu": {"id": pod["gpu"]["id"], "count": pod["gpu"].get("count", 1)},
            "cloud": pod.get("cloud", "SECURE"),
            "dataCenterId": pod["place"],
            "cudaVersion": "13.0",
            "ssh": {"proxy": proxy, "direct": direct if address else None},
            "template": None,
            "cost": 0.0 if status == "EXITED" or (self.hides_cost and not is_up) else pod["cost"],
            "locked": False,
            "globalNetworking": {"enabled": bool(pod.get("globalNetworking"))},
            "runtime": {"uptime": self._uptime(thing), "ports": ports} if is_up else None,
            "createdAt": _rfc(thing.created_at),
            "startedAt": _rfc(thing.booted_at) if thing.booted_at is not None else None,
        }
        return body

    def _address(self, thing: Rental) -> tuple[str, str, int] | None:
        is_late = thing.booted_at is None or self.now() < thing.booted_at + self.address_late_s
        if is_late or "22/tcp" not in self.pods[thing.id].get("ports", []):
            return None
        return self.machines.address(thing.id)

    def _uptime(self, thing: Rental) -> int:
        return int(self.now() - thing.booted_at) if thing.booted_at is not None else 0

    def _problem(self, status: int, detail: str, more: dict[str, str] | None = None) -> HttpResponse:
        body = {"title": _TITLES[status], "status": status, "detail": detail}
        if status == 422:
            body["errors"] = [detail]
        headers = {**_LIMITS, "content-type": "application/problem+json", **(more or {})}
        return HttpResponse(status, headers, json.dumps(body).encode())

    def _judge(self, request: HttpRequest, response: HttpResponse) -> None:
        """Against the published document; what is wrong on purpose is left out."""
        if self.openapi is None or self._odd or (response.status in (404, 403) and "account" in request.url):
            return
        try:
            self.openapi.check(request, response)
        except Unlike as exc:
            self.violations.append(str(exc))
            raise


def _route(method: str, path: list[str]) -> str:
    """Return the name under which faults.py knows this request; "" if it never fails at random."""
    head, length = (path[0] if path else ""), len(path)
    known = {
        ("POST", "pods", 1): "create",
        ("GET", "pods", 1): "list",
        ("GET", "pods", 2): "describe",
        ("DELETE", "pods", 2): "destroy",
        ("GET", "pods", 3): "log",
        ("GET", "catalog", 2): "offers",
        ("GET", "billing", 2): "account",
    }
    return known.get((method, head, length), "volumes" if head == "network-volumes" else "")


def _storage_usd_per_hour(num_gb: int) -> Decimal:
    """Container disk: $0.10 per GB and month of 730 hours, which the pod's `cost` does not include."""
    return num_gb * Decimal("0.10") / 730


def _json(request: HttpRequest) -> dict[str, Any]:
    try:
        body = json.loads(request.body or b"{}")
    except ValueError as exc:
        raise Refusal(400, f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise Refusal(422, "Request validation failed.")
    return body


def _json_reply(status: int, body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(status, {**_LIMITS, "content-type": "application/json"}, json.dumps(body).encode())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _rfc(moment: float) -> str:
    return (
        datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    )
