"""Loads safetensors files into a Decoder, tensor by tensor.

    headers -> does every name and shape fit? -> empty parameters on their device, in their dtype -> copy one by one

`Decoder(shape)` followed by `load_weights(all tensors)` would need memory for twice the weights, and for a bf16 model
three times as much. Here memory never contains more than the parameters and one tensor: each shard is memory-mapped,
and closed before the next one is opened.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from homing.lm.model import Decoder
from homing.lm.model.model_shape import do_not_fit, misfits
from homing.lm.model.open_weights.find_tensors import WeightFiles, open_tensors
from homing.wire.run_json import Model

__all__ = ["DTYPES", "empty_decoder", "fill", "load_decoder", "read_tensors"]

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


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
