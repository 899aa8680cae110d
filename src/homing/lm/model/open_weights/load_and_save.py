"""Loads safetensors files into a Decoder, tensor by tensor, and saves a Decoder with the same or new dtypes and names.

    headers -> does every name and shape fit? -> empty parameters on their device, in their dtype -> copy one by one
    a Decoder -> one file up to `shard_bytes`, else model-00001-of-0000N.safetensors and an index that names each
                 tensor's file

`Decoder(shape)` followed by `load_weights(all tensors)` would need memory for twice the weights, and for a bf16 model
three times as much. Here memory never contains more than the parameters and one tensor: each shard is memory-mapped,
and closed before the next one is opened.

Converting weights from bf16 to fp32 and back changes no bits, so untrained weights are saved exactly as they were
loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from homing.lm.model import Decoder
from homing.lm.model.model_shape import do_not_fit, misfits
from homing.lm.model.open_weights.find_tensors import INDEX, WeightFiles, open_tensors
from homing.wire import file_names
from homing.wire.run_json import Model

__all__ = [
    "DTYPES",
    "SHARD_BYTES",
    "empty_decoder",
    "fill",
    "load_decoder",
    "read_tensors",
    "save_tensors",
    "save_weights",
]

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
SHARD_BYTES = 5 * 10**9


def load_decoder(
    files: WeightFiles, shape: Model, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Decoder:
    """Return a decoder with its weights loaded.

    `dtype` is the dtype of its parameters; None means the dtype in which most of the weights are stored.
    """
    _check(files, shape)
    model = empty_decoder(shape, device=device, dtype=dtype or DTYPES[files.main_dtype])
    fill(model, files)
    return model


def empty_decoder(shape: Model, *, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """Create a Decoder with uninitialized parameters, allocated directly on `device` in `dtype`."""
    with torch.device("meta"):
        model = Decoder(shape)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
            module.register_parameter(name, made)
        for name, buffer in module.named_buffers(recurse=False):
            # Buffers (the RoPE angles) already have values: `Rope` computes them on the CPU even under the meta device.
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model


@torch.no_grad()
def fill(model: Decoder, files: WeightFiles) -> None:
    """Copy the weights into a Decoder; raise DataError unless all names and shapes fit.

    The Decoder may be an existing one, such as the trainer's.
    """
    _check(files, model.shape, model)
    wanted = dict(model.named_parameters())
    for file in files.files:
        with open_tensors(files.folder / file, str(model.device)) as tensors:
            for name in [name for name, where in files.where.items() if where == file and name in wanted]:
                kept = model.cut_padding(name, wanted[name])
                kept.copy_(tensors.get_tensor(name))
                if kept.shape[0] != wanted[name].shape[0]:
                    wanted[name][kept.shape[0] :].zero_()


def read_tensors(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) one by one. A tensor is a view of its file, so copy it before requesting the next one."""
    for file in files.files:
        with open_tensors(files.folder / file) as tensors:
            for name in [name for name, where in files.where.items() if where == file]:
                yield name, tensors.get_tensor(name)


def _check(files: WeightFiles, shape: Model, model: Decoder | None = None) -> None:
    if model is None:
        with torch.device("meta"):
            model = Decoder(shape)
    wanted = {name: tuple(model.cut_padding(name, p).shape) for name, p in model.named_parameters()}
    given = dict(files.shapes)
    if shape.is_tied:
        # Some programs save the tied head as a second copy of the embedding; ignore the copy.
        given.pop("lm_head.weight", None)
    problems = misfits(wanted, given)
    for name in wanted.keys() & given.keys():
        if files.dtypes[name] not in DTYPES:
            problems.append(f"{name} has the dtype {files.dtypes[name]}; supported dtypes: {', '.join(DTYPES)}.")
    if problems:
        raise do_not_fit(problems)


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
