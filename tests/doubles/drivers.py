"""What `nvidia-smi` shows for each GPU of our table: the names of NVIDIA's driver, not those of any catalogue."""

from __future__ import annotations

from homing.gpus import find_gpu

__all__ = ["DRIVER_NAMES", "driver_name"]

DRIVER_NAMES = {
    "V100": "Tesla V100-SXM2-16GB",
    "V100-32GB": "Tesla V100-SXM2-32GB",
    "T4": "Tesla T4",
    "QuadroRTX4000": "Quadro RTX 4000",
    "QuadroRTX5000": "Quadro RTX 5000",
    "QuadroRTX6000": "Quadro RTX 6000",
    "RTX3070": "NVIDIA GeForce RTX 3070",
    "RTX3080": "NVIDIA GeForce RTX 3080",
    "RTX3080Ti": "NVIDIA GeForce RTX 3080 Ti",
    "RTX3090": "NVIDIA GeForce RTX 3090",
    "RTX3090Ti": "NVIDIA GeForce RTX 3090 Ti",
    "RTXA4000": "NVIDIA RTX A4000",
    "RTXA4500": "NVIDIA RTX A4500",
    "RTXA5000": "NVIDIA RTX A5000",
    "RTXA6000": "NVIDIA RTX A6000",
    "A10": "NVIDIA A10",
    "A10G": "NVIDIA A10G",
    "A16": "NVIDIA A16",
    "A30": "NVIDIA A30",
    "A40": "NVIDIA A40",
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "RTX4070Ti": "NVIDIA GeForce RTX 4070 Ti",
    "RTX4080": "NVIDIA GeForce RTX 4080",
    "RTX4080Super": "NVIDIA GeForce RTX 4080 SUPER",
    "RTX4090": "NVIDIA GeForce RTX 4090",
    "RTX2000Ada": "NVIDIA RTX 2000 Ada Generation",
    "RTX4000Ada": "NVIDIA RTX 4000 Ada Generation",
    "RTX4000Ada-SFF": "NVIDIA RTX 4000 SFF Ada Generation",
    "RTX5000Ada": "NVIDIA RTX 5000 Ada Generation",
    "RTX6000Ada": "NVIDIA RTX 6000 Ada Generation",
    "L4": "NVIDIA L4",
    "L40": "NVIDIA L40",
    "L40S": "NVIDIA L40S",
    "H100": "NVIDIA H100 80GB HBM3",
    "H100-PCIe": "NVIDIA H100 PCIe",
    "H100-NVL": "NVIDIA H100 NVL",
    "H200": "NVIDIA H200",
    "H200-NVL": "NVIDIA H200 NVL",
    "GH200": "NVIDIA GH200 480GB",
    "RTX5080": "NVIDIA GeForce RTX 5080",
    "RTX5090": "NVIDIA GeForce RTX 5090",
    "RTXPRO4500": "NVIDIA RTX PRO 4500 Blackwell",
    "RTXPRO6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "RTXPRO6000-MaxQ": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "RTXPRO6000-WK": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "B200": "NVIDIA B200",
    "B300": "NVIDIA B300 SXM6 AC",
}


def driver_name(catalogue_name: str) -> str:
    """What the driver of a rented machine calls the GPU that a catalogue sells under this name."""
    gpu = find_gpu(catalogue_name)
    assert gpu is not None, f"no GPU is known by the name {catalogue_name!r}"
    return DRIVER_NAMES[gpu.name]
