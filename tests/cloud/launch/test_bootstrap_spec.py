"""What a bare instance receives before it can train."""

from __future__ import annotations

import dataclasses
import hashlib
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import make_run

from homing.cloud.launch.run_documents import LOCK, VERIFIED_START, make_bootstrap_spec
from homing.cloud.machine_setup import code_bundle
from homing.cloud.machine_setup.boot_files import make_boot
from homing.cloud.providers.base import Offer, Place
from homing.wire.boot_json import Boot, EndBilling
from homing.wire.run_json import Run
from homing.world import World

END = EndBilling(kind="command", argv=["true"])
HERE = Place("/w", "/venv/python", END)
BARE = Place("/w", "/w/env/bin/python", END, base_python="python3", cache_dir="/c")
READY = Place("/w", "/venv/python", END, base_python="/venv/python", cache_dir="/c")
CPU = Offer("ssh", "me@host", "processor", 0, 8, 10**10, Decimal("0.36"))
H100 = Offer("ssh", "me@host", "H100", 2, 8, 80 * 2**30, Decimal("3"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return dataclasses.replace(make_run(tmp_path), id="moss-1")


def boot_of(run: Run, place: Place) -> Boot:
    return make_boot(
        run, mark="m", attempt=1, work_dir=place.work_dir, inputs=[], python=place.python, end_billing=END,
        started_at=0.0, rate_usd_per_hour=Decimal(1), spend_limit_usd=Decimal(1),
    )  # fmt: skip


def test_a_complete_machine_gets_no_bootstrap(run: Run) -> None:
    boot = boot_of(run, HERE)
    assert make_bootstrap_spec(boot, HERE, run, CPU, World(), is_stand_in=False) == (boot, {})


def test_the_wheel_travels_with_its_hash_and_comes_first_on_the_path(run: Run) -> None:
    boot, files = make_bootstrap_spec(boot_of(run, READY), READY, run, CPU, World(), is_stand_in=False)
    messages = boot.bootstrap
    assert messages is not None
    assert messages.code_sha256 == hashlib.sha256(files[messages.code]).hexdigest()
    assert boot.env["PYTHONPATH"] == messages.code_dir == f"/c/code-{messages.code_sha256[:16]}"
    start = [READY.base_python, "-I", "-c", VERIFIED_START]
    assert boot.bootstrap_argv == [*start, "/w/" + messages.code, messages.code_sha256, "/w/boot.json"]
    assert messages.disk_bytes > 0
    assert (messages.lock, messages.env_dir, messages.probe_argv, messages.num_gpus) == ([], "", [], 0), (
        "its Python is complete"
    )


def test_a_machine_without_the_environment_gets_the_lock_file(run: Run) -> None:
    boot, files = make_bootstrap_spec(boot_of(run, BARE), BARE, run, CPU, World(), is_stand_in=False)
    messages = boot.bootstrap
    assert messages is not None
    assert messages.torch in files[LOCK].decode()
    assert set(messages.lock) <= set(files[LOCK].decode().splitlines())
    assert (messages.python, messages.env_dir, tuple(messages.torch_range)) == (
        "python3",
        "/c/env-",
        code_bundle.TORCH_RANGE,
    )
    assert boot.agent_argv[0] == "python3", "the agent runs before there is an environment"
    assert boot.trainer_argv[0] == "/w/env/bin/python"


def test_the_spec_names_the_cuda_version_and_allows_installs_on_rented_machines(run: Run) -> None:
    rented = dataclasses.replace(H100, provider="shadeform")
    messages = make_bootstrap_spec(boot_of(run, BARE), BARE, run, rented, World(), is_stand_in=False)[0].bootstrap
    assert messages is not None
    assert (messages.cuda, messages.may_add) == (code_bundle.TORCH_CUDA, True)


def test_a_gpu_is_checked_by_all_its_names_and_probed_against_its_own_figures(run: Run) -> None:
    boot, _ = make_bootstrap_spec(boot_of(run, READY), READY, run, H100, World(), is_stand_in=False)
    messages = boot.bootstrap
    assert messages is not None
    assert "h10080gbhbm3" in messages.gpu_names
    assert (messages.num_gpus, messages.may_add) == (2, False), "nothing is installed on the user's own host"
    assert messages.probe_argv[:3] == ["/venv/python", "-m", "homing.lm.benchmark_gpu"]
    assert 100 < messages.probe_floor["matmul_tflops"] < 500
    stand_in, _ = make_bootstrap_spec(boot_of(run, READY), READY, run, H100, World(), is_stand_in=True)
    assert stand_in.bootstrap is not None
    assert stand_in.bootstrap.probe_argv == []


@pytest.mark.acceptance("X23")
def test_compiled_kernels_are_cached_next_to_the_code_or_on_the_volume(run: Run) -> None:
    boot, _ = make_bootstrap_spec(boot_of(run, READY), READY, run, CPU, World(), is_stand_in=False)
    assert boot.env["HOMING_CACHE"] == "/c"
    with_volume = dataclasses.replace(run, cloud=dataclasses.replace(run.cloud, volume="/workspace"))
    boot, _ = make_bootstrap_spec(boot_of(run, READY), READY, with_volume, CPU, World(), is_stand_in=False)
    assert boot.env["HOMING_CACHE"] == "/workspace/cache"


@pytest.mark.acceptance(31, 104)
def test_a_volume_has_its_folders_and_the_hub_cache_in_it(run: Run) -> None:
    cloud = dataclasses.replace(run.cloud, volume="/workspace")
    with_volume = dataclasses.replace(run, cloud=cloud)
    boot, _ = make_bootstrap_spec(boot_of(run, READY), READY, with_volume, CPU, World(), is_stand_in=False)
    assert boot.bootstrap is not None
    for folder in ("datasets/train/moss", "datasets/val/moss", "artifacts/tokenizer/moss", "runs/moss", "hf_cache"):
        assert f"/workspace/{folder}" in boot.bootstrap.folders
    assert boot.env["HF_HOME"] == "/workspace/hf_cache"
