"""Shadeform as a provider: whole machines from a dozen clouds, which Shadeform deletes at a given spend or date.

    SHADEFORM_API_KEY     the account's key; there are no restricted keys. It stays local unless
                          cloud.shadeform.self_delete is set
    HOMING_SHADEFORM_URL  an alternative API address, for tests

Its API has no idempotency key, no logs and no stop. So we look for an instance with our mark before and after each
create call, read boot.log over SSH, and destroy an instance by deleting it. Billing ends at the state `deleting`.
The create call sets Shadeform's guard so that it allows only for the longest start. The guard is read back, and after
the hand-over it is extended to the whole run. So if this computer fails during the launch, you pay at most for the time
that one start may take.
"""

from __future__ import annotations

import contextlib
import dataclasses
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from homing.api_address import api_address
from homing.cloud.check_numbers import Figures
from homing.cloud.contact.ssh_access import login_key
from homing.cloud.ledger import meter
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import startup_script
from homing.cloud.providers.base import (
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
from homing.cloud.providers.shadeform.api import Account, detail_of, is_over, mark_of, rate_now, state_of
from homing.cloud.providers.shadeform.auto_delete import Thresholds, thresholds, thresholds_of
from homing.cloud.providers.shadeform.create_request import (
    KEY_ENV,
    KEY_HEADER,
    ask_there,
    connection_of,
    launch_configuration,
    place_of,
    with_id,
)
from homing.cloud.providers.shadeform.doctor_checks import check_shadeform
from homing.cloud.providers.shadeform.offers import SPOT, Catalogue, Choice, choose_os, read_catalogue
from homing.doctor.check import Check
from homing.errors import CreateFailed, NoOffer, ProviderRefused, ProviderSilent, StartTimeout, UsageError
from homing.units import format_duration
from homing.wire.instance_file_names import BILLING_ENDED
from homing.world import Completed, World

__all__ = ["KEY_ENV", "URL_ENV", "Shadeform"]

URL_ENV = "HOMING_SHADEFORM_URL"
_URL = "https://api.shadeform.ai/v1"
_KEYS_PAGE = "https://platform.shadeform.ai/settings/api"
_WALLET_PAGE = "https://platform.shadeform.ai/settings/billing"
_START_S = 1800.0
_DESCRIBE_EVERY_S = 7.5  # eight queries per minute are enough to wait for one instance
_LOOK_EVERY_S = 5.0
_LOG_BYTES = 20_000


class Shadeform:
    name = "shadeform"
    page = "https://platform.shadeform.ai/instances"
    guard = "Shadeform deletes the instance at the amount or date that launch sets, whichever comes first."
    settle_s = 20.0
    num_creates = TRIES

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world = home, world
        self._prefix = owner_prefix(owner)
        self._settings: dict[str, Any] = {}
        self._catalogue = Catalogue()
        self._ours: set[str] = set()  # ids of instances that this process has seen with our mark
        self._looked: dict[str, tuple[float, Instance]] = {}
        self._held_keys: set[str] = set()  # ids of SSH keys still in use by a machine that is being deleted
        self._handed: dict[str, float] = {}  # id of a handed-over instance -> when to stop checking it over SSH

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        return bool(world.environment().get(KEY_ENV))

    def configure(self, settings: dict[str, Any]) -> None:
        self._settings, self._catalogue = settings, Catalogue()

    def account(self) -> str:
        """Return a name derived from the key, because the API does not identify the account.

        A different key may belong to the same account.
        """
        return key_account(self.name, self._api.headers[KEY_HEADER])

    @property
    def cannot(self) -> dict[Feature, str]:
        lacking: dict[Feature, str] = {
            "file_store": "A Shadeform instance cannot read a local folder.",
            "multi_node": "homing rents single instances from Shadeform.",
        }
        if not self._is_self_deleting:
            lacking["end_itself"] = (
                "A Shadeform instance cannot end its own billing: that needs the account's key, which stays local."
            )
        return lacking

    def cautions(self) -> list[str]:
        if not self._is_self_deleting:
            return []
        return [
            "cloud.shadeform.self_delete: the account's key is sent to the instance over SSH so it can delete itself."
            " Anyone with access to that instance controls the whole account: its money, instances and keys."
        ]

    def checks(self) -> list[Check]:
        """Run the checks for `homing doctor`, which change nothing."""
        ours = [body for body in self._account.instances() if mark_of(body).startswith(self._prefix)]
        # Shadeform's list of instances does not include their auto_delete settings, so query each instance.
        living = [self._account.info(str(body["id"])) for body in ours if not is_over(body)]
        known = [body for body in living if body is not None and not is_over(body)]
        return check_shadeform(self._account.types(), known, self._choice, self.page, _WALLET_PAGE)

    # --- offers ---

    def offers(self, needs: Needs) -> list[Offer]:
        return [offer for offer in self._ask_catalogue().offers if not lack(offer, needs)]

    def left_out(self) -> list[tuple[Offer, str]]:
        """Return the unusable entries of the last catalogue query, with the reason for each."""
        return self._catalogue.left_out

    def place(self, mark: str) -> Place:
        return place_of(self._url, is_self_deleting=self._is_self_deleting)

    def plan(self, offer: Offer, order: Order) -> Request:
        if self._is_self_deleting:
            order = dataclasses.replace(order, secrets={**order.secrets, KEY_ENV: self._key})
        argv = tuple(booting.agent_argv("python3", startup_script.WORK_DIR))
        return Request(provider=self.name, mark=order.mark, offer=offer, order=order, argv=argv, env={})

    # --- instances ---

    @legible
    def create(self, request: Request) -> Instance:
        sent: list[tuple[dict[str, Any], Thresholds]] = []

        def post() -> dict[str, Any]:
            if not sent:  # a retry sends the same body, including its dates
                guard = self._full(request).by(self._their_now() + self._start_s + meter.MARGIN_S)
                sent.append((self._create_body(request, guard), guard))
            return {"id": self._account.create(sent[0][0])}

        once = Once(self.name, self.settle_s, self._world, self._account.with_mark, self._account.delete)
        instance_id = str(once.create(request, post, _refused)["id"])
        if sent:
            armed = self._armed(request, instance_id, sent[0][1])
            return dataclasses.replace(armed, twins=tuple(once.twins))
        # An earlier launch created the instance, and it may already have extended the guard to the whole run.
        return self._armed(request, instance_id, self._full(request), is_earlier_fine=True)

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Send files and secrets over SSH, then extend Shadeform's guard to the whole run."""
        within_s = min(self._start_s, request.order.start_within_s)
        until = self._world.monotonic() + within_s
        connection = self._await_connection(request, instance_id, within_s)
        left_s = max(1.0, until - self._world.monotonic())
        startup_script.hand_over(connection, with_id(request, instance_id), world=self._world, timeout_s=left_s)
        self._arm(instance_id, self._full(request))
        self._handed[instance_id] = self._world.monotonic() + self._start_s

    @legible
    def describe(self, instance_id: str) -> Instance:
        at, known = self._looked.get(instance_id, (0.0, None))
        if known is not None and self._world.monotonic() - at < _DESCRIBE_EVERY_S:
            return known
        body = self._account.info(instance_id)
        if body is None:
            return Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="unknown to Shadeform")
        instance = self._instance(self._own(body))
        return instance if instance.state != "ready" else self._looked_there(instance)

    @legible
    def list_owned(self) -> list[Instance]:
        bodies = [body for body in self._account.instances() if mark_of(body).startswith(self._prefix)]
        self._looked.clear()  # clear the cache, so that an instance that is no longer listed is looked up again
        return [instance for body in bodies if (instance := self._instance(body)).state != "gone"]

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # delete the instance even if its data is unreadable
                body = self._account.info(instance_id)
                if body is not None and is_over(self._own(body)):
                    return
        try:
            self._account.delete(instance_id)
        except Unwelcome:
            # If the instance is already gone or being deleted, there is nothing to do. Some clouds refuse to delete a
            # machine before it is active.
            body = self._account.info(instance_id)
            if body is not None and not is_over(body):
                raise

    def log(self, instance_id: str) -> str:
        """Return the machine's boot.log (read over SSH, because Shadeform keeps no log), or why it cannot be read."""
        instance = self.describe(instance_id)
        if instance.state == "gone":
            return ""
        done = self._ask_there(instance, f"tail -c {_LOG_BYTES} {startup_script.ROOT}/boot.log")
        if done is None:
            return f"Shadeform keeps no log, and SSH to {instance_id} is not possible: it is {instance.detail}."
        if done.code:
            last = (done.err.strip().splitlines() or [f"exit code {done.code}"])[-1]
            return f"Shadeform keeps no log, and boot.log could not be read over SSH: {last}"
        return done.out

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Set the instance's maximum total cost and its latest end time by our clock."""
        body = self._account.info(instance_id)
        if body is None or is_over(self._own(body)):
            return  # an instance that is gone needs no guard
        read = Figures(self.name)
        began = read.moment("created_at", body.get("created_at"), self._their_now()) or self._their_now()
        rate = rate_now(body, read)
        if not rate:
            raise ProviderSilent(
                what=f"Shadeform does not report the hourly rate of {instance_id}, so its auto_delete was not changed.",
                why=" ".join(read.problems),
                doubt="The earlier limit stays in force.",
                fix="Repeat the command in a minute.",
            )
        guard = thresholds(rate, spend_limit_usd, began, float("inf"))
        self._arm(instance_id, guard if end_by is None else guard.by(end_by + self._api.skew_s))

    # --- other resources ---

    @legible
    def list_resources(self) -> list[Resource]:
        """Return our SSH keys as resources, each with the mark of the instance it was created for.

        Keys that a machine still uses are left out: they cannot be deleted yet, and they cost nothing.
        """
        ours = [body for body in self._account.ssh_keys() if str(body["name"]).startswith(self._prefix)]
        free = [body for body in ours if str(body["id"]) not in self._held_keys]
        return [Resource("key", str(body["id"]), str(body["name"]), self.name) for body in free]

    def destroy_resource(self, resource: Resource) -> None:
        if not resource.mark.startswith(self._prefix):
            raise _not_ours(resource.id, self._prefix)
        try:
            self._account.delete_key(resource.id)
        except Unwelcome as exc:
            if all(str(body["id"]) != resource.id for body in self._account.ssh_keys()):
                return
            if "use" not in exc.text:
                raise
            self._held_keys.add(resource.id)  # a later `homing reconcile` will list and delete the key

    def connection(self, instance_id: str) -> Connection | None:
        body = self._account.info(instance_id)
        return None if body is None else connection_of(self._own(body), self._home, self._world)

    # --- helpers, in the order they are called ---

    @property
    def _is_self_deleting(self) -> bool:
        return bool(self._settings.get("self_delete"))

    @property
    def _choice(self) -> Choice:
        return Choice(
            clouds=tuple(self._settings.get("clouds") or ()),
            is_spot_fine=bool(self._settings.get("spot")),
            os=str(self._settings.get("os") or ""),
        )

    def _ask_catalogue(self) -> Catalogue:
        self._catalogue = read_catalogue(self._account.types(), self.name, self._choice)
        return self._catalogue

    @cached_property
    def _account(self) -> Account:
        return Account(self._api, self.settle_s)

    @cached_property
    def _api(self) -> Api:
        fix = f"Get a key from {_KEYS_PAGE}, then: export {KEY_ENV}=..."
        return Api("Shadeform", self._url, {KEY_HEADER: self._key}, self._world, fix)

    @property
    def _url(self) -> str:
        return api_address(self._world.environment(), URL_ENV, _URL)

    @property
    def _key(self) -> str:
        key = self._world.environment().get(KEY_ENV, "")
        if not key:
            raise UsageError(
                what="No Shadeform API key found.",
                why=f"{KEY_ENV} is set neither in the environment nor in .env.",
                fix=f"Get a key from {_KEYS_PAGE}, then: export {KEY_ENV}=...   or: homing setup shadeform",
            )
        return key

    @property
    def _start_s(self) -> float:
        return float(self._settings.get("start_limit", _START_S))

    def _full(self, request: Request) -> Thresholds:
        return thresholds_of(request.order.boot, request.offer.rate_usd_per_hour, self._api.skew_s)

    def _their_now(self) -> float:
        return self._world.now() + self._api.skew_s

    def _create_body(self, request: Request, guard: Thresholds) -> dict[str, Any]:
        offer = request.offer
        end_within_s = self._start_s + meter.MARGIN_S
        body: dict[str, Any] = {
            "cloud": offer.cloud,
            "region": offer.region,
            "shade_instance_type": offer.instance_type,
            # Use Shadeform's own account at that cloud, because Shadeform's guard does not cover linked accounts.
            "shade_cloud": True,
            "name": request.mark,
            "tags": [request.mark],  # the mark is also a tag, because the name can be changed in the console
            "os": self._os(offer),
            "ssh_key_id": self._account.add_key(request.mark, login_key(self._home, self._world).public_line),
            "launch_configuration": launch_configuration(request.mark, end_within_s, self._home, self._world),
            "auto_delete": guard.auto_delete(),
            "alert": guard.alert(),
        }
        return {**body, "rental_type": SPOT} if offer.is_spot else body

    def _os(self, offer: Offer) -> str:
        if offer.name not in self._catalogue.types:
            self._ask_catalogue()
        entry = self._catalogue.types.get(offer.name)
        if entry is None:
            raise NoOffer(
                what=f"Shadeform no longer offers {offer.name}.",
                why="The offer is no longer in the catalog, or cloud.shadeform in the run file excludes it.",
                fix="See current offers: homing offers --provider shadeform",
            )
        return choose_os(list(entry["configuration"]["os_options"]), str(self._settings.get("os") or ""))

    def _armed(
        self, request: Request, instance_id: str, guard: Thresholds, *, is_earlier_fine: bool = False
    ) -> Instance:
        """Return the new instance if its guard reads back as sent; otherwise destroy it and raise CreateFailed."""
        try:
            body, why = self._account.read_back(instance_id, guard, is_earlier_fine=is_earlier_fine)
        except ProviderRefused as exc:
            body, why = None, exc.why
        if body is not None and not why:
            if mark_of(body) == request.mark:
                return self._instance(body)
            why = f"its name is {body.get('name')!r} and its tags are {body.get('tags')!r}"
        with contextlib.suppress(ProviderRefused):  # the launch will retry deleting the instance by its id
            self._account.delete(instance_id)
        raise CreateFailed(
            what=f"Shadeform started {request.mark} without the requested auto_delete. homing is destroying it.",
            why=f"The check after the start found: {why}.",
            fix=f"Try again: {request.order.words.to('launch')}   See {self.page}",
            instance_id=instance_id,
        )

    def _arm(self, instance_id: str, guard: Thresholds) -> None:
        """Set the instance's auto_delete and read it back to verify it. Do nothing if the instance is gone."""
        try:
            self._account.update(instance_id, guard)
        except Unwelcome:
            body = self._account.info(instance_id)
            if body is None or is_over(body):
                return
            raise
        body, why = self._account.read_back(instance_id, guard)
        if why and body is not None and not is_over(body):
            raise ProviderRefused(
                what=f"Shadeform did not apply the new auto_delete of {instance_id}.",
                why=f"The check after the change found: {why}.",
                fix=f"Repeat the command, or set auto_delete manually: {self.page}",
            )

    def _await_connection(self, request: Request, instance_id: str, within_s: float) -> Connection:
        found: list[Connection] = []

        def is_there() -> bool:
            self._looked.pop(instance_id, None)
            instance = self.describe(instance_id)
            if instance.state == "gone" or not instance.is_running:
                raise StartTimeout(
                    what=f"Shadeform could not start {request.offer.name}.",
                    why=instance.detail,
                    fix=f"Choose another offer: {request.order.words.to('plan')}   See {self.page}",
                )
            connection = self.connection(instance_id) if instance.state == "ready" else None
            found.extend([connection] if connection is not None else [])
            return bool(found)

        late = StartTimeout(
            what=f"{instance_id} was not active within {format_duration(within_s)}.",
            why="cloud.shadeform.start_limit was reached."
            if within_s == self._start_s
            else "The spend limit leaves no more time to start and train.",
            fix=f"Choose another offer: {request.order.words.to('plan')}   See {self.page}",
        )
        wait_until(is_there, timeout_s=within_s, every_s=_LOOK_EVERY_S, world=self._world, by=request.order.start_by,
                   on_timeout=late)  # fmt: skip
        return found[0]

    def _looked_there(self, instance: Instance) -> Instance:
        """Check over SSH whether the agent has given up, because Shadeform then still reports the instance as active.

        An agent that gives up before it can reach the store leaves a marker file. Without this check, a launch would
        keep waiting and paying until its timeout.
        """
        if self._is_self_deleting or self._world.monotonic() > self._handed.get(instance.id, float("-inf")):
            return instance
        done = self._ask_there(instance, f"cat {startup_script.WORK_DIR}/{BILLING_ENDED}")
        if done is None or done.code:
            return instance
        ended = dataclasses.replace(instance, is_running=False, detail="its agent has exited; billing until destroyed")
        self._looked[instance.id] = (self._world.monotonic(), ended)
        return ended

    def _ask_there(self, instance: Instance, command: str) -> Completed | None:
        """Run a command on the machine over SSH, or return None if login is not possible yet."""
        connection = self.connection(instance.id)
        if connection is None:
            return None
        return ask_there(connection, instance.mark, command, self._home, self._world)

    def _own(self, body: dict[str, Any]) -> dict[str, Any]:
        if not mark_of(body).startswith(self._prefix):
            raise _not_ours(str(body["id"]), self._prefix)
        return body

    def _instance(self, body: dict[str, Any]) -> Instance:
        state, has_ended, read = state_of(body), is_over(body), Figures(self.name)
        instance = Instance(
            id=str(body["id"]),
            mark=mark_of(body),
            provider=self.name,
            state=state,
            billing="no" if has_ended else "yes",
            rate_usd_per_hour=rate_now(body, read) or Decimal(0),
            created_at=self._our_time(read, "created_at", body),
            ended_at=self._our_time(read, "deleted_at", body) if has_ended else None,
            spend_usd=read.usd("cost_estimate", body.get("cost_estimate")),
            is_running=not has_ended and body["status"] != "error",
            detail=detail_of(body),
            page=self.page,
            problems=tuple(read.problems),
        )
        self._ours.add(instance.id)
        self._looked.pop(instance.id, None)
        if not has_ended:
            self._looked[instance.id] = (self._world.monotonic(), instance)
        return instance

    def _our_time(self, read: Figures, name: str, body: dict[str, Any]) -> float | None:
        """Convert a time on Shadeform's clock to the same moment on our clock, which may differ."""
        moment = read.moment(name, body.get(name), self._their_now())
        return None if moment is None else moment - self._api.skew_s


def _refused(exc: Unwelcome, request: Request) -> NoOffer | ProviderRefused:
    if "OUT_OF_STOCK" in exc.text:
        return NoOffer(
            what=f"Shadeform cannot start {request.offer.name} now.",
            why=exc.text,
            fix=f"Choose another offer: {request.order.words.to('plan')}",
        )
    if "INSUFFICIENT_FUNDS" in exc.text:
        return Unwelcome(
            "The Shadeform account has no funds.", exc.text, f"Add funds: {_WALLET_PAGE}",
            status=exc.status, text=exc.text,
        )  # fmt: skip
    return exc


def _not_ours(thing_id: str, prefix: str) -> ProviderRefused:
    return ProviderRefused(
        what=f"{thing_id} does not belong to this homing home directory.",
        why=f"The names of its instances start with {prefix!r}.",
        fix="List its instances: homing runs",
    )
