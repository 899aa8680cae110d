"""The decoder: token ids in, logits or loss out.

    ids -> embedding -> [ x + attention(norm x) -> x + swiglu(norm x) ] per layer -> norm -> head

The `stock` family is exactly Llama, Qwen2 (bias on q, k, v) or Qwen3 (norm on q and k per head), with parameter names
equal to those of transformers, so the weights on disk open there without a word. `swift` has a stack of its own, in
`swift`; all around it is shared. It knows nothing of shards, steps or files.

Shapes: B batch, T positions, D width, V vocabulary, P vocabulary with padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from homing.errors import DataError
from homing.lm.model.attend import Attention, KVCache
from homing.lm.model.fp8 import takes_fp8
from homing.lm.model.init import init_weights
from homing.lm.model.layers import Embedding, Linear, RMSNorm, Rope, SwiGLU, look_up
from homing.lm.model.loss import cap, mean_loss, token_losses
from homing.lm.model.shape import check_shape, padded_vocab
from homing.lm.model.swift import SOFTCAP, SwiftStack
from homing.wire.run import Model

__all__ = ["Decoder"]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


class Block(nn.Module):
    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = SwiGLU(shape.width, shape.ffn_width)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos, sin, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Stack(nn.Module):
    """Everything but the head; the name `model.` in front of its parameters is what transformers calls it."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab(shape), shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.rope = Rope(shape.head_size, shape.context, shape.rope_base)
        self.compiled: dict[str, Callable[..., Tensor]] = {}  # by part, in training only; see Decoder.compile_blocks

    def forward(
        self, ids_BT: Tensor, positions: Tensor | slice, cache: KVCache | None, compute_dtype: torch.dtype
    ) -> Tensor:
        compiled = self.compiled if torch.is_grad_enabled() and cache is None else {}
        run, end = compiled.get("block", Block.forward), compiled.get("end", Stack.end)
        look = compiled.get("look_up", look_up)
        x_BTD = look(ids_BT, self.embed_tokens.weight, compute_dtype)
        cos, sin = self.rope.at(positions)
        for block in self.layers:
            x_BTD = run(block, x_BTD, cos, sin, cache)
        return end(self, x_BTD)

    def end(self, x_BTD: Tensor) -> Tensor:
        return self.norm(x_BTD)


class Decoder(nn.Module):
    """Made empty: call `init_weights(seed)` or `load_weights(tensors)` before anything else."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        check_shape(shape)
        self.shape = shape
        self.compute_dtype = torch.float32
        self.model: Stack | SwiftStack = SwiftStack(shape) if shape.family == "swift" else Stack(shape)
        self.softcap = SOFTCAP if shape.family == "swift" else 0.0
        # A tied head is the embedding itself and not a parameter of its own, as in the files that others read.
        self.lm_head = None if shape.is_tied else Linear(shape.width, padded_vocab(shape))

    # -- computing ---------------------------------------------------------------------------------------------------

    def forward(self, ids_BT: Tensor, *, cache: KVCache | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocab_size) in fp32. With a cache, `ids_BT` follow what the cache holds."""
        h_BTD = self._hidden(ids_BT, cache, positions)
        logits_BTV = F.linear(h_BTD, self._head().to(h_BTD.dtype))[..., : self.shape.vocab_size].float()
        return cap(logits_BTV, self.softcap)

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Mean nats per target in fp32; targets of -100 do not count."""
        h_BTD = self._hidden(ids_BT, None, positions)
        vocab_size = self.shape.vocab_size
        return mean_loss(h_BTD.flatten(0, 1), self._head(), targets_BT.flatten(), vocab_size, self.softcap)

    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Nats of each target, 0 for -100: what evaluation sums in its own way."""
        h_BTD = self._hidden(ids_BT, None, positions)
        vocab_size = self.shape.vocab_size
        losses_N = token_losses(h_BTD.flatten(0, 1), self._head(), targets_BT.flatten(), vocab_size, self.softcap)
        return losses_N.view(targets_BT.shape)

    def _hidden(self, ids_BT: Tensor, cache: KVCache | None, positions: Tensor | None) -> Tensor:
        start, T = cache.length if cache else 0, ids_BT.shape[1]
        assert start + T <= self.shape.context, f"{start + T} positions in a context of {self.shape.context}"
        where = slice(start, start + T) if positions is None else positions
        h_BTD = self.model(ids_BT, where, cache, self.compute_dtype)
        if cache is not None:
            cache.length += T
        return h_BTD

    def _head(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self, *, batch: int = 1, capacity: int | None = None) -> KVCache:
        capacity = capacity or self.shape.context
        return KVCache(self.shape, batch=batch, capacity=capacity, device=self.device, dtype=self.compute_dtype)

    def compile_blocks(self, *, is_on: bool = True) -> None:
        """torch.compile of one block, shared by all: a few seconds, where the whole model takes a minute. It is for
        training; evaluation and generation, whose shapes vary, stay as they are."""
        parts: dict[str, Callable[..., Tensor]] = {"look_up": look_up, "end": type(self.model).end}
        parts["block"] = type(self.model.layers[0]).forward
        if isinstance(self.model, SwiftStack):
            parts["begin"] = SwiftStack.begin
        # Only where it is asked for: getting ready to compile takes a second of its own.
        self.model.compiled = {name: torch.compile(part, dynamic=False) for name, part in parts.items() if is_on}

    def set_precision(self, precision: str) -> Decoder:
        """`fp32 | bf16 | fp8`: what products are computed in. The master weights stay fp32. With fp8 the products of
        the blocks are in FP8 where their size allows, and everything else is in bf16."""
        self.compute_dtype = PRECISIONS[precision]
        for layer in self.model.layers.modules():
            if isinstance(layer, Linear):
                is_fit = layer.bias is None and takes_fp8(layer.weight.shape[1], layer.weight.shape[0])
                layer.is_fp8 = precision == "fp8" and is_fit
        return self

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    # -- weights -----------------------------------------------------------------------------------------------------

    def init_weights(self, seed: int) -> None:
        init_weights(self, self.shape, seed)

    def num_params(self) -> int:
        """Every parameter once; padding rows are not parameters."""
        return sum(self.cut_padding(name, p).numel() for name, p in self.named_parameters())

    def weights_for_disk(self) -> dict[str, Tensor]:
        """Name -> tensor as transformers expects them: no padding rows, no tied head."""
        return {name: self.cut_padding(name, p.detach()).contiguous() for name, p in self.named_parameters()}

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `weights_for_disk`: every name and shape must fit, and each one that does not is named."""
        wanted = dict(self.named_parameters())
        given = dict(tensors)
        if self.lm_head is None:
            # Some writers store the tied head a second time; the embedding is the one that counts.
            given.pop("lm_head.weight", None)
        problems = [f"{name} is missing." for name in wanted if name not in given]
        problems += [f"{name} is no weight of this model." for name in given if name not in wanted]
        for name in wanted.keys() & given.keys():
            expected, found = tuple(self.cut_padding(name, wanted[name]).shape), tuple(given[name].shape)
            if expected != found:
                problems.append(f"{name} is {found} in the file and {expected} in the model.")
        if problems:
            listed = sorted(problems)
            more = [f"and {len(listed) - 12} more."] if len(listed) > 12 else []
            raise DataError(
                what="The weights do not fit the model.",
                why="\n".join(listed[:12] + more),
                fix="Use the run.json or config.json that lies beside these weights.",
            )
        for name, parameter in wanted.items():
            parameter.zero_()
            self.cut_padding(name, parameter).copy_(given[name])

    def cut_padding(self, name: str, tensor: Tensor) -> Tensor:
        """The rows of the real vocabulary; every other tensor as it is. Also for optimizer state of that shape."""
        is_padded = name.endswith(("embed_tokens.weight", "lm_head.weight", "value_embed.weight"))
        return tensor[: self.shape.vocab_size] if is_padded else tensor
