"""Finds the weights in a folder of safetensors: which tensor is in which file, and its dtype.

    model.safetensors                                     everything
    model.safetensors.index.json + model-00001-of-0000N   tensor -> file

Reads only headers. A `.bin` is a pickle, which can execute code when opened, so it is never opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from homing.errors import DataError, IntegrityError
from homing.wire import file_names

__all__ = ["INDEX", "WeightFiles", "find_weights", "has_weights"]

INDEX = f"{file_names.WEIGHTS}.index.json"
# Endings of tensor names to ignore: some programs also save tables that can be computed from the model's shape.
# transformers ignores these tensors too.
_TABLES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class WeightFiles:
    folder: Path
    where: dict[str, str]  # tensor name -> file name
    dtypes: dict[str, str] = field(default_factory=dict)  # tensor name -> dtype: F32, BF16, ...
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return sorted(set(self.where.values()))

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in self.files)

    @property
    def main_dtype(self) -> str:
        """The dtype in which most weights are stored. Norms may be stored in a wider dtype than matrices."""
        counts: dict[str, int] = {}
        for name, dtype in self.dtypes.items():
            size = 1
            for length in self.shapes[name]:
                size *= length
            counts[dtype] = counts.get(dtype, 0) + size
        return max(counts, key=lambda dtype: counts[dtype], default="F32")


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (file_names.WEIGHTS, INDEX, file_names.ADAPTER))


def find_weights(folder: Path) -> WeightFiles:
    for name in (file_names.WEIGHTS, file_names.ADAPTER):
        if (folder / name).is_file() and not (folder / INDEX).is_file():
            return _with_headers(folder, [name], None)
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        also = (
            f" It contains the pickle files {', '.join(pickled[:3])}, but homing never loads these." if pickled else ""
        )
        raise DataError(
            what=f"There are no weights in {folder}.",
            why=f"The folder contains neither {file_names.WEIGHTS} nor {INDEX}.{also}",
            fix="Download the model's safetensors files; its page on the Hub lists them.",
        )
    where = _read_index(folder / INDEX)
    files = sorted(set(where.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise DataError(
            what=f"The weights in {folder} are incomplete.",
            why=f"{len(missing)} of {len(files)} files are missing: {', '.join(missing)}.",
            fix="Download the missing files from the same source as the others.",
        )
    return _with_headers(folder, files, where)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
        where = {str(tensor): str(name) for tensor, name in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        why = f"{type(exc).__name__}: {exc}"
        raise IntegrityError(f"{path} cannot be read.", why=why, fix="Download the folder again.") from exc
    outside = sorted({name for name in where.values() if "/" in name or "\\" in name or name.startswith(".")})
    if outside or not where:
        raise DataError(
            what=f"{path} is not a valid weights index.",
            why=f"It names files outside its folder: {', '.join(outside[:3])}." if outside else "It lists no tensors.",
            fix="Use an index written by transformers.",
        )
    return where


def _with_headers(folder: Path, files: list[str], promised: dict[str, str] | None) -> WeightFiles:
    where: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        with open_tensors(folder / name) as tensors:
            for tensor in tensors.keys():  # noqa: SIM118 (not a mapping)
                if tensor.endswith(_TABLES) or (promised is not None and promised.get(tensor) != name):
                    continue
                part = tensors.get_slice(tensor)
                where[tensor], dtypes[tensor], shapes[tensor] = name, part.get_dtype(), tuple(part.get_shape())
    absent = sorted(tensor for tensor in promised or {} if tensor not in where and not tensor.endswith(_TABLES))
    if absent:
        raise IntegrityError(
            what=f"The weights in {folder} are incomplete.",
            why=f"{INDEX} lists {len(absent)} tensors that are missing: {', '.join(absent[:6])}.",
            fix="Download the folder again.",
        )
    return WeightFiles(folder, where, dtypes, shapes)


def open_tensors(path: Path, device: str = "cpu") -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as exc:
        raise IntegrityError(
            what=f"{path} is not a safetensors file.",
            why=str(exc),
            fix="Download it again. If it belongs to a run's checkpoint, use: homing fetch RUN",
        ) from exc
