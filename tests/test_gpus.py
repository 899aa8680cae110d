from __future__ import annotations

import pytest

from homing.gpus import GPUS, find_gpu, nearest_gpus


@pytest.mark.parametrize(
    ("driver_name", "ours"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX A4000", "RTXA4000"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("a100", "A100"),
    ],
)
def test_a_card_is_found_by_what_the_driver_calls_it(driver_name: str, ours: str) -> None:
    found = find_gpu(driver_name)
    assert found is not None
    assert found.name == ours


def test_an_unknown_card_is_none_and_its_neighbours_are_named() -> None:
    assert find_gpu("Voodoo 3") is None
    assert "RTX4090" in nearest_gpus("RTX4900")


@pytest.mark.parametrize(
    "name", ["H1000", "NVIDIA T400 4GB", "NVIDIA RTX A400", "NVIDIA RTX A1000 6GB Laptop GPU", "L4000"]
)
def test_a_card_whose_number_only_begins_like_a_known_one_is_not_that_one(name: str) -> None:
    assert find_gpu(name) is None


def test_every_card_has_facts_that_can_be_true() -> None:
    for gpu in GPUS.values():
        assert 8 <= gpu.memory_gib <= 512
        assert 10 < gpu.bf16_tflops < 5000
        assert gpu.has_bf16 or gpu.compute_capability < (8, 0)
        assert find_gpu(gpu.name) is gpu
