from __future__ import annotations

import pytest
from tests.doubles.drivers import DRIVER_NAMES

from homing.gpus import GPUS, find_gpu, nearest_gpus

# Every NVIDIA GPU in the catalogues that the providers publish: provider, its name there, our name.
CATALOGUES = [
    ("shadeform", "A10", "A10"),
    ("shadeform", "A16", "A16"),
    ("shadeform", "A30", "A30"),
    ("shadeform", "A40", "A40"),
    ("shadeform", "A4000", "RTXA4000"),
    ("shadeform", "A5000", "RTXA5000"),
    ("shadeform", "A6000", "RTXA6000"),
    ("shadeform", "A100_80G", "A100"),
    ("shadeform", "A100_40G", "A100-40GB"),
    ("shadeform", "GH200", "GH200"),
    ("shadeform", "H100", "H100"),
    ("shadeform", "H200", "H200"),
    ("shadeform", "B200", "B200"),
    ("shadeform", "B300", "B300"),
    ("shadeform", "L4", "L4"),
    ("shadeform", "L40", "L40"),
    ("shadeform", "L40S", "L40S"),
    ("shadeform", "RTX4000", "QuadroRTX4000"),
    ("shadeform", "RTX5000", "QuadroRTX5000"),
    ("shadeform", "RTX6000", "QuadroRTX6000"),
    ("shadeform", "RTX6000Ada", "RTX6000Ada"),
    ("shadeform", "RTX4090", "RTX4090"),
    ("shadeform", "RTX5090", "RTX5090"),
    ("shadeform", "RTX PRO 6000", "RTXPRO6000"),
    ("shadeform", "V100", "V100"),
    ("shadeform", "V100_32G", "V100-32GB"),
    ("runpod", "NVIDIA A30", "A30"),
    ("runpod", "NVIDIA A40", "A40"),
    ("runpod", "NVIDIA A100 80GB PCIe", "A100"),
    ("runpod", "NVIDIA A100-SXM4-80GB", "A100"),
    ("runpod", "NVIDIA B200", "B200"),
    ("runpod", "NVIDIA B300 SXM6 AC", "B300"),
    ("runpod", "NVIDIA GeForce RTX 3070", "RTX3070"),
    ("runpod", "NVIDIA GeForce RTX 3080", "RTX3080"),
    ("runpod", "NVIDIA GeForce RTX 3080 Ti", "RTX3080Ti"),
    ("runpod", "NVIDIA GeForce RTX 3090", "RTX3090"),
    ("runpod", "NVIDIA GeForce RTX 3090 Ti", "RTX3090Ti"),
    ("runpod", "NVIDIA GeForce RTX 4070 Ti", "RTX4070Ti"),
    ("runpod", "NVIDIA GeForce RTX 4080", "RTX4080"),
    ("runpod", "NVIDIA GeForce RTX 4080 SUPER", "RTX4080Super"),
    ("runpod", "NVIDIA GeForce RTX 4090", "RTX4090"),
    ("runpod", "NVIDIA GeForce RTX 5080", "RTX5080"),
    ("runpod", "NVIDIA GeForce RTX 5090", "RTX5090"),
    ("runpod", "NVIDIA H100 80GB HBM3", "H100"),
    ("runpod", "NVIDIA H100 NVL", "H100-NVL"),
    ("runpod", "NVIDIA H100 PCIe", "H100-PCIe"),
    ("runpod", "NVIDIA H200", "H200"),
    ("runpod", "NVIDIA H200 NVL", "H200-NVL"),
    ("runpod", "NVIDIA L4", "L4"),
    ("runpod", "NVIDIA L40", "L40"),
    ("runpod", "NVIDIA L40S", "L40S"),
    ("runpod", "NVIDIA RTX 2000 Ada Generation", "RTX2000Ada"),
    ("runpod", "NVIDIA RTX 4000 Ada Generation", "RTX4000Ada"),
    ("runpod", "NVIDIA RTX 4000 SFF Ada Generation", "RTX4000Ada-SFF"),
    ("runpod", "NVIDIA RTX 5000 Ada Generation", "RTX5000Ada"),
    ("runpod", "NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
    ("runpod", "NVIDIA RTX A4000", "RTXA4000"),
    ("runpod", "NVIDIA RTX A4500", "RTXA4500"),
    ("runpod", "NVIDIA RTX A5000", "RTXA5000"),
    ("runpod", "NVIDIA RTX A6000", "RTXA6000"),
    ("runpod", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
    ("runpod", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000-WK"),
    ("runpod", "Tesla V100-SXM2-32GB", "V100-32GB"),
    ("aws", "T4", "T4"),
    ("aws", "A10G", "A10G"),
    ("aws", "L4", "L4"),
    ("aws", "L40S", "L40S"),
    ("aws", "RTX PRO 4500", "RTXPRO4500"),
    ("aws", "RTX PRO Server 6000", "RTXPRO6000"),
    ("aws", "V100", "V100"),
    ("aws", "A100", "A100"),
    ("aws", "H100", "H100"),
    ("aws", "H200", "H200"),
    ("aws", "B200", "B200"),
    ("aws", "B300", "B300"),
    ("modal", "T4", "T4"),
    ("modal", "L4", "L4"),
    ("modal", "A10", "A10"),
    ("modal", "L40S", "L40S"),
    ("modal", "A100-40GB", "A100-40GB"),
    ("modal", "A100-80GB", "A100"),
    ("modal", "RTX-PRO-6000", "RTXPRO6000"),
    ("modal", "H100", "H100"),
    ("modal", "H200", "H200"),
    ("modal", "B200", "B200"),
]


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
def test_a_gpu_name_that_only_starts_like_a_known_one_does_not_match(name: str) -> None:
    assert find_gpu(name) is None


def test_every_card_has_facts_that_can_be_true() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 8 <= gpu.memory_gib <= 512
        assert 10 < gpu.bf16_tflops < 5000
        assert gpu.has_bf16 or gpu.compute_capability < (8, 0)
        assert find_gpu(gpu.name) is gpu


@pytest.mark.regression("gpu-names")
def test_every_name_in_a_published_catalogue_is_known() -> None:
    found = {(provider, name): find_gpu(name) for provider, name, _ in CATALOGUES}
    wrong = {(provider, name): gpu and gpu.name for (provider, name), gpu in found.items()}
    assert wrong == {(provider, name): ours for provider, name, ours in CATALOGUES}


def test_the_driver_of_every_gpu_shows_a_name_by_which_it_is_recognised() -> None:
    assert set(DRIVER_NAMES) == set(GPUS)
    for ours, shown in DRIVER_NAMES.items():
        found = find_gpu(shown)
        assert found is not None, shown
        assert found.name == ours
        # The bootstrap on the instance has no table, only our names of the GPU that was rented.
        plain = "".join(c for c in shown.lower() if c.isalnum())
        names = ["".join(c for c in name.lower() if c.isalnum()) for name in (found.name, *found.aliases)]
        assert any(name in plain for name in names), (ours, shown)


def test_a_number_alone_suggests_the_gpus_with_that_number() -> None:
    assert nearest_gpus("4090") == ["RTX4090"]
    assert nearest_gpus("3090") == ["RTX3090", "RTX3090Ti"]
