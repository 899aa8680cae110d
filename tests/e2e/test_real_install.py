"""The one test that installs for real: a bare Python, the versions of here, and what a run needs to train and push.

All other trips find an environment that was made before, under the fingerprint that this one computes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
from tests.instance.test_bootstrap import boot, events, problem, with_

from homing.cloud.machine_setup.code_bundle import TORCH_RANGE, Lock, lock
from homing.instance import bootstrap
from homing.world import World

__all__ = ["boot"]  # the fixture

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.timeout(1200)]
PROBE = "import boto3, numpy, safetensors.torch, tokenizers, torch; print(torch.ones(2).sum().item(), sys.prefix)"


def need_index() -> None:
    """Where packages come from; a computer without a network has none."""
    asked = World().run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", os.devnull, "pip"], 120.0)
    if asked.code and "No matching distribution" in asked.err:
        if os.environ.get("CI"):
            pytest.fail(f"no index of packages can be reached, and CI is set: {asked.err[-300:]}")
        pytest.skip("no index of packages can be reached, so nothing is installed for real")


def torch_here(found: Lock) -> list[str]:
    """The torch of this computer's local wheels by its own hash, without CUDA's gigabytes; else the index's."""
    wheels = sorted(Path(os.environ.get("PIP_FIND_LINKS") or os.devnull).glob("torch-*.whl"))
    if not wheels:
        return list(found.torch)
    needed = [line for line in found.torch if not line.startswith(("torch==", "triton==", "nvidia-", "cuda-"))]
    digest = hashlib.sha256(wheels[-1].read_bytes()).hexdigest()
    return [*needed, f"torch=={wheels[-1].name.split('-')[1]} --hash=sha256:{digest}"]


def test_a_bare_python_becomes_one_that_trains_and_pushes(
    boot: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_index()
    # uv has its own name for the place of local wheels; with it the test takes seconds in place of minutes.
    monkeypatch.setenv("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    found = lock("s3://bucket/prefix")
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    messages = with_(
        boot,  # type: ignore[arg-type]
        lock=list(found.lines), torch=found.torch_version, torch_lock=torch_here(found), uv=found.uv,
        torch_range=list(TORCH_RANGE), python=bare, env_dir=str(tmp_path / "cache" / "env-"),
    )  # fmt: skip
    assert bootstrap.run(messages, World()) == 0, problem(messages)
    assert "created," in next(event.text for event in events(messages) if "torch" in event.text)
    python = Path(messages.work_dir) / "env/bin/python"
    said = World().run([str(python), "-I", "-c", f"import sys; {PROBE}"], 300.0)
    assert said.code == 0, said.err
    assert said.out.split() == ["2.0", str(python.parent.parent)], said.out
