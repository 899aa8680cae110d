"""How long training waits for a checkpoint: the same steps with and without saves, on one model with much state.

    PYTHONPATH=src python benchmarks/save_stall.py [--quick]

The trainer's own save (copy to host memory, then a thread that writes, fsyncs, hashes and renames) between steps that
compute. What counts is the time that the step loop does not get back: its wait for the copy, and what the writer takes
from it. Passing means at most 2% of the time between two saves five minutes apart, as the presets have them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

from _result import write_result  # noqa: E402
from homing.lm.model import Decoder  # noqa: E402
from homing.lm.train.checkpoints import checkpoint_files  # noqa: E402
from homing.lm.train.checkpoints.checkpoint_files import TrainState  # noqa: E402
from homing.lm.train.checkpoints.manager import Snapshot  # noqa: E402
from homing.lm.train.optim.param_groups import build_optimizer  # noqa: E402
from homing.wire.checkpoint_manifest import CheckpointManifest  # noqa: E402
from homing.wire.run_json import Model, Optimizer  # noqa: E402

BETWEEN_SAVES_S = 300.0
MUST = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, seconds")
    arguments = parser.parse_args()
    width, layers = (256, 4) if arguments.quick else (1024, 12)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(Model("stock", "qwen3", layers, width, width // 64, width // 64, 64, 3 * width, 256, 8192, True))
    model.init_weights(0)
    model.to(device)
    optimizer = build_optimizer(model, Optimizer("adamw", 1e-4, 1e-4, 1e-4, 1e-4, 0.0))
    with tempfile.TemporaryDirectory(prefix="homing-stall-") as folder:
        figures = measure(model, optimizer, Path(folder))
    figures["part_of_training"] = round(figures["stall_s"] / BETWEEN_SAVES_S, 5)
    passed = figures["part_of_training"] <= MUST and figures["stall_s"] < figures["save_s"]
    if not arguments.quick:
        write_result("save_stall", figures, passed=passed)
    word, size = "PASS" if passed else "FAIL", figures["bytes"] / 1e9
    waits = f"training waits {figures['stall_s']:.2f} s for a save of {figures['save_s']:.2f} s"
    print(f"{word} {size:.2f} GB: {waits}, {figures['part_of_training']:.2%} of {BETWEEN_SAVES_S:.0f} s")
    return 0 if passed else 1


def measure(model: Decoder, optimizer: Any, folder: Path) -> dict[str, Any]:
    ids = torch.randint(0, model.shape.vocab_size, (2, 64), device=model.device)

    def step() -> float:
        begun = time.perf_counter()
        model.loss(ids, ids).backward()
        optimizer.step(1.0)
        optimizer.zero_grad()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    snapshot = Snapshot()
    usual_s = statistics.median(step() for _ in range(6))
    copies, lost, saves = [], [], []
    for number in range(1, 4):
        begun = time.perf_counter()
        tensors = snapshot.take(weights=model.weights_for_disk(), optimizer=optimizer.state_tensors())
        copies.append(time.perf_counter() - begun)
        thread = threading.Thread(target=write, args=(folder, number, tensors))
        thread.start()
        during = []
        while thread.is_alive():
            during.append(step())
        thread.join()
        saves.append(time.perf_counter() - begun)
        lost.append(max(0.0, sum(during) - usual_s * len(during)))
    num_bytes = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
    # The first copy also gets the memory that the later ones use again.
    return {
        "bytes": num_bytes,
        "first_copy_s": round(copies[0], 3),
        "copy_s": round(min(copies[1:]), 3),
        "slowed_s": round(statistics.median(lost), 3),
        "stall_s": round(min(copies[1:]) + statistics.median(lost), 3),
        "save_s": round(statistics.median(saves), 3),
        "step_s": round(usual_s, 3),
        "device": str(model.device),
    }


def write(folder: Path, number: int, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    manifest = CheckpointManifest(
        run_name="stall", run_id="stall", phase="pretrain", step=number, num_tokens=0, is_final=False,
        config_sha256="", seed=0, files=[],
    )  # fmt: skip
    state = TrainState(phase="pretrain", step=number, num_tokens=0, rows_consumed=0)
    checkpoint_files.save(folder, manifest, state, **tensors, metadata_files={})
    checkpoint_files.repair_pointers(folder, manifest)
    checkpoint_files.retain(folder, keep_last=1)


if __name__ == "__main__":
    raise SystemExit(main())
