"""Prepares a launch's create call: the ledger rows, the run documents (local and in the store) and the request.

    Draft -> row_of, line_of            rows for the ledger
          -> write_home                 the run's folder on this computer
          -> inputs_of                  inputs, pushed to the store by hash
          -> request_of                 everything the provider's create call needs, including boot.json
          -> make_bootstrap_spec        what a bare machine installs: code, package versions, folders, a speed probe
          -> push_documents, push_code  so that another computer can adopt or reproduce the run

The bootstrap on the instance executes the spec, stage by stage. A run on this computer has no spec, because everything
is already installed here. Nothing in this module rents anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.launch.draft import Draft
from homing.cloud.launch.inputs import push_object, read_object
from homing.cloud.launch.resume import resume_inputs
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import code_bundle
from homing.cloud.machine_setup.code_bundle import tree_state
from homing.cloud.plan.plan import needs_of
from homing.cloud.providers.base import InputFile, Offer, Order, Place, Request
from homing.config.home_and_run_files import PROJECT_NOTE, project_note
from homing.gpus import find_gpu
from homing.store import Store, open_store, pace_of, run_key
from homing.store.preflight import secrets
from homing.store.s3.store import S3Store
from homing.units import counted, format_bytes
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, Bootstrap, Input
from homing.wire.run_json import Run
from homing.world import World

__all__ = [
    "LOCK",
    "VERIFIED_START",
    "inputs_of",
    "line_of",
    "make_bootstrap_spec",
    "push_code",
    "push_documents",
    "request_of",
    "row_of",
    "volume_folders",
    "write_home",
]

LOCK = "lock.txt"
# Python can import from a wheel, which is a zip file, so the bootstrap runs from the wheel before anything is unpacked.
# The following program therefore checks the wheel's hash first. It is part of boot.json, not of the wheel, and it is a
# single line because a Dockerfile contains it too.
VERIFIED_START = "; ".join(
    (
        "import hashlib, runpy, sys",
        "wheel, expected = sys.argv[1:3]",
        'found = hashlib.sha256(open(wheel, "rb").read()).hexdigest()',
        'found == expected or sys.exit(wheel + " was replaced: its sha256 is " + found + ", not " + expected)',
        "sys.path.insert(0, wheel)",
        'runpy.run_module("homing.instance.bootstrap", run_name="__main__", alter_sys=True)',
    )
)
_FAR_TOO_SLOW = 0.3  # lowest accepted speed, as a fraction of the data sheet value; healthy GPUs reach about twice this
_SOMEBODYS = ("local", "ssh")  # providers whose machines are used for more than one run


def row_of(draft: Draft, home: Home) -> RunRow:
    return RunRow(
        id=draft.run.id,
        name=draft.run.name,
        state="launching",
        created_at=home.world.now(),
        store=draft.run.store,
        run_file_sha256=draft.run.run_file_sha256,
        spend_limit_usd=str(draft.spend_limit_usd),
    )


def line_of(draft: Draft, home: Home, account: str | None) -> LedgerLine:
    offer = draft.order.offer
    return LedgerLine(
        mark=draft.mark,
        run_id=draft.run.id,
        run_name=draft.run.name,
        attempt=draft.attempt,
        provider=offer.provider,
        offer=offer.name,
        rate_usd_per_hour=str(offer.rate_usd_per_hour),
        limit_usd=str(draft.spend_limit_usd),
        intent_at=home.world.now(),
        account=account,
    )


def write_home(draft: Draft, home: Home) -> None:
    folder = home.run_dir(draft.run.id)
    home.world.mkdir(folder)
    home.world.write(folder / file_names.RUN_FILE, draft.order.run_file_text.encode())
    home.world.write(folder / file_names.RUN, codec.dumps(draft.run, indent=1).encode())
    # Store the offer with the run, because the run's measured speeds are later recorded for the offer's device.
    note = {
        "schema": "homing.launch/1",
        "offer": dataclasses.asdict(draft.order.offer),
        "is_smoke": draft.order.is_smoke,
        "keep_on_failure_s": draft.order.keep_on_failure_s,
        "is_one_guard_enough": draft.order.is_one_guard_enough,
        # These two fields are needed to restore the run if the ledger is lost.
        "attempt": draft.attempt,
        "spent_before_usd": draft.spent_before_usd,
    }
    home.world.write(folder / LAUNCH_NOTE, json.dumps(note, default=str, indent=1).encode())
    # a resumed run keeps the project note of its first launch
    if draft.order.project and not home.world.exists(folder / PROJECT_NOTE):
        home.world.write(folder / PROJECT_NOTE, project_note(draft.order.project))


def inputs_of(draft: Draft, home: Home, store: Store, notify: Callable[[str], None]) -> list[Input]:
    inputs = booting.prepare_inputs(
        draft.run,
        draft.run.data.dir,
        store,
        home.world,
        run_file_text=draft.order.run_file_text,
        words=draft.order.words,
    )
    if not draft.order.resume:
        return inputs
    taken, damaged = resume_inputs(store, draft.run.id, [phase.kind for phase in draft.run.phases])
    for problem in damaged:
        notify(problem)
    if not any(item.path.startswith(f"run/{file_names.CHECKPOINTS}/") for item in taken):
        notify("No checkpoint in the store yet: starting from the beginning")
    elif taken:
        size = format_bytes(sum(item.num_bytes for item in taken))
        notify(f"The store already contains {counted(len(taken), 'file')} ({size}) to resume from")
    return inputs + taken


def request_of(
    draft: Draft,
    home: Home,
    inputs: list[Input],
    started_at: float,
    fence: int = 0,
    *,
    is_rehearsal: bool = False,
) -> Request:
    provider = home.provider(draft.order.offer.provider)
    place = provider.place(draft.mark)
    boot: Boot = booting.make_boot(
        draft.run,
        mark=draft.mark,
        attempt=draft.attempt,
        work_dir=place.work_dir,
        inputs=inputs,
        python=place.python,
        end_billing=place.end_billing,
        started_at=started_at,
        rate_usd_per_hour=draft.order.offer.rate_usd_per_hour,
        spend_limit_usd=draft.spend_limit_usd,
        spent_before_usd=draft.spent_before_usd,
        heartbeat_s=draft.order.heartbeat_s or _heartbeat_s(draft.run.store),
    )
    boot = dataclasses.replace(boot, fence=fence, push_s=draft.timing.push_s, home_s=draft.timing.home_reserve_s)
    boot = dataclasses.replace(
        boot,
        keep_on_failure_s=draft.order.keep_on_failure_s,
        planned_speeds={each.kind: each.batch_tokens / draft.timing.step_s(each) for each in draft.run.phases},
        on_divergence=draft.run.limits.on_divergence,
        on_slow=draft.run.limits.on_slow,
    )
    if draft.order.trainer_argv is not None:
        boot = dataclasses.replace(boot, trainer_argv=list(draft.order.trainer_argv))
    is_stand_in = draft.order.trainer_argv is not None
    boot, brought = make_bootstrap_spec(boot, place, draft.run, draft.order.offer, home.world, is_stand_in=is_stand_in)
    if boot.bootstrap is not None and boot.bootstrap.env_dir and not is_rehearsal:
        boot = dataclasses.replace(boot, mailbox=_mailbox(draft, home))
    folder = home.run_dir(draft.run.id)
    for name, data in ({} if is_rehearsal else brought).items():
        home.world.write(folder / name, data)
    files = tuple(InputFile(name, str(folder / name)) for name in (booting.AGENT_ZIP, *brought))
    # The instance gets its store credentials as environment variables, never in a file that homing writes.
    keys = secrets(draft.run.store, home.world.environment())
    boot = dataclasses.replace(boot, secret_names=sorted(keys))
    order = Order(draft.mark, draft.run.name, boot, files, keys, typed=draft.order.typed, is_resume=draft.order.resume)
    # The dead-man process restarts a dead agent with the provider's own start command, so boot.json must contain
    # that command.
    argv = list(provider.plan(draft.order.offer, order).argv)
    order = dataclasses.replace(order, boot=dataclasses.replace(boot, agent_argv=argv))
    return provider.plan(draft.order.offer, order)


def push_documents(home: Home, store: Store, request: Request) -> None:
    """Push the run's documents to its store, so that the run can be adopted before its first heartbeat."""
    run_id = request.order.boot.run_id
    documents = {f"run/{name}": name for name in (file_names.RUN, file_names.RUN_FILE)}
    for item in request.order.boot.inputs:
        if item.path in documents:
            store.put_bytes(run_key(run_id, documents[item.path]), read_object(store, item.sha256))
    store.put_bytes(run_key(run_id, LAUNCH_NOTE), home.world.read(home.run_dir(run_id) / LAUNCH_NOTE))


def push_code(home: Home, store: Store, request: Request, notify: Callable[[str], None]) -> None:
    """Push the wheel and lock file that this run starts with, under their hashes, so that the run can be reproduced."""
    spec = request.order.boot.bootstrap
    if spec is None:
        return
    for file in request.order.files[1:]:  # skip the first file, the agent, which is built from files in the wheel
        push_object(store, home.world.read(file.source))
    commit, changed = tree_state(home.world)
    own = f", with {counted(len(changed), 'uncommitted change')}" if changed else ""
    version = f"{commit[:12] or 'as installed'}{own}"
    notify(f"Sending this version of homing to the instance: {version} (wheel {spec.code_sha256[:12]})")


def _mailbox(draft: Draft, home: Home) -> str:
    """Return a presigned S3 URL to upload the boot log to before a store client is installed; "" for other stores."""
    store = open_store(draft.run.store, home.world)
    if not isinstance(store, S3Store):
        return ""
    key = run_key(draft.run.id, file_names.LOGS, "boot.log")
    return store.put_url(key, draft.boot_timeout_s)


def _heartbeat_s(store: str) -> float:
    """Return the agent's local heartbeat interval in seconds.

    If the store accepts fewer writes, only every nth heartbeat is pushed.
    """
    return min(max(pace_of(store), 1.0), 5.0)


# --- the bootstrap spec of a bare machine ---


def make_bootstrap_spec(
    boot: Boot, place: Place, run: Run, offer: Offer, world: World, *, is_stand_in: bool
) -> tuple[Boot, dict[str, bytes]]:
    """Return `boot` with the bootstrap spec that this machine needs, and the files to send, by name in the work folder.

    `is_stand_in` means that another program runs instead of the trainer. It may not need torch, so the GPU's speed is
    not probed.
    """
    if not place.cache_dir:
        return boot, {}
    wheel = code_bundle.wheel_bytes(world)
    digest = hashlib.sha256(wheel).hexdigest()
    files = {code_bundle.WHEEL: wheel}
    code_dir = f"{place.cache_dir}/code-{digest[:16]}"
    folders = volume_folders(run.cloud.volume, run.name) if run.cloud.volume else []
    spec = Bootstrap(
        folders=[place.cache_dir, *folders],
        disk_bytes=needs_of(run).disk_bytes,
        code=code_bundle.WHEEL,
        code_sha256=digest,
        code_dir=code_dir,
        inputs_dir=f"{place.cache_dir}/objects",
    )
    if place.base_python and place.base_python != place.python:
        found = code_bundle.lock(run.store)
        files[LOCK] = "\n".join([*found.lines, *found.torch, ""]).encode()
        spec = dataclasses.replace(
            spec,
            lock=list(found.lines),
            torch=found.torch_version,
            torch_lock=list(found.torch),
            uv=found.uv,
            torch_range=list(code_bundle.TORCH_RANGE),
            cuda=code_bundle.TORCH_CUDA,
            older_cuda=list(code_bundle.OLDER_CUDA),
            torch_index=code_bundle.TORCH_INDEX,
            python=place.base_python,
            env_dir=f"{place.cache_dir}/env-",
        )
    if offer.num_gpus:
        spec = _with_card(spec, offer, place, is_stand_in)
    # Put the trainer's compile cache where the next run will find it: on the volume, or next to the code and the
    # environments.
    cache = f"{run.cloud.volume}/cache" if run.cloud.volume else place.cache_dir
    env = {**boot.env, "PYTHONPATH": code_dir, "HOMING_CACHE": cache}
    if run.cloud.volume:
        hub = f"{run.cloud.volume}/hf_cache"
        env.update(HF_HOME=hub, HF_DATASETS_CACHE=f"{hub}/datasets")
    python, boot_path = place.base_python or place.python, f"{place.work_dir}/{file_names.BOOT}"
    return dataclasses.replace(
        boot,
        bootstrap=spec,
        env=env,
        agent_argv=booting.agent_argv(python, place.work_dir),
        bootstrap_argv=[python, "-I", "-c", VERIFIED_START, f"{place.work_dir}/{code_bundle.WHEEL}", digest, boot_path],
    ), files


def volume_folders(volume: str, name: str) -> list[str]:
    """Return the folders for this run on a persistent volume, plus the hf_cache folder that all runs share."""
    parts = ("datasets/train", "datasets/val", "artifacts/tokenizer", "runs", "cache")
    return [*(os.path.join(volume, part, name) for part in parts), os.path.join(volume, "hf_cache")]


def _with_card(spec: Bootstrap, offer: Offer, place: Place, is_stand_in: bool) -> Bootstrap:
    card = find_gpu(offer.device)
    known = (card.name, *card.aliases) if card else (offer.device,)
    plain = sorted({"".join(c for c in name.lower() if c.isalnum()) for name in known})
    spec = dataclasses.replace(spec, gpu_names=plain, num_gpus=offer.num_gpus, may_add=offer.provider not in _SOMEBODYS)
    if is_stand_in:
        return spec
    floor = {"matmul_tflops": card.bf16_tflops, "copy_gb_s": float(card.bandwidth_gb_s)} if card else {}
    return dataclasses.replace(
        spec,
        probe_argv=[place.python, "-m", "homing.lm.benchmark_gpu", place.work_dir],
        probe_floor={name: _FAR_TOO_SLOW * value for name, value in floor.items()},
    )
