"""A driver older than the CUDA of our torch: which wheel it gets, by a real pip from an index of tagged wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.doubles.package_index import PYTORCH_2026_11, PackageIndex
from tests.instance.test_bootstrap import SMI, TORCH, UV, Machine, boot, problem, with_

from homing.cloud.machine_setup.code_bundle import TORCH_CUDA, TORCH_RANGE, lock
from homing.instance import bootstrap
from homing.wire import codec
from homing.wire.boot_json import Boot
from homing.world import Completed

__all__ = ["boot"]  # the fixture


class RealPip(Machine):
    """A machine with this driver and nothing installed, on which Python and pip are real."""

    def __init__(self, smi: str, image: str = "") -> None:
        python = f"{sys.version_info[0]} {sys.version_info[1]}"
        super().__init__(
            **{
                "importlib": f"{python}\n{image}\n", "--query-gpu": SMI, "nvidia-smi": f"CUDA Version: {smi}",
                "-r ": "", "uv --version": 1,
            }
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Without this computer's own indexes and folders of wheels, from which a torch for processors would come."""
        plain = {name: value for name, value in super().environment().items() if not name.startswith(("PIP_", "UV_"))}
        return {**plain, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}

    def run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
    ) -> Completed:
        return super().run(argv, timeout_s, env or self.environment(), stdin)


def boot_with_index(boot: Boot, tmp_path: Path, url: str, tags: list[str]) -> Boot:
    """As it comes to the instance, by JSON."""
    messages = {
        "torch": "torch==2.13.0", "torch_lock": TORCH, "torch_range": list(TORCH_RANGE), "cuda": TORCH_CUDA, "uv": UV,
        "python": sys.executable, "env_dir": str(tmp_path / "env-"), "num_gpus": 1, "lock": [],
        "older_cuda": tags, "torch_index": url,
    }  # fmt: skip
    document = json.loads(codec.dumps(with_(boot)))
    return codec.loads(Boot, json.dumps({**document, "bootstrap": {**document["bootstrap"], **messages}}))


@pytest.mark.acceptance(8)
@pytest.mark.slow
@pytest.mark.regression("older-driver-wheel")
@pytest.mark.parametrize(
    ("driver", "image", "builds", "installed"),
    [
        ("12.8", "", PYTORCH_2026_11, "2.13.0+cu129"),
        ("12.8", "", {**PYTORCH_2026_11, "cu129": ["2.11.0"]}, "2.13.0+cu126"),
        ("12.8", "", {"cpu": ["2.13.0"], "cu130": ["2.13.0"], "cu129": ["2.12.1"], "cu126": []}, "2.12.1+cu129"),
        ("12.8", "2.13.0+cu130\n/opt/image", PYTORCH_2026_11, "2.13.0+cu129"),
    ],
)
def test_an_older_driver_gets_a_torch_that_was_built_for_it_from_the_index(
    boot: Boot, tmp_path: Path, driver: str, image: str, builds: dict[str, list[str]], installed: str
) -> None:
    """By a real pip from an index whose folders hold differently tagged wheels. The last image has a torch that the
    driver cannot run."""
    with PackageIndex(builds) as index:
        messages = boot_with_index(boot, tmp_path, index.url, ["12.9", "12.6"])
        assert bootstrap.run(messages, RealPip(driver, image)) == 0, problem(boot)
    python = Path(boot.work_dir) / "env/bin/python"
    found = subprocess.run([python, "-Ic", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    assert found.stdout.strip() == installed, found.stderr
    assert not any("/cpu/" in path or "/cu130/" in path for path in index.asked)


@pytest.mark.slow
def test_a_driver_for_which_no_torch_of_ours_was_built_ends_the_boot_and_no_torch_for_processors_comes(
    boot: Boot, tmp_path: Path
) -> None:
    with PackageIndex(PYTORCH_2026_11) as index:
        messages = boot_with_index(boot, tmp_path, index.url, ["12.9", "12.6"])
        assert bootstrap.run(messages, RealPip("11.8")) == 1
    assert "the driver supports only CUDA 11.8; torch is available for CUDA 13.0, 12.9 and 12.6" in problem(boot)
    assert index.asked == []


def test_the_torch_that_we_pin_is_built_for_older_drivers_too() -> None:
    """By the list of what the index has, which moves with the range."""
    from homing.cloud.machine_setup.code_bundle import OLDER_CUDA

    version = lock("").torch_version.removeprefix("torch==")
    assert all(version in PYTORCH_2026_11[f"cu{cuda.replace('.', '')}"] for cuda in (*OLDER_CUDA, TORCH_CUDA))
