"""The decoder: token ids in, logits or loss out.

    ids -> embedding -> [ x + attention(norm x) -> x + swiglu(norm x) ] per layer -> norm -> head

The `stock` family is exactly Llama, Qwen2 (bias on q, k, v) or Qwen3 (norm on q and k per head), with the parameter
names of transformers, so that transformers loads the weights without conversion. The `swift` family has a different
stack of layers, in the module `swift`, and shares the rest. This module does not deal with shards, steps or files.

Shapes: B batch, T positions, D width, V vocabulary, P vocabulary with padding rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from homing.errors import UsageError
from homing.lm.model.attention import Attention, KVCache
from homing.lm.model.fp8 import takes_fp8
from homing.lm.model.frozen_linear import DropoutClock, load_adapter, lora_tensors
from homing.lm.model.layers import (
    RECOMPUTES,
    Embedding,
    Linear,
    RMSNorm,
    Rope,
    SwiGLU,
    is_recomputed,
    look_up,
    recomputed,
)
from homing.lm.model.loss import cap, mean_loss, token_losses
from homing.lm.model.model_shape import check_shape, do_not_fit, misfits, padded_vocab
from homing.lm.model.row_shards import Part, Shards, local, part_of, put
from homing.lm.model.sdpa import Isolation, isolate
from homing.lm.model.swift import SOFTCAP, SwiftBlock, SwiftStack
from homing.wire.run_json import Lora, Model

__all__ = ["Decoder", "init_weights"]

MOST_SHAPES = 64  # maximum number of graphs that torch.compile may create per function (torch's default is 8)
MUON_SHARES = {"gate_proj.weight": 0.7, "up_proj.weight": 0.7, "lm_head.weight": 0.04}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


class Block(nn.Module):
    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = SwiGLU(shape.width, shape.ffn_width)

    def forward(self, run: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor]:
        """Return `run(self, *given)`, where `run` is `compute`, compiled or recomputed if the stack is set so.

        Only calling the module runs its hooks, with which FSDP gathers the block's weights. They stay outside of the
        compiled function, so that all blocks can share one.
        """
        return run(self, *given)

    def compute(
        self, x_BTD: Tensor, y_BTD: Tensor | None, cos: Tensor, sin: Tensor, cache: KVCache | None, mask: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the block's output, not yet added: the kernel of the next norm adds them."""
        x_BTD, normed = self.input_layernorm.of_sum(x_BTD, y_BTD)
        y_BTD = self.self_attn(normed, cos, sin, cache, mask)
        x_BTD, normed = self.post_attention_layernorm.of_sum(x_BTD, y_BTD)
        return x_BTD, self.mlp(normed)


class Stack(nn.Module):
    """The decoder without its output head. Its parameter names start with `model.`, as in transformers."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab(shape), shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.rope = Rope(shape.head_size, shape.context, shape.rope_base, shape.rope_scaling)
        # name -> compiled function, used only in training (see Decoder.compile_blocks)
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.recompute_every = 0  # every n-th block is recomputed, in training only (see Decoder.set_recompute)

    def forward(
        self, ids_BT: Tensor, positions: Tensor | slice, cache: KVCache | None, compute_dtype: torch.dtype,
        isolation: Isolation | None = None,
    ) -> Tensor:  # fmt: skip
        compiled = self.compiled if torch.is_grad_enabled() and cache is None else {}
        run, end = compiled.get("block", Block.compute), compiled.get("end", Stack.end)
        x_BTD = self.embed_tokens(ids_BT, compute_dtype, compiled.get("look_up", look_up))
        cos, sin = self.rope.at(positions)
        mask = isolation.mask if isolation else None
        every = self.recompute_every if torch.is_grad_enabled() and cache is None else 0
        # When compiled, the first block must take the same inputs as the others, because compiling a separate graph for
        # it would cost more than adding zeros.
        y_BTD = x_BTD * 0.0 if compiled else None
        for number, block in enumerate(self.layers):
            if is_recomputed(number, every) and y_BTD is not None:
                x_BTD, y_BTD = x_BTD + y_BTD, None  # add now, so that only one tensor is kept for the backward pass
            x_BTD, y_BTD = block(recomputed(run, number, every), x_BTD, y_BTD, cos, sin, cache, mask)
        return end(self, x_BTD, y_BTD)

    def end(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        return self.norm.of_sum(x_BTD, y_BTD)[1]


class Decoder(nn.Module):
    """A language model, created without weights: first call `init_weights(seed)` or `load_weights(tensors)`."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        check_shape(shape)
        self.shape = shape
        self.compute_dtype = torch.float32
        # Whether to use FlexAttention for packed texts; True only if it was found to be correct and faster.
        self.has_flex = False
        self.model: Stack | SwiftStack = SwiftStack(shape) if shape.family == "swift" else Stack(shape)
        self.softcap = SOFTCAP if shape.family == "swift" else 0.0
        # A tied head is the embedding itself and not a separate parameter, as in files saved by transformers.
        self.lm_head = None if shape.is_tied else Linear(shape.width, padded_vocab(shape))
        # The adapter settings, set by lora.add_lora. If set, the base weights are frozen, and only the adapters are
        # trained and saved.
        self.lora: Lora | None = None
        self.dropout_clock: DropoutClock | None = None
        self.base_storage = ""  # storage format of the frozen base weights, set by lora.load_base
        self.shards: Shards | None = None  # how the parameters are divided among ranks, set by shard_model

    # -- forward passes ----------------------------------------------------------------------------------------------

    def forward(
        self,
        ids_BT: Tensor,
        *,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, vocab_size) in fp32.

        With a cache, `ids_BT` contains the tokens that follow the cached text. `segments` (B, T) numbers the texts
        packed into each row (-1 for padding). Each text is computed as if it were alone.
        """
        return self._logits(self._hidden(ids_BT, cache, positions, segments))

    def next_logits(self, ids_BT: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (B, vocab_size), in fp32, of the next token after `ids_BT`.

        Computing the logits of a whole prompt would take gigabytes of memory (length times vocabulary) and, on a CPU,
        most of the prefill time.
        """
        return self._logits(self._hidden(ids_BT, cache, None, None)[:, -1])

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Return the final hidden states (B, T, D), from which the head computes logits."""
        return self._hidden(ids_BT, None, None, None)

    def embedding_for_next(self, ids_B1: Tensor) -> Tensor | None:
        """Return what a cache must hold of the last token (B, 1, D) when its keys were copied; None for `stock`.

        `swift` adds a part of each token's embedding to that of the next token. `ids_B1` has one token per row.
        """
        if not isinstance(self.model, SwiftStack):
            return None
        x_B1D = self.model.embed_tokens(ids_B1, self.compute_dtype)
        return F.rms_norm(x_B1D, x_B1D.shape[-1:], eps=self.shape.norm_eps)

    def _logits(self, h: Tensor) -> Tensor:
        logits = F.linear(h, self._head().to(h.dtype))[..., : self.shape.vocab_size].float()
        return cap(logits, self.softcap)

    def loss(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        weights_BT: Tensor | None = None,
        num_targets: int | Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss per target, in nats, in fp32. Targets of -100 are masked.

        `weights_BT` contains the weight of each target. If the rows are only a micro-batch, `num_targets` is the number
        of targets in the whole batch.
        """
        h_BTD = self._hidden(ids_BT, None, positions, segments)
        weights_N = None if weights_BT is None else weights_BT.flatten()
        return mean_loss(
            h_BTD.flatten(0, 1), self._head(), targets_BT.flatten(), self.shape.vocab_size, self.softcap,
            weights_N=weights_N, num_targets=num_targets,
        )  # fmt: skip

    def token_losses(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each target in nats, or 0 where the target is -100. Evaluations use this."""
        h_BTD = self._hidden(ids_BT, None, positions, segments)
        vocab_size = self.shape.vocab_size
        losses_N = token_losses(h_BTD.flatten(0, 1), self._head(), targets_BT.flatten(), vocab_size, self.softcap)
        return losses_N.view(targets_BT.shape)

    def _hidden(
        self, ids_BT: Tensor, cache: KVCache | None, positions: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        start, T = cache.length if cache else 0, ids_BT.shape[1]
        assert start + T <= self.shape.context, f"{start + T} positions in a context of {self.shape.context}"
        assert segments is None or (cache is None and positions is None), "segments have positions of their own"
        isolation = None if segments is None else isolate(segments, is_flex=self.has_flex)
        where = isolation.positions_BT if isolation else slice(start, start + T) if positions is None else positions
        if self.dropout_clock is not None and torch.is_grad_enabled():
            self.dropout_clock.next_piece(ids_BT.shape[0])
        h_BTD = self.model(ids_BT, where, cache, self.compute_dtype, isolation)
        if cache is not None:
            cache.length += T
        return h_BTD

    def _head(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self, *, batch: int = 1, capacity: int | None = None) -> KVCache:
        capacity = capacity or self.shape.context
        return KVCache(self.shape, batch=batch, capacity=capacity, device=self.device, dtype=self.compute_dtype)

    def compile_blocks(self, *, is_on: bool = True) -> None:
        """Compile one block that all layers share, which takes seconds; compiling the whole model would take a minute.

        The compiled block is used only in training. Evaluation and generation use varying shapes and run eagerly.
        """
        parts: dict[str, Callable[..., Any]] = {"look_up": look_up, "end": type(self.model).end}
        if isinstance(self.model, SwiftStack):
            parts |= {"begin": SwiftStack.begin, "block": SwiftBlock.compute}
        else:
            parts["block"] = Block.compute
        if is_on:
            # torch compiles one graph per row shape and kind of block. Once it reaches its limit on the number of
            # graphs, it would silently run uncompiled code. Make it raise an error instead, for the trainer to report.
            limits = torch._dynamo.config
            limits.recompile_limit = max(MOST_SHAPES, limits.recompile_limit)
            limits.fail_on_recompile_limit_hit = True
        # Call torch.compile only if compilation is enabled, because the call itself takes a second.
        self.model.compiled = {name: torch.compile(part, dynamic=False) for name, part in parts.items() if is_on}

    def set_recompute(self, kind: str) -> Decoder:
        """Set which blocks recompute activations: `none | half | all` (see `layers`)."""
        self.model.recompute_every = RECOMPUTES[kind]
        return self

    def set_precision(self, precision: str) -> Decoder:
        """Set the precision of matmuls: `fp32 | bf16 | fp8`. Master weights stay fp32.

        With fp8, the matmuls of the blocks use FP8 if their sizes allow it, and everything else uses bf16.
        """
        if precision == "fp8" and self.lora is not None:
            raise UsageError(
                what="Frozen weights cannot be used in FP8.",
                why="train.precision is fp8, but the phase trains adapters.",
                fix="Set train.precision: bf16 (or auto), or method: full.",
            )
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

    def init_weights(self, seed: int, optimizer: str = "adamw") -> None:
        """Initialize the weights for training with `optimizer`: muon or adamw."""
        init_weights(self, self.shape, seed, optimizer)

    def num_params(self) -> int:
        """Return the number of parameters, not counting padding rows. A tied head is counted once."""
        return sum(math.prod(part.shape) for part in self.weight_parts().values())

    def weights_for_disk(self) -> dict[str, Tensor]:
        """Return name -> tensor as transformers expects them, without padding rows and without a tied head.

        With adapters, return only the adapters, as peft expects them. If the weights are divided among ranks, call
        `weight_parts` instead.
        """
        assert self.shards is None, "this rank holds only a part of the weights"
        if self.lora is not None:
            return lora_tensors(self)
        return {name: self.cut_padding(name, p.detach()).contiguous() for name, p in self.named_parameters()}

    def weight_parts(self) -> dict[str, Part]:
        """Return name -> the rows of this parameter that this rank holds, without padding rows."""
        return {name: self.part(name, local(p.detach()), p.shape[0]) for name, p in self.named_parameters()}

    def part(self, name: str, tensor: Tensor, num_rows: int) -> Part:
        """Return the place of `tensor`: this rank's rows of a parameter, of its gradient or of its optimizer state."""
        return part_of(tensor, self.shards, num_rows, self.shape.vocab_size if _is_padded(name) else None)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors as returned by `weights_for_disk`. Raise DataError naming every tensor that does not fit."""
        if self.lora is not None:
            load_adapter(self, tensors)
            return
        wanted, given = self.weight_parts(), dict(tensors)
        if self.lm_head is None:
            # Some programs save the tied head as a second copy of the embedding; ignore the copy.
            given.pop("lm_head.weight", None)
        expected = {name: part.shape for name, part in wanted.items()}
        if problems := misfits(expected, {name: tuple(tensor.shape) for name, tensor in given.items()}):
            raise do_not_fit(problems)
        for name, parameter in self.named_parameters():
            local(parameter).zero_()
            put(wanted[name], given[name])

    @torch.no_grad()
    def load_each(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights like `load_weights`, one tensor at a time, so that they need not all be in memory."""
        wanted, found = self.weight_parts(), dict[str, tuple[int, ...]]()
        for parameter in self.parameters():
            local(parameter).zero_()
        for name, tensor in pairs:
            if name == "lm_head.weight" and self.lm_head is None:
                continue  # a second copy of the tied embedding
            found[name] = tuple(tensor.shape)
            if name in wanted and found[name] == wanted[name].shape:
                put(wanted[name], tensor)
        if problems := misfits({name: part.shape for name, part in wanted.items()}, found):
            raise do_not_fit(problems)

    def cut_padding(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor without its vocabulary padding rows; a tensor with no such rows is returned unchanged.

        This also works for optimizer state of the same shape.
        """
        return tensor[: self.shape.vocab_size] if _is_padded(name) else tensor


def _is_padded(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "value_embed.weight"))


# -- weight initialization ---------------------------------------------------------------------------------------------


@torch.no_grad()
def init_weights(model: nn.Module, shape: Model, seed: int, optimizer: str) -> None:
    """Initialize all parameters in place, for training with `optimizer`: muon or adamw.

    stock   every matrix          normal, std = 0.5 / sqrt(fan-in): 0.02 at width 640
            o_proj and down_proj  this std / sqrt(2 layers), so that the residual stream does not grow with depth
            norms 1, biases 0
            for Muon              0.7 of this std for gate_proj and up_proj, 0.04 of it for an untied head, so that all
                                  tokens are equally likely at first; AdamW would take too long to leave this state
    swift   embedding             normal, std 0.8: it is normalized at once, so only its direction counts
            head                  normal, std 0.001: all tokens are equally likely at first
            q, k, v, values       normal, std = 1 / sqrt(width); up_proj 0.4 of this std
            o_proj and down_proj  0: a new block passes its input through
            scales                see _scales; gates nearly 0

    Padding rows are 0. With these values the first loss is within a few tenths of ln(vocabulary). In `stock` every
    parameter has a gradient from the first step on; in `swift`, from the second, after the first has changed the zeros.

    Each parameter has its own random generator, seeded by (seed, name) and always on the CPU. So the same seed gives
    the same model on CPU, CUDA and MPS, whatever the padding and the order in which parameters are created.
    """
    shards = model.shards if isinstance(model, Decoder) else None
    for name, parameter in model.named_parameters():
        mine = local(parameter).zero_()  # the rows of this rank; padding rows stay 0
        if shape.family == "swift" and parameter.dim() == 1:
            put(part_of(mine, shards, parameter.shape[0]), _scales(name, shape.num_layers))
        elif name.endswith("norm.weight"):
            mine.fill_(1.0)
        elif parameter.dim() > 1:
            std = _swift_std(name, shape) if shape.family == "swift" else _stock_std(name, parameter, shape, optimizer)
            num_rows = shape.vocab_size if _is_padded(name) else parameter.shape[0]
            drawn = _drawn(name, num_rows, parameter.shape[1], seed, std)
            put(part_of(mine, shards, parameter.shape[0], num_rows), drawn)


def _scales(name: str, num_layers: int) -> Tensor:
    if name.endswith("keep_scales"):
        return torch.linspace(1.15, 1.05, num_layers)
    if name.endswith("first_scales"):
        return torch.linspace(0.20, 0.05, num_layers)
    return torch.full((1,), 0.2 if name.endswith("backout_scale") else 0.0)


def _drawn(name: str, num_rows: int, num_cols: int, seed: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(num_rows, num_cols, device="cpu").normal_(0.0, std, generator=generator)


def _stock_std(name: str, parameter: Tensor, shape: Model, optimizer: str) -> float:
    std = 0.5 * parameter.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return std * (2 * shape.num_layers) ** -0.5
    if optimizer == "muon":
        for ending, share in MUON_SHARES.items():
            if name.endswith(ending):
                return share * std
    return std


def _swift_std(name: str, shape: Model) -> float:
    std = shape.width**-0.5
    for ending, own in (
        ("embed_tokens.weight", 0.8),
        ("lm_head.weight", 0.001),
        ("o_proj.weight", 0.0),
        ("down_proj.weight", 0.0),
        ("up_proj.weight", 0.4 * std),
        ("gate.weight", 0.01),
    ):
        if name.endswith(ending):
            return own
    return std
