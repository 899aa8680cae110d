"""Modal as a provider: each instance is a Sandbox named after its mark. It ends when its command ends.

    name       must be unique among the running sandboxes of our app, so Modal itself makes create idempotent
    tags       contain the owner, mark, rate and creation time, because Modal's list does not include them
    timeout    set in the create call, from the limits; cannot be changed later, and is at most a day
    queue      if no GPU is free, Modal queues the sandbox at no cost, for as long as the run file allows and the limit
               leaves time to train; then it is canceled

The account's token stays on this computer. The SDK is imported on first use. api.py defines the calls and their
deadlines.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.check_numbers import Figures
from homing.cloud.ledger.mark import owner_prefix
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
    wait_until,
)
from homing.cloud.providers.modal import create_request
from homing.cloud.providers.modal.api import APP, ModalApi
from homing.cloud.providers.modal.offers import Size, gpu_string, make_offers
from homing.cloud.providers.once import Once
from homing.cloud.providers.rest import Unsure, Unwelcome, legible
from homing.cloud.setup import Step
from homing.doctor.check import Check, ok, warning
from homing.errors import HomingError, NoOffer, ProviderRefused, ProviderSilent
from homing.store.modal.client import TOKEN_ENV, has_account
from homing.units import format_duration
from homing.world import World

__all__ = ["Modal"]

_DEFAULTS: dict[str, Any] = {"cores": 2.0, "memory": 16 * 2**30, "queue": 600.0, "image": "", "registry": ""}
_OWNER, _MARK, _RATE, _CREATED, _VOLUME = (f"homing-{name}" for name in ("owner", "mark", "rate", "created", "volume"))
_DESCRIBE_EVERY_S = 4.0  # minimum interval between queries of one sandbox; callers may poll several times a second
_DELIVER_S = 120.0
_RATES_S = 300.0  # how long a list of rates may be reused
_ENDED_BY = {124: "ended by Modal's sandbox timeout", 137: "terminated"}


class Modal:
    name = "modal"
    page = "https://modal.com/apps"
    settle_s = 10.0
    guard = "Modal ends a sandbox at its timeout, which homing sets from the limits when it creates the sandbox."
    cannot: Mapping[Feature, str] = {
        "ssh": "A Modal sandbox is a container without SSH; `modal shell` opens a shell in a new one.",
        "spot": "Modal has one price per GPU and no spot instances.",
        "multi_node": "A Modal sandbox is a single instance with up to eight GPUs.",
        "file_store": "A Modal sandbox cannot read a local folder.",
    }

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._home, self._world, self._owner = home, world, owner
        self._prefix = owner_prefix(owner)
        self._api = ModalApi(world)
        self._settings = dict(_DEFAULTS)
        self._tags: dict[str, dict[str, str]] = {}  # sandbox id -> tags; cached, because only create sets tags
        self._looked: dict[str, tuple[float, Instance]] = {}
        self._rates: tuple[float, dict[str, Decimal]] | None = None

    @staticmethod
    def is_configured(home: Path, world: World) -> bool:
        return has_account(world.environment(), world)

    def account(self) -> str:
        return self._api.workspace

    def configure(self, settings: dict[str, Any]) -> None:
        self._settings = {**_DEFAULTS, **settings}

    def checks(self) -> list[Check]:
        """Run the checks for `homing doctor`, which change nothing."""
        if self._api.rates():
            return [ok("modal.rates", "Modal reports its rates.")]
        text = "Modal reports no rates to this account: homing uses a table of published rates."
        return [
            warning("modal.rates", text, "Compare them with https://modal.com/pricing before a long run.", self.page)
        ]

    def setup_steps(self) -> list[Step]:
        """Return the setup steps. The first launch performs any that have not been done."""
        has_app = self._api.app(may_create=False) is not None
        return [
            Step(f"the app {APP} in the workspace, which contains the sandboxes", has_app, self._make_app),
            Step("the image with the tested versions, built and cached by Modal", False, self._make_image),
        ]

    # --- offers ---

    def offers(self, needs: Needs) -> list[Offer]:
        now = self._world.monotonic()
        if self._rates is None or now - self._rates[0] > _RATES_S:
            self._rates = (now, self._api.rates())
        return make_offers(needs, self._size, self._rates[1])

    def place(self, mark: str) -> Place:
        return create_request.place(is_own_image=bool(self._settings["image"]))

    def plan(self, offer: Offer, order: Order) -> Request:
        return create_request.make_request(offer, order)

    def prepare(self, store: str) -> None:
        """Build the image before anything bills. Modal caches it, so later launches do not build it again."""
        image = create_request.make_image(self._api.connection, self._settings, store, self._home, self._world)
        self._api.build(image, self._api.app(may_create=True))

    # --- instances ---

    @legible
    def create(self, request: Request) -> Instance:
        _check_secrets(request)
        once = Once(self.name, self.settle_s, self._world, self._under, self.destroy)
        folder = self._home / "modal" / request.mark
        try:
            made = once.create(request, lambda: self._post(request, folder), _refused)
        finally:
            self._world.rmtree(folder)
        return self._instance(made["sandbox"])

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Do nothing, because the create call delivered everything."""

    @legible
    def describe(self, instance_id: str) -> Instance:
        at, known = self._looked.get(instance_id, (0.0, None))
        if known is not None and self._world.monotonic() - at < _DESCRIBE_EVERY_S:
            return known
        sandbox = self._find(instance_id)
        if sandbox is None:
            return Instance(instance_id, "", self.name, "gone", "no", Decimal(0), detail="unknown to Modal")
        return self._instance(self._own(sandbox))

    @legible
    def list_owned(self) -> list[Instance]:
        app = self._api.app(may_create=False)
        self._looked.clear()  # clear the cache, so that a sandbox that is no longer listed is looked up again
        if app is None:
            return []
        found = [self._instance(sandbox) for sandbox in self._api.list(app, {_OWNER: self._owner})]
        # A sandbox without tags has ended since it was listed, because a running sandbox always has the tags of its
        # create call.
        return [instance for instance in found if instance.state != "gone" and instance.mark]

    @legible
    def destroy(self, instance_id: str) -> None:
        self._looked.pop(instance_id, None)
        sandbox = self._find(instance_id)
        if sandbox is not None:
            self._api.terminate(self._own(sandbox))

    def log(self, instance_id: str) -> str:
        sandbox = self._find(instance_id)
        return "" if sandbox is None else self._api.log(sandbox)

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Do nothing, because a sandbox's timeout cannot be changed.

        A lower limit is enforced by the agent, the dead-man process and the local guard. A higher limit applies to the
        next sandbox, because boot.json tells the agent to leave the current sandbox before its timeout.
        """

    def deliver(self, instance_id: str) -> None:
        """Make the sandbox reload its Volume, so that it sees new data. A sandbox does not reload by itself."""
        sandbox = self._find(instance_id)
        if sandbox is None or sandbox.returncode is not None or not self._tags_of(self._own(sandbox)).get(_VOLUME):
            return
        problem = ""

        def is_seen() -> bool:
            nonlocal problem
            # Reloading fails while a file on the Volume is open, for example during a checkpoint push.
            problem = self._api.reload(sandbox)
            return not problem

        try:
            is_delivered = wait_until(is_seen, timeout_s=_DELIVER_S, every_s=2.0, world=self._world)
        finally:
            self._api.let_go(sandbox)
        if not is_delivered:
            raise ProviderSilent(
                what=f"The request for {instance_id} is in the store, but was not delivered.",
                why=f"Modal could not reload the instance's Volume within {format_duration(_DELIVER_S)}: {problem}",
                fix="Repeat the command in a minute.",
            )

    # --- other resources ---

    def list_resources(self) -> list[Resource]:
        return []  # none: a Volume is the user's own store, and Modal stores images for free

    def destroy_resource(self, resource: Resource) -> None:
        raise AssertionError(f"Modal lists no {resource.kind}")

    def connection(self, instance_id: str) -> Connection | None:
        return None

    # --- helpers, in the order they are called ---

    def _make_app(self) -> None:
        self._api.app(may_create=True)

    def _make_image(self) -> None:
        self.prepare("modal:any")

    @property
    def _size(self) -> Size:
        return Size(float(self._settings["cores"]), int(self._settings["memory"]))

    def _post(self, request: Request, folder: Path) -> dict[str, Any]:
        began, configured_s = self._world.monotonic(), float(self._settings["queue"])
        # The limits count from the create call, so a GPU that becomes free too late would leave no time to train.
        queue_s = min(configured_s, create_request.start_within_s(request.order.boot, self._world.now()))
        wanted = self._wanted(request, folder)
        argv = create_request.entry_argv(request.argv)
        try:
            sandbox = self._api.create(argv, queue_s, **wanted)
        except Unwelcome as exc:
            if exc.text == "AlreadyExistsError":
                # A sandbox is named after its mark, so an earlier call whose response was lost must have created it.
                raise Unsure(exc.why) from exc
            self._take_back(request)
            raise
        except Unsure as exc:
            if self._world.monotonic() - began < queue_s:
                raise
            self._take_back(request)
            longer = "wait longer: cloud.modal.queue"
            if queue_s < configured_s:
                longer = "raise --spend-limit: it left no more time to wait and train"
            raise NoOffer(
                what=f"modal had no free {request.offer.name} within {format_duration(queue_s)}.",
                why="Modal queues a sandbox until a GPU is free. homing canceled this one after the wait.",
                fix=f"Choose another GPU: {request.order.words.to('plan')}   or {longer}",
            ) from exc
        return {"id": sandbox.object_id, "sandbox": sandbox}

    def _wanted(self, request: Request, folder: Path) -> dict[str, Any]:
        order, boot, offer = request.order, request.order.boot, request.offer
        sdk, volume = self._api.connection.sdk, create_request.volume_of(order.boot.store)
        cores, mib = self._size.of(offer.num_gpus)
        image = create_request.make_image(self._api.connection, self._settings, boot.store, self._home, self._world)
        tags = {_OWNER: self._owner, _MARK: request.mark, _RATE: str(offer.rate_usd_per_hour)}
        tags[_CREATED] = str(int(self._world.now()))
        if volume:
            tags[_VOLUME] = volume
        return {
            "app": self._api.app(may_create=True),
            "name": request.mark,
            "tags": tags,
            "image": create_request.parcel(image, request, folder, self._world),
            "env": dict(request.env),
            "secrets": [sdk.Secret.from_dict(dict(order.secrets))] if order.secrets else [],
            "timeout": create_request.timeout_s(boot),
            "gpu": gpu_string(offer),
            # (reserved amount, maximum). The two are equal, because using more than the reserved amount would cost more
            # than the stated rate.
            "cpu": (cores, cores),
            "memory": (mib, mib),
            "volumes": {create_request.MOUNT: self._api.volume(volume)} if volume else {},
        }

    def _take_back(self, request: Request) -> None:
        """Terminate the queued sandbox, in case the SDK did not succeed in canceling it after the wait."""
        sandbox = self._api.by_name(request.mark)
        if sandbox is not None:
            self._api.terminate(sandbox)

    def _under(self, mark: str) -> list[dict[str, Any]]:
        sandbox = self._api.by_name(mark)
        return [] if sandbox is None else [{"id": sandbox.object_id, "sandbox": sandbox}]

    def _find(self, instance_id: str) -> Any | None:
        # For anything but a sandbox id, Modal may report an invalid request instead of "not found".
        return self._api.by_id(instance_id) if instance_id.startswith("sb-") else None

    def _own(self, sandbox: Any) -> Any:
        mark = self._tags_of(sandbox).get(_MARK, "")
        if not mark.startswith(self._prefix):
            raise ProviderRefused(
                what=f"{sandbox.object_id} does not belong to this homing home directory.",
                why=f"The names of its sandboxes start with {self._prefix!r}.",
                fix="List its sandboxes: homing runs",
            )
        return sandbox

    def _tags_of(self, sandbox: Any) -> dict[str, str]:
        sandbox_id = str(sandbox.object_id)
        if not self._tags.get(sandbox_id):
            self._tags[sandbox_id] = self._api.tags(sandbox)
        return self._tags[sandbox_id]

    def _instance(self, sandbox: Any) -> Instance:
        tags, code = self._tags_of(sandbox), sandbox.returncode
        is_over, read = code is not None, Figures(self.name)
        instance = Instance(
            id=str(sandbox.object_id),
            mark=tags.get(_MARK, ""),
            provider=self.name,
            state="gone" if is_over else "ready",
            billing="no" if is_over else "yes",
            rate_usd_per_hour=read.rate(f"the tag {_RATE}", tags.get(_RATE)) or Decimal(0),
            created_at=read.moment(f"the tag {_CREATED}", tags.get(_CREATED), self._world.now()),
            is_running=not is_over,
            detail=_ENDED_BY.get(code, f"its command exited with code {code}") if is_over else "running or queued",
            page=self.page,
            problems=tuple(read.problems),
        )
        self._looked.pop(instance.id, None)
        if not is_over:
            self._looked[instance.id] = (self._world.monotonic(), instance)
        return instance


def _check_secrets(request: Request) -> None:
    leaked = [name for name in (*request.order.secrets, *request.env) if name in TOKEN_ENV]
    if leaked:
        raise AssertionError(f"the account's token would leave this computer: {leaked}")


def _refused(exc: Unwelcome, request: Request) -> HomingError:
    if exc.text != "ResourceExhaustedError":
        return exc
    return NoOffer(
        what=f"modal cannot start {request.offer.name} now.",
        why=exc.why,
        fix=f"Choose another offer: {request.order.words.to('plan')}"
        "   or see the limits of your Modal plan: modal.com/settings",
    )
