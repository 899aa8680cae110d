"""Any SSH host as a provider: each instance is a process tree in its own folder on the host, as with `local`.

    locally:     $HOMING_HOME/ssh/USER@HOST:PORT/ with host.json, known_hosts and marks/<mark>. A mark is written before
                 the create call
    on the host: WORK_DIR/<mark>/ for each instance, whose processes have the variable HOMING_MARK, and
                 WORK_DIR/cache/ for environments and code

An instance id is MARK@USER@HOST:PORT, so that the ledger is enough to know which host to query. If a host cannot be
reached, an error is raised, because its instances must not count as gone. The rate comes from the run file, and the
spend is computed from it.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

from homing.cloud.check_numbers import Figures, read_moment
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
from homing.cloud.providers.local import end_billing
from homing.cloud.providers.simulated_machine import MACHINE_ENV
from homing.cloud.providers.ssh.connection import Host
from homing.errors import CreateFailed, HomingError, ProviderRefused, UsageError
from homing.gpus import find_gpu
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling
from homing.wire.run_json import Ssh as Settings
from homing.world import World

__all__ = ["Ssh"]

log = logging.getLogger(__name__)
_CREATE_S = 300.0
_STATES: dict[str, InstanceState] = {s: s for s in get_args(InstanceState)}


class Ssh:
    name = "ssh"
    page = ""
    guard = ""
    settle_s = 0.0
    cannot: Mapping[Feature, str] = {
        "native_deadline": "Your own host has no provider-side timer.",
        "native_spend_limit": "Your own host has no provider-side spend guard.",
        "spot": "Your own host has no spot instances.",
        "multi_node": "The ssh provider uses a single host.",
    }

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._root = home / "ssh"
        self._prefix = owner_prefix(owner)
        self._world = world
        self._host: Host | None = None
        self._facts: dict[str, Any] = {}

    def account(self) -> str:
        return "hosts of one's own"  # the same for all hosts, because each instance id already contains its host

    def configure(self, settings: Settings) -> None:
        """Use the host that the run file names. Without this call, only hosts that were used before can be queried."""
        self._host, self._facts = Host(settings, self._root, self._world), {}

    def meet(self) -> None:
        """Pin the host's key, or raise HostKeyUnknown on first contact."""
        self._configured().pin()

    # --- offers ---

    def offers(self, needs: Needs) -> list[Offer]:
        host, facts, read = self._configured(), self._ask_facts(), Figures(self._configured().name)
        cards = [(find_gpu(card["name"]), card) for card in facts["gpus"]]
        known, card = cards[0] if cards else (None, None)
        device = (known.name if known else card["name"]) if card else facts["processor"]
        memory_bytes = read.whole("memory_bytes", facts["memory_bytes"]) or 0
        card_mib = read.whole("the GPU memory", card["mib"]) or 0 if card else 0
        offer = Offer(
            provider=self.name,
            name=host.name,
            device=device,
            num_gpus=len(cards),
            num_cores=read.whole("cores", facts["cores"]) or 1,
            memory_bytes=card_mib * 2**20 if card else memory_bytes,
            rate_usd_per_hour=Decimal(host.settings.rate_usd_per_hour),
            disk_bytes=read.whole("disk_bytes", facts["disk_bytes"]) or 0,
            # A configured interpreter can be used immediately, while an environment with torch must first be installed,
            # which downloads several gigabytes.
            boot_s=15.0 if host.settings.python else 300.0,
            host_bytes=memory_bytes,
        )
        for problem in read.problems:
            log.warning(problem)
        return [] if lack(offer, needs) else [offer]

    def place(self, mark: str) -> Place:
        folder, work_dir = self._there(mark), f"{self._there(mark)}/work"
        base = self._python()
        argv = [base, "-I", f"{folder}/end_billing.py", folder, mark]
        python = base if self._configured().settings.python else f"{work_dir}/env/bin/python"
        cache_dir = f"{self._ask_facts()['root']}/cache"
        return Place(work_dir, python, EndBilling(kind="command", argv=argv), base, cache_dir)

    def plan(self, offer: Offer, order: Order) -> Request:
        work_dir = f"{self._there(order.mark)}/work"
        return Request(
            provider=self.name,
            mark=order.mark,
            offer=offer,
            order=order,
            argv=(self._python(), "-I", f"{work_dir}/agent.zip", f"{work_dir}/{file_names.BOOT}"),
            # The host may be this computer, and `local` must not mistake these processes for its own.
            env={file_names.MARK_ENV: order.mark, MACHINE_ENV: f"ssh/{order.mark}"},
        )

    # --- instances ---

    def create(self, request: Request) -> Instance:
        host, order = self._configured(), request.order
        files = {file.path: base64.b64encode(self._world.read(file.source)).decode() for file in order.files}
        files[file_names.BOOT] = base64.b64encode(codec.dumps(order.boot, indent=1).encode()).decode()
        proof_path, proof_sha256 = _proof(order.boot)
        record = {
            "schema": "homing.ssh-instance/1",
            "run_name": order.run_name,
            "rate_usd_per_hour": str(request.offer.rate_usd_per_hour),
        }
        host.remember(request.mark)
        answer = host.call(
            "create",
            _CREATE_S,
            mark=request.mark,
            prefix=self._prefix,
            record=record,
            files=files,
            end_billing=self._world.read(end_billing.__file__).decode(),
            argv=list(request.argv),
            env=request.env,
            secrets=order.secrets,
            proof_path=proof_path,
            proof_sha256=proof_sha256,
        )
        if answer.get("refused") == "store":
            host.forget(request.mark)
            raise UsageError(
                what=f"{host.name} cannot access the store {order.boot.store}.",
                why=f"With ssh, a file: store must be a folder that both computers share. The host lacks {proof_path}.",
                fix="In the run file, use a shared folder, or a store that both can access: store: s3://... or hf:...",
            )
        if answer.get("refused"):
            raise CreateFailed(
                what=f"Instance {request.mark} was destroyed while it was being created.",
                fix="Launch again.",
                instance_id=self._id(host, request.mark),
            )
        return self._instance(host, answer)

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Do nothing, because the create call delivered everything."""

    def describe(self, instance_id: str) -> Instance:
        host, mark = self._find(instance_id)
        instance = self._instance(host, host.call("describe", mark=mark))
        if instance.state == "gone" and instance.created_at is not None:
            host.forget(mark)
        return instance

    def remember(self, mark: str) -> Instance | None:
        # A mark is recorded locally before the create call, and the record is deleted once the instance is gone. If
        # there is no record, query the current host.
        host = next((host for host in self._hosts_in_use() if mark in host.marks()), self._host)
        if host is None:
            return None
        answer = host.call("describe", mark=mark)
        return None if answer.get("made", "damaged") is None else self._instance(host, answer)

    def list_owned(self) -> list[Instance]:
        """Query every host that may still have instances of ours.

        If a host does not respond, its instances are listed as unknown, so that nothing is hidden. Raises if no host
        responds.
        """
        found: list[Instance] = []
        failures: list[HomingError] = []
        hosts = self._hosts_in_use()
        for host in hosts:
            try:
                answers = host.call("list", prefix=self._prefix)["instances"]
                found += [self._instance(host, answer) for answer in answers]
            except HomingError as exc:
                failures.append(exc)
                found += [self._unknown(host, mark, exc) for mark in host.marks()]
        if failures and len(failures) == len(hosts):
            raise failures[0]
        # If a host is known under two names, its instances are listed twice. Of two entries, keep the one under the
        # name that the create call used, because it has the full record.
        best = {each.mark: each for each in sorted(found, key=lambda each: each.created_at is not None)}
        return [best[mark] for mark in sorted(best)]

    def destroy(self, instance_id: str) -> None:
        host, mark = self._find(instance_id)
        answer = host.call("destroy", mark=mark)
        if answer["state"] == "gone":
            host.forget(mark)

    def log(self, instance_id: str) -> str:
        host, mark = self._find(instance_id)
        return str(host.call("log", mark=mark)["text"])

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Do nothing: the host has no guard. The agent and the dead-man process read new limits from the store."""

    def list_resources(self) -> list[Resource]:
        return []  # none: an instance consists only of its folder and its processes

    def destroy_resource(self, resource: Resource) -> None:
        raise AssertionError(f"your own host has no {resource.kind}")

    def connection(self, instance_id: str) -> Connection | None:
        return self._find(instance_id)[0].connection()

    # --- helpers, in the order they are called ---

    def _configured(self) -> Host:
        if self._host is None:
            raise UsageError(
                what="No SSH host is configured.",
                why="cloud.ssh.host is empty.",
                fix="Set it in the run file, for example: cloud.ssh.host: gpu.example.org",
            )
        return self._host

    def _ask_facts(self) -> dict[str, Any]:
        self._facts = self._facts or self._configured().call("facts")
        return self._facts

    def _there(self, mark: str) -> str:
        return f"{self._ask_facts()['root']}/{mark}"

    def _python(self) -> str:
        python = self._configured().settings.python or "python3"
        return f"{self._ask_facts()['home']}{python[1:]}" if python.startswith("~/") else python

    def _hosts_in_use(self) -> list[Host]:
        listed = self._world.listdir(self._root) if self._world.exists(self._root) else []
        known = [host for name in listed if (host := Host.known(name, self._root, self._world)) is not None]
        in_use = {host.name: host for host in known if host.marks()}
        # A host without marks has none of our instances, unless its marks were lost. Always query the current host.
        if self._host is not None:
            in_use[self._host.name] = self._host
        return list(in_use.values())

    def _find(self, instance_id: str) -> tuple[Host, str]:
        mark, _, name = instance_id.partition("@")
        if not mark.startswith(self._prefix):
            raise ProviderRefused(
                what=f"{instance_id!r} does not belong to this homing home directory.",
                why=f"The names of its instances start with {self._prefix!r}.",
                fix="List its instances: homing runs",
            )
        hosts = {host.name: host for host in self._hosts_in_use()}
        known = Host.known(name, self._root, self._world) if name else None
        found = hosts.get(name) or known or next((h for h in hosts.values() if mark in h.marks()), None)
        if found is None and not name:
            found = self._host
        if found is None:
            # Do not report the instance as gone: it may still be running on a host that we do not know.
            raise ProviderRefused(
                what=f"This homing home directory has no record of the SSH host that {instance_id} runs on.",
                why=f"{self._root / (name or 'USER@HOST:PORT')} does not exist.",
                fix="Set $HOMING_HOME to the home directory that launched the instance,"
                " or stop the instance on the host itself.",
            )
        return found, mark

    def _id(self, host: Host, mark: str) -> str:
        return f"{mark}@{host.name}"

    def _instance(self, host: Host, answer: dict[str, Any]) -> Instance:
        made, ended = answer.get("made"), answer.get("ended")
        state = _STATES.get(answer["state"], "unknown")
        read = Figures(host.name)
        rate = read.rate("rate_usd_per_hour", made.get("rate_usd_per_hour") if made else None) or Decimal(0)
        # The host's clock may differ from ours. So compute durations only from the host's own times, and convert points
        # in time to our clock.
        host_now = read_moment(answer["now"])
        now = host_now if host_now is not None else self._world.now()
        created_at = read.moment("created_at", made.get("created_at") if made else None, now)
        ended_at = read.moment("ended_at", ended.get("ended_at") if ended else None, now)
        until, skew_s = ended_at if ended_at is not None else now, self._world.now() - now
        seconds = max(0.0, until - created_at) if created_at is not None else 0.0
        return Instance(
            id=self._id(host, answer["mark"]),
            mark=answer["mark"],
            provider=self.name,
            state=state,
            billing="no" if state == "gone" else "yes",
            rate_usd_per_hour=rate,
            created_at=created_at + skew_s if created_at is not None else None,
            ended_at=ended_at + skew_s if ended_at is not None else None,
            spend_usd=rate * Decimal(str(seconds)) / 3600 if made else None,
            is_running=bool(answer["is_running"]),
            detail=str(answer["detail"]),
            page=f"{host.name} {answer['folder']}",
            problems=tuple(read.problems),
        )

    def _unknown(self, host: Host, mark: str, exc: HomingError) -> Instance:
        rate = Decimal(host.settings.rate_usd_per_hour)
        return Instance(self._id(host, mark), mark, self.name, "unknown", "maybe", rate, detail=exc.what)


def _proof(boot: Boot) -> tuple[str, str]:
    """Return the path and hash of an input that was pushed to a `file:` store, or ("", "") if there is none.

    If the host finds this file at that path, it can read the same store.
    """
    pushed = [item for item in boot.inputs if item.key]
    if not boot.store.startswith("file:") or not pushed:
        return "", ""
    item = min(pushed, key=lambda item: item.num_bytes)
    return f"{boot.store.removeprefix('file:')}/{item.key}", item.sha256
