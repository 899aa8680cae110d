"""The provider interface for renting a machine: offers -> plan -> create -> describe -> destroy.

    Needs    what a run requires of a machine      Offer     a machine that can be started now, and its hourly rate
    Place    folders and Python on the instance    Order     what to start on the instance, and its mark (name)
    Request  the create call as data, which --dry-run prints
    Instance one of our machines, with its state as the provider reports it, converted to our terms

Every call is safe to repeat, and none takes longer than its timeout. This module knows nothing about training.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, Protocol, runtime_checkable

from homing.cloud.commands_to_type import Words
from homing.errors import HomingError
from homing.gpus import find_gpu
from homing.units import format_bytes, format_usd
from homing.wire.boot_json import Boot, EndBilling
from homing.world import World

__all__ = [
    "KEY_ACCOUNT",
    "Billing",
    "Cautioning",
    "Configurable",
    "Connection",
    "Delivering",
    "Doubling",
    "Feature",
    "InputFile",
    "Instance",
    "InstanceState",
    "ManyNamed",
    "Needs",
    "Offer",
    "Order",
    "Place",
    "Preparing",
    "Provider",
    "Remembering",
    "Request",
    "Resource",
    "can_end_itself",
    "key_account",
    "lack",
    "mask",
    "names_of",
    "wait_until",
]

InstanceState = Literal["requested", "booting", "ready", "preempted", "destroying", "gone", "unknown"]
Billing = Literal["yes", "no", "maybe"]
# Optional features of a provider. Each provider lists the features it lacks, with a sentence about each for the user.
Feature = Literal["native_deadline", "native_spend_limit", "end_itself", "spot", "ssh", "multi_node", "file_store"]
KEY_ACCOUNT = "key:"  # prefix of account names that are derived from an API key


@dataclass(frozen=True)
class Needs:
    """What a run requires of a machine. Zero and "" mean "no requirement"."""

    gpu: str = ""
    num_gpus: int = 1
    memory_bytes: int = 0  # memory that training needs on one device
    disk_bytes: int = 0
    max_rate_usd_per_hour: Decimal | None = None
    precision: str = ""  # a precision that the GPU must support
    capability: tuple[int, int] = (0, 0)  # minimum compute capability of the GPU
    host_bytes: int = 0  # host memory for offloaded state; if set, the machine must have a GPU


@dataclass(frozen=True)
class Offer:
    provider: str
    name: str  # the provider's name for the machine, which the create call uses to request it
    device: str  # our name for the GPU, or the CPU's name
    num_gpus: int  # 0 if training would run on the CPU
    num_cores: int
    memory_bytes: int  # memory of one GPU, or of the machine if it has no GPU
    rate_usd_per_hour: Decimal
    disk_bytes: int = 0  # disk space available to a run; 0 if the provider supplies as much as requested
    region: str = ""
    boot_s: float = 60.0  # typical time from create to the agent's first heartbeat
    cloud: str = ""  # the underlying cloud, if the provider resells other clouds' machines
    instance_type: str = ""  # the provider's name for the machine type, if `name` contains more than that
    nvlink: bool | None = None  # whether the machine's GPUs are connected by NVLink; None if unknown
    is_spot: bool = False  # a spot machine is cheaper, but may be preempted
    interruptions_per_hour: float = 0.0  # estimated preemption rate
    stock: str = ""  # availability in the provider's own terms, such as high or low
    as_of: float | None = None  # date of the rate; None if it was just fetched from the provider
    rate_source: str = ""  # where the rate comes from; "" if from the provider itself
    # The provider ends the machine this long after its start, regardless of the limits; 0 means never.
    lifetime_s: float = 0.0
    host_bytes: int = 0  # host memory, separate from GPU memory; 0 if unknown


@dataclass(frozen=True)
class InputFile:
    """A local file that must be in the instance's work folder before its first command runs."""

    path: str  # path relative to the work folder
    source: str


@dataclass(frozen=True)
class Place:
    """Folders and Python interpreters on an instance, and how the instance ends its own billing.

    These are fixed before boot and passed to the agent as data.
    """

    work_dir: str
    python: str  # the Python interpreter that has homing and torch when training begins
    end_billing: EndBilling
    base_python: str = ""  # the Python interpreter available from the start, if different
    # Where to keep code and environments that a later instance can reuse, or "" if the machine has everything it needs.
    cache_dir: str = ""


@dataclass(frozen=True)
class Order:
    """What to start on the instance, and the mark (name) to give it."""

    mark: str
    run_name: str
    boot: Boot
    files: tuple[InputFile, ...] = ()
    # Secrets are passed in the agent's environment and never written to disk.
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    start_within_s: float = math.inf  # how long hand_over may wait while still leaving time to train
    start_by: float = math.inf  # the same deadline by the local boot clock, which keeps running while a laptop sleeps
    typed: str = ""  # the run as typed on the command line; like is_resume, used only for commands in error messages
    is_resume: bool = False

    @property
    def words(self) -> Words:
        return Words(self.run_name, self.typed, self.is_resume)


@dataclass(frozen=True)
class Request:
    """One create call as pure data, so that --dry-run shows exactly what launch would do."""

    provider: str
    mark: str
    offer: Offer
    order: Order
    argv: tuple[str, ...]  # the instance's first command: PYTHON -I agent.zip boot.json
    env: dict[str, str]  # environment variables that may be displayed

    def to_dict(self) -> dict[str, Any]:
        """Return the request for display and --json, with the names of secrets but with their values masked."""
        boot = self.order.boot
        end = boot.end_billing
        return {
            "provider": self.provider,
            "mark": self.mark,
            "offer": self.offer.name,
            "rate_usd_per_hour": str(self.offer.rate_usd_per_hour),
            "argv": list(self.argv),
            "env": {name: mask(name, value) for name, value in sorted(self.env.items())},
            "secrets": {name: "****" for name in sorted(self.order.secrets)},
            "work_dir": boot.work_dir,
            "files": [f"{file.path} <- {file.source}" for file in self.order.files],
            "inputs": [f"{item.path} <- {item.url or item.key}" for item in boot.inputs],
            "end_billing": " ".join(end.argv) or f"{end.method} {end.url}",
            "store": boot.store,
            "spend_limit_usd": boot.spend_limit_usd,
            "time_limit_s": boot.time_limit_s,
            "keep_on_failure_s": boot.keep_on_failure_s,
        }


@dataclass(frozen=True)
class Instance:
    """One of our machines, as the provider reports it.

    An unrecognized state is `unknown` and counts as billing. An instance is gone only if the provider says so.
    """

    id: str
    mark: str
    provider: str
    state: InstanceState
    billing: Billing
    rate_usd_per_hour: Decimal
    created_at: float | None = None
    ended_at: float | None = None  # when billing ended, according to the provider
    spend_usd: Decimal | None = None  # the spend according to the provider
    is_running: bool = True  # False only if the provider knows that none of our programs is running on the instance
    detail: str = ""  # a sentence about the state, or the provider's own name for it
    page: str = ""  # the provider's web page for the instance
    twins: tuple[str, ...] = ()  # ids of duplicates that create accidentally started, then destroyed; otherwise empty
    # One sentence per implausible figure in the provider's data. Such figures are ignored.
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resource:
    """A resource other than an instance that persists or costs money, such as a volume, a key or a security group."""

    kind: str  # volume | key | group
    id: str
    mark: str  # the resource's mark, or another name that starts with our owner's prefix
    provider: str
    rate_usd_per_hour: Decimal = Decimal(0)
    created_at: float | None = None
    detail: str = ""
    # Whether the user wants the resource to outlive its instance, like a volume for the next attempt or a budget alert.
    is_kept: bool = False


@dataclass(frozen=True)
class Connection:
    """How to log in by SSH. `known_hosts` is one line that pins the host key, so any other key is rejected."""

    user: str
    host: str
    port: int = 22
    key_path: str = ""
    known_hosts: str = ""


class Provider(Protocol):
    name: str
    page: str  # web page that lists the instances; printed when something goes wrong
    cannot: Mapping[Feature, str]  # missing feature -> the sentence shown to a user who asks for it
    guard: str  # one sentence about the provider's own spend guard; "" if it has none
    # How stale the instance list may be. An instance missing from several lists spanning this time counts as gone.
    settle_s: float

    # Returns a stable, non-secret name for the key's account, and caches it. Raises an error instead of guessing.
    def account(self) -> str: ...

    def offers(self, needs: Needs) -> list[Offer]: ...

    def plan(self, offer: Offer, order: Order) -> Request: ...  # a pure function; --dry-run prints the result

    def create(self, request: Request) -> Instance: ...  # idempotent by mark; CreateFailed has the id, if known

    # Sends the instance what the create call could not include, within a deadline.
    def hand_over(self, request: Request, instance_id: str) -> None: ...

    def describe(self, instance_id: str) -> Instance: ...  # `gone` and `unknown` are states, not errors

    def list_owned(self) -> list[Instance]: ...  # all instances with our marks; raises if they cannot be listed

    def destroy(self, instance_id: str) -> None: ...  # succeeds if the instance is already gone

    # Returns the last part of the first command's output, as kept by the provider.
    def log(self, instance_id: str) -> str: ...

    def place(self, mark: str) -> Place: ...  # a pure function; Place also says how the agent ends billing

    # Sets the provider's own guard: the instance's maximum total cost, and its latest end time by our clock.
    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None: ...

    # Returns our resources other than instances; raises if they cannot be listed.
    def list_resources(self) -> list[Resource]: ...

    def destroy_resource(self, resource: Resource) -> None: ...  # succeeds if the resource is already gone

    # Returns None if there is no SSH access; `cannot` gives the reason.
    def connection(self, instance_id: str) -> Connection | None: ...


class Configurable(Protocol):
    """A provider with its own section in the run file, `cloud.NAME`."""

    def configure(self, settings: dict[str, Any]) -> None: ...


@runtime_checkable
class Preparing(Protocol):
    """A provider that prepares something, such as an image, before billing starts."""

    def prepare(self, store: str) -> None: ...  # `store` is the URL of the run's store; safe to repeat


@runtime_checkable
class Cautioning(Protocol):
    """A provider with warnings that the user must see before renting anything."""

    def cautions(self) -> list[str]: ...  # one sentence per warning about the run file's settings


@runtime_checkable
class Delivering(Protocol):
    """A provider whose instances cache the store, and must reload it after this computer has written to it."""

    def deliver(self, instance_id: str) -> None: ...  # has a deadline; does nothing if the instance is gone


@runtime_checkable
class Remembering(Protocol):
    """A provider that keeps a record of everything it ever created, so that any create call can be checked later."""

    # Returns None if nothing was ever created with this mark, and raises if it cannot check.
    def remember(self, mark: str) -> Instance | None: ...


@runtime_checkable
class Doubling(Protocol):
    """A provider on which every create call starts a new machine, even with the same mark.

    A create call without a clear response is retried, so a launch with an unknown outcome may have created up to
    `num_creates` machines.
    """

    num_creates: int


@runtime_checkable
class ManyNamed(Protocol):
    """A provider that may be unable to identify an API key's account. It then names the account after the key."""

    # Returns all account names that ledger rows may contain for this key, starting with the name from account().
    def account_names(self) -> tuple[str, ...]: ...


def can_end_itself(provider: Provider) -> bool:
    """Return True if this provider's machines can end their own billing."""
    return "end_itself" not in provider.cannot


def lack(offer: Offer, needs: Needs) -> str:
    """Return a short reason why this offer does not meet the run's needs, or "" if it does."""
    wanted, has = find_gpu(needs.gpu), find_gpu(offer.device)
    if needs.gpu and (not offer.num_gpus or (wanted or needs.gpu) != (has or offer.device)):
        return f"has no {needs.gpu}"
    if (needs.gpu or needs.num_gpus > 1) and offer.num_gpus < needs.num_gpus:
        return f"has {offer.num_gpus} of {needs.num_gpus} GPUs"
    if has and has.compute_capability < needs.capability and offer.provider != "local":
        # `local` is not checked, because it uses the torch that is already installed on this computer.
        is_, least = (".".join(map(str, each)) for each in (has.compute_capability, needs.capability))
        return f"has GPUs of compute capability {is_} ({has.name}); the torch we install needs {least}"
    if has and ((needs.precision == "bf16" and not has.has_bf16) or (needs.precision == "fp8" and not has.has_fp8)):
        works = "bf16" if has.has_bf16 else "fp32"
        return f"cannot compute in {needs.precision} (train.precision: {works} would work there, or auto)"
    if needs.memory_bytes > offer.memory_bytes:
        return f"has {format_bytes(offer.memory_bytes)} of {format_bytes(needs.memory_bytes)} memory"
    if needs.host_bytes and not offer.num_gpus:
        return "has no GPU, and offload needs one"
    if offer.host_bytes and needs.host_bytes > offer.host_bytes:
        return f"has {format_bytes(offer.host_bytes)} of {format_bytes(needs.host_bytes)} host memory"
    if offer.disk_bytes and needs.disk_bytes > offer.disk_bytes:
        return f"has {format_bytes(offer.disk_bytes)} of {format_bytes(needs.disk_bytes)} disk"
    rate, most = offer.rate_usd_per_hour, needs.max_rate_usd_per_hour
    if most is not None and rate > most:
        return f"costs {format_usd(rate)}/h, over the limit of {format_usd(most)}/h"
    return ""


def key_account(provider: str, key: str) -> str:
    """Return a name for an account that is known only by its API key, because the API does not identify the account.

    Eight bytes of a hash are enough to tell keys apart. They do not reveal the key, which has far more entropy. Another
    key of the same account gets a different name.
    """
    return KEY_ACCOUNT + hashlib.sha256(f"homing account {provider} {key}".encode()).hexdigest()[:16]


def names_of(provider: Provider) -> tuple[str, ...]:
    """Return all names of the current key's account, the one from account() first. Raise if the account is unknown."""
    return provider.account_names() if isinstance(provider, ManyNamed) else (provider.account(),)


_SECRET = re.compile(r"(?i)(key|token|secret|passw|credential)")


def mask(name: str, value: str) -> str:
    return "****" if _SECRET.search(name) and value else value


def wait_until(
    check: Callable[[], bool],
    *,
    timeout_s: float,
    every_s: float,
    world: World,
    by: float = math.inf,
    on_timeout: HomingError | None = None,
) -> bool:
    """Wait until `check()` is true; return True. After the deadline, raise `on_timeout` if given, else return False.

    `by` is an additional deadline by the boot clock, because an instance keeps billing while this computer is asleep,
    when the monotonic clock does not advance.
    """
    deadline = world.monotonic() + timeout_s
    while True:
        if check():
            return True
        left_s = deadline - world.monotonic()
        if by < math.inf:
            left_s = min(left_s, by - world.boottime())
        if left_s <= 0:
            break
        world.sleep(min(every_s, left_s))
    if on_timeout is not None:
        raise on_timeout
    return False
