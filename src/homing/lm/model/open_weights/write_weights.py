"""Saves a Decoder as safetensors, with the dtypes and file names of the loaded weights or with new ones.

    one file up to `shard_bytes`, else model-00001-of-0000N.safetensors and an index that names each tensor's file

Converting weights from bf16 to fp32 and back changes no bits, so untrained weights are saved exactly as they were
loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from homing.lm.model import Decoder
from homing.lm.model.open_weights.find_tensors import INDEX, WeightFiles
from homing.lm.model.open_weights.read_weights import DTYPES
from homing.wire import file_names

__all__ = ["SHARD_BYTES", "save_tensors", "save_weights"]

SHARD_BYTES = 5 * 10**9


def save_weights(
    model: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    like: WeightFiles | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Save the weights; return the names of the files written.

    With `like`, every tensor is saved in the dtype and file that it was loaded from. Any other tensor is saved in
    `dtype`, or in its current dtype if `dtype` is None.
    """
    tensors = {name: model.cut_padding(name, p.detach()) for name, p in model.named_parameters()}
    dtypes = {name: _dtype_of(name, tensor, dtype, like) for name, tensor in tensors.items()}
    where = _like(tensors, like) or _places(tensors, dtypes, shard_bytes)
    files = sorted(set(where.values()))
    for file in files:
        # Convert one shard at a time, so that memory contains only one converted shard in addition to the model.
        part = {name: t.to(dtypes[name]).contiguous().cpu() for name, t in tensors.items() if where[name] == file}
        save_tensors(part, folder / file, metadata={"format": "pt"})
        _flush(folder / file)
    if files != [file_names.WEIGHTS]:
        total = sum(t.numel() * dtypes[name].itemsize for name, t in tensors.items())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files.append(INDEX)
    return files


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Save a safetensors file. If the disk fails or is full, raise OSError, as callers expect, not SafetensorError."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as exc:
        if not re.search(r"I/?O ?error|OS error", str(exc), re.IGNORECASE):
            raise  # not a disk error
        code = errno.ENOSPC if "no space" in str(exc).lower() else errno.EIO
        raise OSError(code, f"{path} could not be written: {exc}") from exc


def _dtype_of(name: str, tensor: Tensor, dtype: torch.dtype | None, like: WeightFiles | None) -> torch.dtype:
    if like is not None and name in like.dtypes:
        return DTYPES[like.dtypes[name]]
    return dtype or tensor.dtype


def _like(tensors: dict[str, Tensor], like: WeightFiles | None) -> dict[str, str] | None:
    if like is None or not tensors.keys() <= like.where.keys():
        return None
    return {name: like.where[name] for name in tensors}


def _places(tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype], shard_bytes: int) -> dict[str, str]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * dtypes[name].itemsize
        if shards[-1] and filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    if len(shards) == 1:
        return dict.fromkeys(tensors, file_names.WEIGHTS)
    stem = file_names.WEIGHTS.removesuffix(".safetensors")
    return {
        name: f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, shard in enumerate(shards, start=1)
        for name in shard
    }


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
