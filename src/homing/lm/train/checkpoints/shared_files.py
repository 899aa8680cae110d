"""Writes safetensors files from several ranks at the same time: each rank writes the rows that it holds.

    all ranks: the same header, computed from names, dtypes and shapes
    first rank: create the files in full size -> every rank: write own rows in place, sync, leave a marker
    first rank: wait for all markers -> go on as with files of one process: hash, manifest last

Rows are contiguous in a safetensors file, so the ranks need no whole tensor in memory, and the result is the file that
one process would have written, byte for byte. It can be loaded by any number of ranks, and by other programs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from homing.lm.model.row_shards import Part

__all__ = ["SharedFile", "leave_marker", "wait_for_markers"]

_DTYPES = {torch.float32: "F32", torch.int64: "I64"}
_MARKER = ".written-by-"
_LOOK_EVERY_S = 0.02
_TIMEOUT_S = 1800.0  # how long the first rank waits for the others, which write as many bytes as it does


@dataclass(frozen=True)
class SharedFile:
    name: str
    header: bytes
    places: dict[str, int]  # name of a tensor -> its first byte in the file
    num_bytes: int

    @staticmethod
    def of(name: str, parts: Mapping[str, Part], metadata: dict[str, str] | None = None) -> SharedFile:
        # The safetensors library writes larger dtypes first, then by name.
        ordered = sorted(parts, key=lambda each: (-parts[each].tensor.dtype.itemsize, each))
        entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
        offsets, end = {}, 0
        for each in ordered:
            part, offsets[each] = parts[each], end
            end += torch.Size(part.shape).numel() * part.tensor.dtype.itemsize
            entries[each] = {
                "dtype": _DTYPES[part.tensor.dtype], "shape": list(part.shape), "data_offsets": [offsets[each], end],
            }  # fmt: skip
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return SharedFile(name, header, {each: len(header) + offset for each, offset in offsets.items()},
                          len(header) + end)  # fmt: skip

    def create(self, folder: Path) -> None:
        """Create the file with its header, and reserve its disk space, so that a full disk is noticed now."""
        with open(folder / self.name, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
            else:  # macOS, where only the writing itself notices a full disk
                os.ftruncate(file.fileno(), self.num_bytes)
            file.write(self.header)

    def write(self, folder: Path, parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's rows. `tensors` are the parts' tensors, or copies of them in host memory."""
        with open(folder / self.name, "r+b", buffering=0) as file:
            for name, part in parts.items():
                if not part.is_mine or not part.tensor.numel():
                    continue
                rows = tensors[name].detach().cpu().contiguous()
                row_bytes = rows.numel() * rows.element_size() // len(rows) if part.shape else 0
                data = rows.view(-1).view(torch.uint8).numpy().data
                at = self.places[name] + part.first_row * row_bytes
                while data:
                    num = os.pwrite(file.fileno(), data, at)
                    data, at = data[num:], at + num
            os.fsync(file.fileno())


def leave_marker(folder: Path, rank: int, problem: str = "") -> None:
    """Tell the first rank that this one has written its rows, or why it could not."""
    temporary = folder / f"{_MARKER}{rank}.partial"
    temporary.write_text(problem, encoding="utf-8")
    os.replace(temporary, folder / f"{_MARKER}{rank}")


def wait_for_markers(folder: Path, num_ranks: int) -> None:
    """Wait until all other ranks have written their rows, and remove their markers. Raise OSError if one failed."""
    deadline = time.monotonic() + _TIMEOUT_S
    for rank in range(1, num_ranks):
        marker = folder / f"{_MARKER}{rank}"
        while not marker.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(0, f"Rank {rank} has not written its part in {_TIMEOUT_S / 60:.0f} minutes.")
            time.sleep(_LOOK_EVERY_S)
        problem = marker.read_text(encoding="utf-8")
        marker.unlink()
        if problem:
            raise OSError(0, f"Rank {rank}: {problem}")
