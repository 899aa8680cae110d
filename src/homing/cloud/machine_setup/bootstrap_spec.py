"""The bootstrap spec of a bare machine: code, package versions, folders, and how to measure its speed.

    Boot, Place -> Boot with its bootstrap + the files that travel with the agent

The bootstrap carries it out on the instance, stage by stage. A machine that has everything (this computer) gets none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os

from homing.cloud.machine_setup import boot_files as booting
from homing.cloud.machine_setup import code_bundle
from homing.cloud.plan.plan import needs_of
from homing.cloud.providers.base import Offer, Place
from homing.gpus import find_gpu
from homing.wire import file_names
from homing.wire.boot_json import Boot, Bootstrap
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["LOCK", "VERIFIED_START", "make_bootstrap_spec", "volume_folders"]

LOCK = "lock.txt"
# Python imports from a wheel, which is a zip: the bootstrap runs from it before anything is unpacked. So this program,
# which travels in boot.json and not in the wheel, hashes the wheel first. One line, because a Dockerfile holds it too.
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
_FAR_TOO_SLOW = 0.3  # fraction of the GPU's data sheet; a healthy one reaches about twice this in the probe
_SOMEBODYS = ("local", "ssh")  # machines that are kept for more than one run


def make_bootstrap_spec(
    boot: Boot, place: Place, run: Run, offer: Offer, world: World, *, is_stand_in: bool
) -> tuple[Boot, dict[str, bytes]]:
    """Return the boot with the bootstrap this machine needs, and the files to send, by name in the work folder.

    `is_stand_in`: another program runs in place of the trainer and may need no torch; then no speed probe runs.
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
    # Keep what the trainer compiles for the next run: on the volume, or next to code and environments.
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
    """Return this run's folders on a persistent volume (datasets, artifacts, runs, cache), plus the shared hf_cache."""
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
        probe_argv=[place.python, "-m", "homing.lm.probe", place.work_dir],
        probe_floor={name: _FAR_TOO_SLOW * value for name, value in floor.items()},
    )
