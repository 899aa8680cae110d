"""How busy the machine is: shares of its processor, memory and cards. Evidence beside an alarm; it stops nothing."""

from __future__ import annotations

import re
from typing import Dict

from homing.world import World

GPU = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
GPU_S = 5.0


def use_of_machine(world: World) -> Dict[str, float]:
    """0..1 each; what cannot be asked here is left out."""
    use: Dict[str, float] = {}
    try:
        load = float(world.read("/proc/loadavg").split()[0])
        cores = len(re.findall(rb"^cpu\d", world.read("/proc/stat"), re.MULTILINE))
        memory = {name: int(kb) for name, kb in re.findall(rb"^(\w+): +(\d+)", world.read("/proc/meminfo"), re.M)}
        use.update(cpu=load / max(1, cores), memory=1 - memory[b"MemAvailable"] / memory[b"MemTotal"])
    except (OSError, ValueError, LookupError):
        use.clear()
    answer = world.run(GPU, GPU_S)
    cards = [[float(word) for word in row] for row in re.findall(r"^(\d+), (\d+), (\d+)$", answer.out, re.M)]
    if answer.code == 0 and cards:
        use.update(gpu=max(card[0] for card in cards) / 100, gpu_memory=max(used / of for _, used, of in cards if of))
    return {name: round(value, 3) for name, value in use.items()}
