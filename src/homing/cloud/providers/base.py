"""One way to rent a machine: offers -> plan -> create -> describe -> destroy.

    Needs    what a run asks of a machine          Offer     a machine that would start now, at a rate
    Place    where it will live there              Order     what to start there, under which mark
    Request  the create call as data; what --dry-run prints
    Instance what the provider says about a machine of ours, in our words

Every call is safe to repeat and none outlives its timeout. Knows nothing of training.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, Protocol, runtime_checkable

from homing.cloud.words import Words
from homing.errors import HomingError
from homing.gpus import find_gpu
from homing.units import format_bytes, format_usd
from homing.wire.boot import Boot, EndBilling
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
    "key_account",
    "lack",
    "mask",
    "names_of",
    "wait_until",
]

InstanceState = Literal["requested", "booting", "ready", "preempted", "destroying", "gone", "unknown"]
Billing = Literal["yes", "no", "maybe"]
# What a person may ask of a provider beyond renting; each provider says which it lacks, in a sentence.
Feature = Literal["native_deadline", "native_spend_limit", "end_itself", "spot", "ssh", "multi_node", "file_store"]
KEY_ACCOUNT = "key:"  # how an account begins that only its key tells: another key may be of the same one


@dataclass(frozen=True)
class Needs:
    """What a run asks of a machine. Zero and "" mean that it does not matter."""

    gpu: str = ""
    num_gpus: int = 1
    memory_bytes: int = 0  # for training, on one device
    disk_bytes: int = 0
    max_rate_usd_per_hour: Decimal | None = None
    precision: str = ""  # that the card must be able to compute in
    capability: tuple[int, int] = (0, 0)  # compute capability of the oldest GPU that will do
    host_bytes: int = 0  # of the machine itself, for state that does not live on its cards; then it must have one


@dataclass(frozen=True)
class Offer:
    provider: str
    name: str  # the provider's own name of it; what create needs to ask for it again
    device: str  # our name of the card, or the processor's
    num_gpus: int  # 0: it would train on the processor
    num_cores: int
    memory_bytes: int  # of one device: the card's, or the machine's where there is no card
    rate_usd_per_hour: Decimal
    disk_bytes: int = 0  # free for a run; 0: as much as is asked for
    region: str = ""
    boot_s: float = 60.0  # usual time from create to the agent's first heartbeat
    cloud: str = ""  # whose machine it is, where the provider rents out those of others
    instance_type: str = ""  # the provider's name of the kind of machine, where `name` says more than that
    nvlink: bool | None = None  # whether its cards talk to each other directly; None: not told
    is_spot: bool = False  # cheaper, and may be taken away
    interruptions_per_hour: float = 0.0  # how often one like it is taken away, as far as anybody knows
    stock: str = ""  # how many there are, in the provider's word: high, low
    as_of: float | None = None  # when its rate was true; None: it was asked for just now
    rate_source: str = ""  # where the rate comes from when the provider did not tell it; "": from the provider
    lifetime_s: float = 0.0  # so long after it began the provider ends it, whatever the limits; 0: it does not
    host_bytes: int = 0  # memory of the machine itself, beside that of its cards; 0: not told


@dataclass(frozen=True)
class InputFile:
    """A file at home that must lie in the instance's work folder before its first command."""

    path: str  # relative to the work folder
    source: str


@dataclass(frozen=True)
class Place:
    """Where an instance will live and how it ends its own billing: decided before boot, told to the agent as data."""

    work_dir: str
    python: str  # the interpreter there that has homing and torch, at the latest when training begins
    end_billing: EndBilling
    base_python: str = ""  # the one that is there from the start, where that is another
    cache_dir: str = ""  # for code and environments that a later instance finds again; "": it has all that it needs


@dataclass(frozen=True)
class Order:
    """What to start, under which mark."""

    mark: str
    run_name: str
    boot: Boot
    files: tuple[InputFile, ...] = ()
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # environment of the agent, never written down
    start_within_s: float = math.inf  # so long hand_over may wait: then the limit leaves no time to train
    start_by: float = math.inf  # the same by the boot clock at home, which goes on while a laptop sleeps
    typed: str = ""  # the run as a person typed it; with is_resume for the commands in errors alone
    is_resume: bool = False

    @property
    def words(self) -> Words:
        return Words(self.run_name, self.typed, self.is_resume)


@dataclass(frozen=True)
class Request:
    """One create call as data: pure, so that --dry-run shows exactly what launch would do."""

    provider: str
    mark: str
    offer: Offer
    order: Order
    argv: tuple[str, ...]  # the instance's first command: PYTHON -I agent.zip boot.json
    env: dict[str, str]  # names and values that may be shown

    def to_dict(self) -> dict[str, Any]:
        """For people and --json: values of secrets are masked, their names are not."""
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
    """A machine of ours. A state that we do not know is `unknown` and bills; only the provider's word makes it gone."""

    id: str
    mark: str
    provider: str
    state: InstanceState
    billing: Billing
    rate_usd_per_hour: Decimal
    created_at: float | None = None
    ended_at: float | None = None  # when billing ended, by the provider's own record
    spend_usd: Decimal | None = None  # the provider's own figure
    is_running: bool = True  # False only where the provider knows that no program of ours runs on it any more
    detail: str = ""  # one sentence, or the provider's raw state
    page: str = ""  # where the provider shows it
    twins: tuple[str, ...] = ()  # from create alone: made beside it by a call that seemed lost, and ended at once
    problems: tuple[str, ...] = ()  # figures of the answer that cannot be right, one sentence each; not counted


@dataclass(frozen=True)
class Resource:
    """Something of ours beside instances that stays or costs: a volume, a key, a security group."""

    kind: str  # volume | key | group
    id: str
    mark: str  # or another name that begins with our owner's prefix
    provider: str
    rate_usd_per_hour: Decimal = Decimal(0)
    created_at: float | None = None
    detail: str = ""
    is_kept: bool = False  # outlives its instance because a person wished so: a volume for the next attempt, an alert


@dataclass(frozen=True)
class Connection:
    """How to log in by SSH. The host key is pinned: `known_hosts` is one line, never "accept what comes"."""

    user: str
    host: str
    port: int = 22
    key_path: str = ""
    known_hosts: str = ""


class Provider(Protocol):
    name: str
    page: str  # the provider's own list of instances, printed when something goes wrong
    cannot: Mapping[Feature, str]  # feature -> the sentence a person reads on asking for it
    guard: str  # the provider's own spend guard in a sentence; "" where it has none
    settle_s: float  # how late its list may be: absent means absent in several looks over this long

    def account(self) -> str: ...  # whose key it asks with: stable, no secret, asked for once; raises, never guesses

    def offers(self, needs: Needs) -> list[Offer]: ...

    def plan(self, offer: Offer, order: Order) -> Request: ...  # pure; what --dry-run prints

    def create(self, request: Request) -> Instance: ...  # idempotent by mark; CreateFailed carries instance_id

    def hand_over(self, request: Request, instance_id: str) -> None: ...  # what create could not carry; ends in time

    def describe(self, instance_id: str) -> Instance: ...  # gone is a state; an unlisted state is unknown and bills

    def list_owned(self) -> list[Instance]: ...  # all that carries our mark; raises rather than return nothing

    def destroy(self, instance_id: str) -> None: ...  # gone already is success

    def log(self, instance_id: str) -> str: ...  # the end of what its first command wrote, as the provider kept it

    def place(self, mark: str) -> Place: ...  # pure; with how the agent ends billing, as data

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None: ...  # its own guard

    def list_resources(self) -> list[Resource]: ...  # beside instances; raises rather than return nothing

    def destroy_resource(self, resource: Resource) -> None: ...  # gone already is success

    def connection(self, instance_id: str) -> Connection | None: ...  # None: not reached by SSH; `cannot` says why


class Configurable(Protocol):
    """A provider with a section of its own in the run file, `cloud.NAME`."""

    def configure(self, settings: dict[str, Any]) -> None: ...


@runtime_checkable
class Preparing(Protocol):
    """A provider that has something to make ready, such as an image, while nothing bills yet."""

    def prepare(self, store: str) -> None: ...  # for a run with this store; done already is success


@runtime_checkable
class Cautioning(Protocol):
    """A provider with something that a person must hear before anything is rented."""

    def cautions(self) -> list[str]: ...  # one sentence each, for what the run file asks of it


@runtime_checkable
class Delivering(Protocol):
    """A provider whose instances see the store as it was when they last looked: what home wrote must be shown them."""

    def deliver(self, instance_id: str) -> None: ...  # has a deadline; what is gone needs nothing


@runtime_checkable
class Remembering(Protocol):
    """A provider that keeps all that it ever made: whether a create call took effect is known there for ever."""

    def remember(self, mark: str) -> Instance | None: ...  # None: nothing was ever made under it; raises when blind


@runtime_checkable
class Doubling(Protocol):
    """A provider that makes one machine for each create call, also under one mark, and is asked again after no clear
    answer: of a launch that nobody saw take effect there may have been so many."""

    num_creates: int


@runtime_checkable
class ManyNamed(Protocol):
    """A provider that does not always say whose key it is: then the key has the account's name, and one of its own."""

    def account_names(self) -> tuple[str, ...]: ...  # account() first; all that a line rented with this key may name


def lack(offer: Offer, needs: Needs) -> str:
    """Why this offer does not cover the needs, in a few words; "" when it does."""
    wanted, has = find_gpu(needs.gpu), find_gpu(offer.device)
    if needs.gpu and (not offer.num_gpus or (wanted or needs.gpu) != (has or offer.device)):
        return f"has no {needs.gpu}"
    if (needs.gpu or needs.num_gpus > 1) and offer.num_gpus < needs.num_gpus:
        return f"has {offer.num_gpus} of {needs.num_gpus} GPUs"
    if has and has.compute_capability < needs.capability and offer.provider != "local":  # there its own torch decides
        is_, least = (".".join(map(str, each)) for each in (has.compute_capability, needs.capability))
        return f"has GPUs of compute capability {is_} ({has.name}); the torch we install needs {least}"
    if has and ((needs.precision == "bf16" and not has.has_bf16) or (needs.precision == "fp8" and not has.has_fp8)):
        works = "bf16" if has.has_bf16 else "fp32"
        return f"cannot compute in {needs.precision} (train.precision: {works} would work there, or auto)"
    if needs.memory_bytes > offer.memory_bytes:
        return f"has {format_bytes(offer.memory_bytes)} of {format_bytes(needs.memory_bytes)} memory"
    if needs.host_bytes and not offer.num_gpus:
        return "has no card, and offload is for one"
    if offer.host_bytes and needs.host_bytes > offer.host_bytes:
        return f"has {format_bytes(offer.host_bytes)} of {format_bytes(needs.host_bytes)} memory beside the card's"
    if offer.disk_bytes and needs.disk_bytes > offer.disk_bytes:
        return f"has {format_bytes(offer.disk_bytes)} of {format_bytes(needs.disk_bytes)} disk"
    rate, most = offer.rate_usd_per_hour, needs.max_rate_usd_per_hour
    if most is not None and rate > most:
        return f"costs {format_usd(rate)}/h, over the limit of {format_usd(most)}/h"
    return ""


def key_account(provider: str, key: str) -> str:
    """An account whose API does not say which it is, known by its key alone.

    Eight bytes of a hash tell two keys apart; an API key has far too many bits to be found again from them.
    """
    return KEY_ACCOUNT + hashlib.sha256(f"homing account {provider} {key}".encode()).hexdigest()[:16]


def names_of(provider: Provider) -> tuple[str, ...]:
    """The account of the key at hand, first as its provider calls it now; raises where that cannot be asked."""
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
    """True as soon as `check` is; after the deadline raises `on_timeout`, or returns False where none is given.

    `by` ends it too, a moment of the boot clock: what is waited for may bill while this computer sleeps and no
    seconds pass here.
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
