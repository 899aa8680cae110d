"""Shadeform: one account, a dozen clouds behind it; whole machines, which it deletes by itself at a sum or a date.

    SHADEFORM_API_KEY     the account's key; there is no lesser one. It stays at home unless cloud.shadeform.self_delete
    HOMING_SHADEFORM_URL  another address of the API, for tests

Its API has no idempotency key, no logs and no stop. So our mark is looked for before and after each create, boot.log
is read by SSH, and the end is a delete. Billing ends at the state `deleting`. The guard travels in the create call with
the time that a start may take, is read back, and gets its full time when the machine has been handed over: a computer
that dies while it launches costs a boot and no more.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from homing.api_address import api_address
from homing.cloud import boot as booting
from homing.cloud import meter, startup
from homing.cloud.checks import Check
from homing.cloud.figures import Figures
from homing.cloud.mark import owner_prefix
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
from homing.cloud.providers.shadeform_account import (
    Account,
    detail_of,
    is_over,
    mark_of,
    rate_now,
    state_of,
)
from homing.cloud.providers.shadeform_checks import check_shadeform
from homing.cloud.providers.shadeform_guard import Thresholds, thresholds, thresholds_of
from homing.cloud.providers.shadeform_offers import SPOT, Catalogue, Choice, choose_os, read_catalogue
from homing.cloud.providers.shadeform_reach import ask_there, connection_of
from homing.cloud.ssh_keys import host_key, login_key
from homing.errors import CreateFailed, NoOffer, ProviderRefused, ProviderSilent, StartTimeout, UsageError
from homing.units import format_duration
from homing.wire.boot import EndBilling
from homing.wire.instance import BILLING_ENDED
from homing.world import Completed, World

__all__ = ["KEY_ENV", "URL_ENV", "Shadeform"]

KEY_ENV = "SHADEFORM_API_KEY"
KEY_HEADER = "X-API-KEY"
URL_ENV = "HOMING_SHADEFORM_URL"
_URL = "https://api.shadeform.ai/v1"
_KEYS_PAGE = "https://platform.shadeform.ai/settings/api"
_WALLET_PAGE = "https://platform.shadeform.ai/settings/billing"
_START_S = 1800.0
_DESCRIBE_EVERY_S = 7.5  # eight looks a minute at one instance are enough for anybody who waits
_LOOK_EVERY_S = 5.0
_LOG_BYTES = 20_000
_ID = "{id}"  # in the request that ends billing, until create has told it
_NO_KEY_THERE = "This machine holds no key that could end its billing: home or the auto_delete of Shadeform ends it."


class Shadeform:
    name = "shadeform"
    page = "https://platform.shadeform.ai/instances"
    guard = "Shadeform deletes the instance by itself at the sum or the date that launch sets, whichever comes first."
    settle_s = 20.0
    num_creates = TRIES

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world = home, world
        self._prefix = owner_prefix(owner)
        self._settings: dict[str, Any] = {}
        self._catalogue = Catalogue()
        self._ours: set[str] = set()  # ids that this process has seen under our mark
        self._looked: dict[str, tuple[float, Instance]] = {}
        self._held_keys: set[str] = set()  # SSH keys that Shadeform keeps for a machine which is on its way out
        self._handed: dict[str, float] = {}  # what this process handed over -> until when it looks there by SSH

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        return bool(world.environment().get(KEY_ENV))

    def configure(self, settings: dict[str, Any]) -> None:
        self._settings, self._catalogue = settings, Catalogue()

    def account(self) -> str:
        """Its API does not say whose key it is: another key may be of the same account."""
        return key_account(self.name, self._api.headers[KEY_HEADER])

    @property
    def cannot(self) -> dict[Feature, str]:
        lacking: dict[Feature, str] = {
            "file_store": "A machine at Shadeform cannot see a folder of this computer.",
            "multi_node": "homing rents single machines from Shadeform.",
        }
        if not self._is_self_deleting:
            lacking["end_itself"] = (
                "A machine at Shadeform cannot end its own billing: that takes the account's key, which stays at home."
            )
        return lacking

    def cautions(self) -> list[str]:
        if not self._is_self_deleting:
            return []
        return [
            "cloud.shadeform.self_delete: the account's key goes onto the machine by SSH, so that it can delete itself."
            " Whoever gets into that machine has the whole account: its money, its machines, its keys."
        ]

    def checks(self) -> list[Check]:
        """For `homing doctor`: what shows only when it is needed, and changes nothing."""
        ours = [body for body in self._account.instances() if mark_of(body).startswith(self._prefix)]
        living = [self._account.info(str(body["id"])) for body in ours if not is_over(body)]  # a list shows no guards
        known = [body for body in living if body is not None and not is_over(body)]
        return check_shadeform(self._account.types(), known, self._choice, self.page, _WALLET_PAGE)

    # --- what it would rent ---

    def offers(self, needs: Needs) -> list[Offer]:
        return [offer for offer in self._ask_catalogue().offers if not lack(offer, needs)]

    def left_out(self) -> list[tuple[Offer, str]]:
        """What it has and we do not take, with the reason; of the catalogue that was last asked for."""
        return self._catalogue.left_out

    def place(self, mark: str) -> Place:
        if not self._is_self_deleting:
            return startup.place(EndBilling(kind="command", argv=["echo", _NO_KEY_THERE]))
        url = f"{self._url}/instances/{_ID}/delete"
        return startup.place(EndBilling(kind="request", method="POST", url=url, header_env={KEY_HEADER: KEY_ENV}))

    def plan(self, offer: Offer, order: Order) -> Request:
        if self._is_self_deleting:
            order = dataclasses.replace(order, secrets={**order.secrets, KEY_ENV: self._key})
        argv = tuple(booting.agent_argv("python3", startup.WORK_DIR))
        return Request(provider=self.name, mark=order.mark, offer=offer, order=order, argv=argv, env={})

    # --- its life ---

    @legible
    def create(self, request: Request) -> Instance:
        sent: list[tuple[dict[str, Any], Thresholds]] = []

        def post() -> dict[str, Any]:
            if not sent:  # what is sent again is the same, also in its dates
                guard = self._full(request).by(self._their_now() + self._start_s + meter.MARGIN_S)
                sent.append((self._create_body(request, guard), guard))
            return {"id": self._account.create(sent[0][0])}

        once = Once(self.name, self.settle_s, self._world, self._account.with_mark, self._account.delete)
        instance_id = str(once.create(request, post, _refused)["id"])
        if sent:
            armed = self._armed(request, instance_id, sent[0][1])
            return dataclasses.replace(armed, twins=tuple(once.twins))
        # An earlier call made it; its guard may be that of a launch which has got further.
        return self._armed(request, instance_id, self._full(request), is_earlier_fine=True)

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Files and secrets by SSH; then the guard gets the time of the whole run instead of that of a start."""
        within_s = min(self._start_s, request.order.start_within_s)
        until = self._world.monotonic() + within_s
        connection = self._await_connection(request, instance_id, within_s)
        end = request.order.boot.end_billing
        end = dataclasses.replace(end, url=end.url.replace(_ID, instance_id))
        boot = dataclasses.replace(request.order.boot, end_billing=end)
        told = dataclasses.replace(request, order=dataclasses.replace(request.order, boot=boot))
        startup.hand_over(connection, told, world=self._world, timeout_s=max(1.0, until - self._world.monotonic()))
        self._arm(instance_id, self._full(request))
        self._handed[instance_id] = self._world.monotonic() + self._start_s

    @legible
    def describe(self, instance_id: str) -> Instance:
        at, known = self._looked.get(instance_id, (0.0, None))
        if known is not None and self._world.monotonic() - at < _DESCRIBE_EVERY_S:
            return known
        body = self._account.info(instance_id)
        if body is None:
            return Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="not known to Shadeform")
        instance = self._instance(self._own(body))
        return instance if instance.state != "ready" else self._looked_there(instance)

    @legible
    def list_owned(self) -> list[Instance]:
        bodies = [body for body in self._account.instances() if mark_of(body).startswith(self._prefix)]
        self._looked.clear()  # what is no longer listed must be looked at afresh
        return [instance for body in bodies if (instance := self._instance(body)).state != "gone"]

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        if instance_id not in self._ours:
            with contextlib.suppress(ProviderSilent):  # not shown, or not legibly: it is asked for all the same
                body = self._account.info(instance_id)
                if body is not None and is_over(self._own(body)):
                    return
        try:
            self._account.delete(instance_id)
        except Unwelcome:
            # Gone meanwhile, or on its way: then it is done. Some clouds refuse before the machine is active.
            body = self._account.info(instance_id)
            if body is not None and not is_over(body):
                raise

    def log(self, instance_id: str) -> str:
        """Shadeform keeps none, so what the machine itself wrote, by SSH; or why it cannot be read now."""
        instance = self.describe(instance_id)
        if instance.state == "gone":
            return ""
        done = self._ask_there(instance, f"tail -c {_LOG_BYTES} {startup.ROOT}/boot.log")
        if done is None:
            return f"Shadeform keeps no log, and {instance_id} cannot be logged in to: it is {instance.detail}."
        if done.code:
            last = (done.err.strip().splitlines() or [f"exit code {done.code}"])[-1]
            return f"Shadeform keeps no log, and boot.log could not be read by SSH: {last}"
        return done.out

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """What this instance may cost, and until when it may live, by our clock."""
        body = self._account.info(instance_id)
        if body is None or is_over(self._own(body)):
            return  # what is gone needs no guard
        read = Figures(self.name)
        began = read.moment("created_at", body.get("created_at"), self._their_now()) or self._their_now()
        rate = rate_now(body, read)
        if not rate:
            raise ProviderSilent(
                what=f"Shadeform does not say what {instance_id} costs an hour, so its own guard was not changed.",
                why=" ".join(read.problems),
                doubt="Its earlier limit stays in force there.",
                fix="Do the same again in a minute.",
            )
        guard = thresholds(rate, spend_limit_usd, began, float("inf"))
        self._arm(instance_id, guard if end_by is None else guard.by(end_by + self._api.skew_s))

    # --- beside instances ---

    @legible
    def list_resources(self) -> list[Resource]:
        """SSH keys, each under the mark of its instance. They cost nothing: one that cannot go yet holds up nobody."""
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
            self._held_keys.add(resource.id)  # `homing reconcile` shows it, and ends it later

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
        fix = f"export {KEY_ENV}=...   with one from {_KEYS_PAGE}"
        return Api("Shadeform", self._url, {KEY_HEADER: self._key}, self._world, fix)

    @property
    def _url(self) -> str:
        return api_address(self._world.environment(), URL_ENV, _URL)

    @property
    def _key(self) -> str:
        key = self._world.environment().get(KEY_ENV, "")
        if not key:
            raise UsageError(
                what="There is no key for Shadeform.",
                why=f"{KEY_ENV} is not set, here or in .env.",
                fix=f"export {KEY_ENV}=...   with one from {_KEYS_PAGE}, or: homing setup shadeform",
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
        script = base64.b64encode(self._script(request).encode()).decode()
        body: dict[str, Any] = {
            "cloud": offer.cloud,
            "region": offer.region,
            "shade_instance_type": offer.instance_type,
            "shade_cloud": True,  # Shadeform's own account there; a linked one would not be under its guard
            "name": request.mark,
            "tags": [request.mark],  # a name can be changed by hand in the console
            "os": self._os(offer),
            "ssh_key_id": self._account.add_key(request.mark, login_key(self._home, self._world).public_line),
            "launch_configuration": {"type": "script", "script_configuration": {"base64_script": script}},
            "auto_delete": guard.auto_delete(),
            "alert": guard.alert(),
        }
        return {**body, "rental_type": SPOT} if offer.is_spot else body

    def _script(self, request: Request) -> str:
        """Its timer can end nothing: no key is there before the hand-over. Until then the guard's short date does."""
        return startup.startup_script(
            mark=request.mark,
            end_command=f"echo '{_NO_KEY_THERE}'; exit 1",
            end_within_s=self._start_s + meter.MARGIN_S,
            login_key=login_key(self._home, self._world).public_line,
            host_key=host_key(self._home, request.mark, self._world),
            is_container=False,
        )

    def _os(self, offer: Offer) -> str:
        if offer.name not in self._catalogue.types:
            self._ask_catalogue()
        entry = self._catalogue.types.get(offer.name)
        if entry is None:
            raise NoOffer(
                what=f"Shadeform has no {offer.name} any more.",
                why="It was in its catalogue and is not now, or cloud.shadeform in the run file leaves it out.",
                fix="See what there is: homing offers --provider shadeform",
            )
        return choose_os(list(entry["configuration"]["os_options"]), str(self._settings.get("os") or ""))

    def _armed(
        self, request: Request, instance_id: str, guard: Thresholds, *, is_earlier_fine: bool = False
    ) -> Instance:
        """The new instance, once it shows its guard as it was sent. One that does not is destroyed."""
        try:
            body, why = self._account.read_back(instance_id, guard, is_earlier_fine=is_earlier_fine)
        except ProviderRefused as exc:
            body, why = None, exc.why
        if body is not None and not why:
            if mark_of(body) == request.mark:
                return self._instance(body)
            why = f"its name is {body.get('name')!r} and its tags are {body.get('tags')!r}"
        with contextlib.suppress(ProviderRefused):  # launch tries on, by the id
            self._account.delete(instance_id)
        raise CreateFailed(
            what=f"Shadeform started {request.mark} without the guard that was asked for; it is to be destroyed.",
            why=f"Read back: {why}.",
            fix=f"Try again: {request.order.words.to('launch')}   See {self.page}",
            instance_id=instance_id,
        )

    def _arm(self, instance_id: str, guard: Thresholds) -> None:
        """Another guard for what lives; what is gone needs none."""
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
                what=f"Shadeform did not take the new guard of {instance_id}.",
                why=f"Read back: {why}.",
                fix=f"Repeat the command, or set it by hand: {self.page}",
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
                    fix=f"Take another offer: {request.order.words.to('plan')}   See {self.page}",
                )
            connection = self.connection(instance_id) if instance.state == "ready" else None
            found.extend([connection] if connection is not None else [])
            return bool(found)

        late = StartTimeout(
            what=f"{instance_id} was not active within {format_duration(within_s)}.",
            why="cloud.shadeform.start_limit is that long."
            if within_s == self._start_s
            else "Its limit leaves no more time for it to start and to train.",
            fix=f"Take another offer: {request.order.words.to('plan')}   See {self.page}",
        )
        wait_until(is_there, timeout_s=within_s, every_s=_LOOK_EVERY_S, world=self._world, by=request.order.start_by,
                   on_timeout=late)  # fmt: skip
        return found[0]

    def _looked_there(self, instance: Instance) -> Instance:
        """For Shadeform it is active whatever runs on it. An agent that gave up before it could speak to the store has
        left a sign there, and a launch that did not see it would pay for its whole wait."""
        if self._is_self_deleting or self._world.monotonic() > self._handed.get(instance.id, float("-inf")):
            return instance
        done = self._ask_there(instance, f"cat {startup.WORK_DIR}/{BILLING_ENDED}")
        if done is None or done.code:
            return instance
        ended = dataclasses.replace(instance, is_running=False, detail="its agent has ended; it bills until destroyed")
        self._looked[instance.id] = (self._world.monotonic(), ended)
        return ended

    def _ask_there(self, instance: Instance, command: str) -> Completed | None:
        """None where nobody can log in yet."""
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
        """Their clock may differ from ours; ages do not."""
        moment = read.moment(name, body.get(name), self._their_now())
        return None if moment is None else moment - self._api.skew_s


def _refused(exc: Unwelcome, request: Request) -> NoOffer | ProviderRefused:
    if "OUT_OF_STOCK" in exc.text:
        return NoOffer(
            what=f"Shadeform cannot start {request.offer.name} now.",
            why=exc.text,
            fix=f"Take another offer: {request.order.words.to('plan')}",
        )
    if "INSUFFICIENT_FUNDS" in exc.text:
        return Unwelcome(
            "Shadeform rents nothing to an account without funds.", exc.text, f"Add some: {_WALLET_PAGE}",
            status=exc.status, text=exc.text,
        )  # fmt: skip
    return exc


def _not_ours(thing_id: str, prefix: str) -> ProviderRefused:
    return ProviderRefused(what=f"{thing_id} is not ours.", why=f"Ours begin with {prefix}", fix="homing runs")
