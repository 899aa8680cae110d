"""Defines the content of a sandbox: image, files, first command, timeout, and access to its store.

image      Debian with the packages of requirements-instance.txt, which Modal builds once per package list; or the
           user's own image
files      agent, wheel and boot.json, mounted when the sandbox starts, because they are not part of the image
command    copies the files to the work folder, starts the agent, and runs until billing ends or no agent is left
timeout    Modal's own guard, set from the limits so that it acts after all others; never more than Modal allows
store      a `modal:` Volume is mounted, so that no token is needed; for any other store, the keys are sent as a Secret
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shlex
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.machine_setup import code_bundle
from homing.cloud.machine_setup.boot_files import agent_argv
from homing.cloud.machine_setup.startup_script import CACHE_DIR, ROOT, WORK_DIR
from homing.cloud.machine_setup.startup_script import place as bare_place
from homing.cloud.providers.base import Offer, Order, Place, Request
from homing.cloud.providers.modal.offers import LIFETIME_S
from homing.instance.bootstrap import VERIFIED
from homing.store.address import parse_modal
from homing.store.modal.client import Connection
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot
from homing.wire.boot_json_agent import EndBilling
from homing.wire.guard_timing import LAND, PROVIDER, allowed_s, reserve_s
from homing.world import World

__all__ = [
    "MOUNT",
    "PYTHON",
    "entry_argv",
    "make_image",
    "make_request",
    "parcel",
    "place",
    "start_within_s",
    "timeout_s",
    "volume_of",
]

MOUNT = f"{ROOT}/store"  # where the Volume is mounted in a sandbox
PYTHON = "python3"
_PYTHON_VERSION = "3.12"
_PARCEL = f"{ROOT}/parcel"  # where the files are mounted; the command copies them, because a mount may be read-only
_OVER = f"{WORK_DIR}/over"
_ENTRY_PID = f"{WORK_DIR}/entry.pid"
_LEAST_S = 60  # minimum timeout, because a sandbox needs about this long to boot
# How long before its timeout a sandbox must stop working on the run, as a share of the time reserved for landing
# (ending early). The share is below 1, so that the limits end the run first.
_LATE_SHARE = 0.9

# The sandbox ends when this command exits. So the command keeps running while the agent or the dead-man process is
# alive, which lets the dead-man process restart a crashed agent. It finds the two by their command lines, and skips
# itself, because its own command line matches too.
_ENTRY = f"""mkdir -p {WORK_DIR} && cp -R {_PARCEL}/. {WORK_DIR}/ || exit 1
echo $$ > {_ENTRY_PID}
"$@" & agent=$!
trap 'kill -TERM $agent 2>/dev/null' TERM INT
sleep 1
is_alive() {{ grep -lsa '{WORK_DIR}/agent[.]zip' /proc/[0-9]*/cmdline | grep -qv "^/proc/$$/"; }}
while [ ! -e {_OVER} ] && is_alive; do sleep 1; done
"""


def place(*, is_own_image: bool) -> Place:
    """Return the sandbox's folders and Python interpreters, and the command that ends its billing.

    Billing ends when the first command exits. To end billing, the agent creates a marker file or, if the disk is full,
    kills the first command. The image that Modal builds for us has all packages in its own Python. The user's own image
    is treated as a bare machine with Python: the bootstrap uses the environment made by `homing image build`, or
    creates an environment.
    """
    leave = f"touch {_OVER} || kill -KILL $(cat {_ENTRY_PID})"
    end = EndBilling(kind="command", argv=["sh", "-c", leave])
    return bare_place(end) if is_own_image else Place(WORK_DIR, PYTHON, end, PYTHON, CACHE_DIR)


def entry_argv(argv: tuple[str, ...]) -> list[str]:
    return ["sh", "-c", _ENTRY, "homing", *argv]


def make_request(offer: Offer, order: Order) -> Request:
    """Return the create request, without the account's token. In the sandbox, a store on a Volume is a folder."""
    boot, secrets = order.boot, dict(order.secrets)
    if volume_of(boot.store):
        boot = dataclasses.replace(boot, store=f"{parse_modal(boot.store).url}?mount={MOUNT}", secret_names=[])
        secrets = {name: value for name, value in secrets.items() if not name.startswith("MODAL_")}
    boot = dataclasses.replace(boot, leave_s=_leave_s(boot), bootstrap=_any_name(boot, offer))
    return Request(
        provider="modal",
        mark=order.mark,
        offer=offer,
        order=dataclasses.replace(order, boot=boot, secrets=secrets),
        argv=tuple(agent_argv(PYTHON, WORK_DIR)),
        env={file_names.MARK_ENV: order.mark},
    )


def volume_of(store: str) -> str:
    """Return the Volume to mount for this store, or "" if the store is not a Volume."""
    return parse_modal(store).volume if store.startswith("modal:") else ""


def timeout_s(boot: Boot) -> int:
    """Return the sandbox's timeout: the earliest limit minus the reserve of the provider's guard.

    The timeout is the last guard to act, but still acts within the limit.
    """
    allowed = _allowed_s(boot)
    left = allowed - reserve_s(PROVIDER, allowed, boot.stop_grace_s) if math.isfinite(allowed) else math.inf
    return max(_LEAST_S, int(min(left, LIFETIME_S)))


def start_within_s(boot: Boot, now: float) -> float:
    """Return how many seconds from now the start may take and still leave time to train, by this computer's clock."""
    allowed = _allowed_s(boot)
    if math.isinf(allowed):
        return allowed
    return max(1.0, allowed - reserve_s(LAND, allowed, boot.stop_grace_s) - max(0.0, now - boot.started_at))


def make_image(connection: Connection, settings: Mapping[str, Any], store: str, home: Path, world: World) -> Any:
    sdk = connection.sdk
    if settings["image"]:
        login = settings["registry"]
        secret = sdk.Secret.from_name(login, client=connection.client) if login else None
        return sdk.Image.from_registry(settings["image"], secret=secret)
    # A sandbox sees a Volume as a folder, so the store's SDK is not needed there.
    lock = code_bundle.lock("" if volume_of(store) else store)
    text = "\n".join([*lock.lines, *lock.torch, ""]).encode()
    # The SDK reads this file when it builds the image.
    path = home / "cache" / f"modal-{hashlib.sha256(text).hexdigest()[:16]}.txt"
    if not world.exists(path):
        world.mkdir(path.parent)
        world.write(path, text)
    made = sdk.Image.debian_slim(python_version=_PYTHON_VERSION)
    options = {"extra_options": " ".join(VERIFIED), "uv_version": lock.uv.split()[0].partition("==")[2]}
    return made.uv_pip_install(requirements=[str(path)], **options)


def parcel(image: Any, request: Request, folder: Path, world: World) -> Any:
    """Return the image with the files mounted. boot.json is written to `folder` and contains no secrets."""
    world.mkdir(folder)
    world.write(folder / file_names.BOOT, codec.dumps(request.order.boot, indent=1).encode())
    image = image.add_local_file(str(folder / file_names.BOOT), f"{_PARCEL}/{file_names.BOOT}")
    for file in request.order.files:
        # Check first, because the SDK silently leaves out a missing file.
        assert world.exists(file.source), f"{file.source} does not exist and cannot be sent"
        image = image.add_local_file(file.source, f"{_PARCEL}/{shlex.quote(file.path)}")
    return image


def _allowed_s(boot: Boot) -> float:
    limit = None if boot.spend_limit_usd is None else Decimal(boot.spend_limit_usd)
    return allowed_s(Decimal(boot.rate_usd_per_hour), limit, Decimal(boot.spent_before_usd), boot.time_limit_s)


def _leave_s(boot: Boot) -> float:
    """Return the number of seconds after which the run must leave this sandbox to avoid its fixed timeout."""
    end_s = float(timeout_s(boot))
    reserve = reserve_s(LAND, end_s, boot.stop_grace_s)
    if end_s < LIFETIME_S:
        return end_s - _LATE_SHARE * reserve
    return end_s - min(reserve + boot.home_s + 2 * boot.push_s, end_s / 2)


def _any_name(boot: Boot, offer: Offer) -> Any:
    """Accept either name from the GPU driver, because Modal calls the same GPU both A10 and A10G."""
    if boot.bootstrap is None or offer.device != "A10G":
        return boot.bootstrap
    return dataclasses.replace(boot.bootstrap, gpu_names=sorted({*boot.bootstrap.gpu_names, "a10"}))
