"""Estimate the GPU memory of training, part by part, and suggest what to lower if it does not fit.

  always         weights, gradients and optimizer state of the trained parameters, and CUDA itself
  forward        compute copies of the matrices, activations per row, one chunk of logits with its gradients
  step           Muon's scratch memory for its largest group of matrices; never at the same time as a forward pass

  full           everything is trained: weights, gradients and moments in fp32 (int8 moments take a quarter)
  lora           one copy of the weights in the compute type; gradients and moments for the adapters only
  qlora          blocks in NF4, dequantized one matrix at a time; embedding and head in bf16
  recompute      a recomputed block keeps only its input; in the backward pass, one whole block at a time is in memory
  offload        the optimizer state is in host memory; during a step a few chunks of it are on the GPU
  rl             a copy of the weights to sample from, and the KV cache of all rows, which captured graphs keep; with
                 adapters, rl samples from the frozen weights, which with the initial adapters are also the KL reference

The peak is `always + max(forward, step, sampling)`. Activations are those kept for the backward pass, counted from the
decoder's tensors; attention is a fused kernel, so its memory does not grow with the square of the context. The estimate
was compared with peaks measured on an H200 (tests/config/estimate/test_memory.py has them).

With `zero2`, `zero3` and `hsdp`, each rank holds its share of weights, gradients and optimizer state, and for a while
whole weights and gradients of what it computes. These shares are computed, not measured: no run on several GPUs has
been compared with them yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from homing.config.estimate.params_and_flops import (
    REACH,
    RECOMPUTED_OF,
    adapter_params,
    cache_bytes,
    num_rows,
    parameter_table,
    prompt_tokens,
    round_up,
    row_tokens,
    rows_at_a_time,
)
from homing.gpus import GPUS, Gpu
from homing.wire.run_json import Lora, Model, Phase, Rl, Run

__all__ = ["AT_A_TIME", "LORA_TARGETS", "Fit", "Memory", "fits", "fits_every_phase", "layer_bytes",
           "memory_of", "rank_memories", "training_memory"]  # fmt: skip

# CUDA context, cuBLAS and cuDNN workspaces of one process: 0.75 GiB on the H200, more with other drivers.
CUDA_BYTES = 2**30
# On a host with offloaded state: memory of one process (Python, torch, CUDA), and the fraction of memory to use.
PROCESS_BYTES, HOST_SHARE = 3 * 2**30, 0.9
# Allowance for what the estimate leaves out: matmul workspaces, rows of statistics, fragmentation.
SPARE = 1.04
FP32, BF16, FP8 = 4, 2, 1
# Not all GPU memory can be used, because the allocator rounds sizes up and memory becomes fragmented.
USABLE = 0.94
# The trainer's loss computes logits in chunks of this many (token, vocabulary entry) pairs, in the compute type.
PIECE_LOGITS = 2**28
NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # bytes per weight, including its share of the first- and second-level scales
INT8 = 1 + 4 / 256  # bytes per moment, including its share of the block scale
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # what `all` means
# Bytes per parameter during a Muon step: gradient, momentum mix and update in fp32; polynomial operands in bf16.
MUON_SCRATCH_BYTES = 16
# Offloaded state on the GPU: number of AdamW elements per chunk, and number of chunks in memory at a time.
AT_A_TIME, LOADS = 2**24, 3
# Bytes per row and vocabulary entry while sampling. They hold the logits in bf16 and, in fp32, the logits, the
# log-probabilities, and the copies used to compute the entropy and choose the token.
SAMPLED_LOGIT_BYTES = 22
# Log-probabilities of samples, needed for a KL term or for several updates, are computed this many tokens at a time.
LOOKED_BACK_TOKENS = 65536


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, by part. `copies` to `block_per_row` are temporary; `*_per_row` grow with the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations_per_row: int
    logits_per_row: int
    logits_most: int
    head_gradient: int
    scratch: int
    block_per_row: int = 0  # the block that is being recomputed
    cuda: int = CUDA_BYTES
    # rl: one copy of the weights to sample from, and one as the KL reference; adapters need only the KL reference
    lean: int = 0
    rollout: int = 0  # rl: KV cache and logits of the rows that are sampled together
    is_rollout_kept: bool = False  # True with captured graphs, which need the same buffers at every step
    passing: int = 0  # rl: temporary memory while prompts are prefilled and log-probabilities of samples are computed
    host: int = 0  # offload: size of the optimizer state in host memory
    layer: int = 0  # full: the weights of one block, and those of the rest (embedding, head, final norm)
    ends: int = 0
    gathered: int = 0  # weights and gradients that are whole for a while although the ranks divide them
    is_pass_kept: bool = False  # True with train.graphs: on, because a captured graph keeps its memory after the pass

    @property
    def always(self) -> int:
        kept = self.rollout if self.is_rollout_kept else 0
        return self.weights + self.gradients + self.optimizer + self.cuda + self.lean + kept

    @property
    def checkpoint(self) -> int:
        """The checkpoint's size on disk: the trained parameters in fp32 and their optimizer state."""
        return self.gradients + self.optimizer + self.host

    def host_needed(self, num_cards: int = 1) -> int:
        """Return the host memory that a machine needs; 0 without offload.

        It holds each GPU's optimizer state, plus one copy of the weights while a checkpoint is written.
        """
        if not self.host:
            return 0
        return int((max(1, num_cards) * (self.host + PROCESS_BYTES) + self.gradients) / HOST_SHARE)

    def peak(self, micro_batch: int) -> int:
        forward, sampling = self.forward(micro_batch), self.passing + (0 if self.is_rollout_kept else self.rollout)
        if self.is_pass_kept:
            return self.always + forward + max(self.scratch, sampling)
        return self.always + max(forward, self.scratch, sampling)

    def forward(self, micro_batch: int) -> int:
        logits = min(self.logits_most, micro_batch * self.logits_per_row) + self.head_gradient
        # When the first block is recomputed, the memory of the loss has already been freed. So count the larger of
        # the two, not their sum.
        passing = max(logits, int(SPARE * micro_batch * self.block_per_row) + self.head_gradient)
        return int(self.copies + self.gathered + SPARE * micro_batch * self.activations_per_row + passing)

    def divided(self, parallel: str, num_ranks: int) -> Memory:
        """Return the memory of one of `num_ranks` ranks that divide the model as `train.parallel` says.

        The copies of the matrices in the compute type stay whole, because autograd keeps them until the backward pass
        of their block. With recompute: all, only one block has them.
        """
        if parallel == "ddp" or num_ranks == 1:
            return self
        num = num_ranks // 2 if parallel == "hsdp" else num_ranks  # each half of a machine's GPUs holds a whole model
        # Two blocks at a time: the one that is computed, and the one that is gathered or whose gradients are summed
        # meanwhile. The embedding and the head stay gathered from the beginning of a forward pass.
        weights = self.weights if parallel == "zero2" else self.ends + 2 * self.layer
        return replace(
            self,
            weights=self.weights // num,
            gradients=self.gradients // num,
            optimizer=self.optimizer // num,
            host=self.host // num,
            scratch=self.scratch // num,
            gathered=weights + self.ends + 2 * self.layer,
        )


@dataclass(frozen=True)
class Fit:
    """The result for one GPU: whether the phase fits, the largest micro-batch, and what to lower if it does not fit."""

    gpu: Gpu
    peak_bytes: int  # at the micro-batch that would be used on this GPU
    usable_bytes: int
    micro_batch: int  # number of rows per forward pass on this GPU; 0 if not even one row fits
    most_rows: int
    is_fitting: bool
    lower: str = ""
    parallel: str = "ddp"  # how several GPUs hold the model


def training_memory(run: Run, phase: Phase | None = None, *, has_bf16: bool = True) -> Memory:
    """Estimate the memory of one phase, by default the first.

    With train.precision auto, the precision depends on whether the GPU supports bf16 (`has_bf16`).
    """
    phase = phase or run.phases[0]
    precision = run.train.precision
    if precision == "auto":
        precision = "bf16" if has_bf16 else "fp32"
    memory = memory_of(
        run.model, phase.optimizer.kind, precision=precision, states=phase.optimizer.states, method=phase.method,
        lora=phase.lora, recompute=phase.recompute, rl=phase.rl, offload=phase.offload,
        prompt=prompt_tokens(run.model, phase.rl, is_open=run.base is not None) if phase.rl else 0,
    )  # fmt: skip
    # Memory for train.graphs: auto is not counted, because `auto` does not capture graphs if memory is short.
    return replace(memory, is_pass_kept=run.train.graphs == "on")


def rank_memories(run: Run, phase: Phase, *, has_bf16: bool = True) -> dict[str, Memory]:
    """Return train.parallel -> the memory of one GPU, for each way in which the trainer may divide the model.

    With `auto` it takes the first that fits. They are sorted by how little they communicate.
    """
    memory, asked, num = training_memory(run, phase, has_bf16=has_bf16), run.train.parallel, run.cloud.num_gpus
    can_divide = num > 1 and phase.method == "full" and phase.kind != "rl" and phase.optimizer.states == "fp32"
    kinds = [asked] if asked != "auto" else ["ddp", "zero2", "zero3"]
    return {kind: memory.divided(kind, num) for kind in (kinds if can_divide else ["ddp"])}


def memory_of(
    model: Model,
    optimizer: str,
    *,
    precision: str,
    states: str = "fp32",
    method: str = "full",
    lora: Lora | None = None,
    recompute: str = "none",
    rl: Rl | None = None,
    prompt: int = 0,
    offload: str = "none",
) -> Memory:
    """Estimate the memory of one phase.

    `prompt`: token count of the longest rl question; 0 to estimate it from the task kinds.
    """
    size = FP32 if precision == "fp32" else BF16
    padded_vocab = round_up(model.vocab_size, 64)
    table = {part.name: part.num_params for part in parameter_table(model)}
    head = padded_vocab * model.width
    num_params = sum(table.values()) + (head - model.vocab_size * model.width) * (1 if model.is_tied else 2)
    blocks = sum(table[name] for name in ("attention q", "attention k, v", "attention out", "feed-forward"))
    adapters = adapter_params(model, lora) if lora else 0
    trained = num_params if method == "full" else adapters
    muon = blocks if optimizer == "muon" and method == "full" else 0
    moment = INT8 if states == "int8" else FP32
    again = RECOMPUTED_OF[recompute]
    row = row_tokens(model, rl, prompt) if rl else model.context
    per_layer = row * layer_bytes(model, size, is_fp8=precision == "fp8", lora=lora)
    kept_input = row * model.width * size
    state, is_away = int(FP32 * muon + 2 * moment * (trained - muon)), offload == "optimizer"
    scratch = MUON_SCRATCH_BYTES * _largest_group(table) if muon else 0
    ends = row * (4 * model.width * size + 8)  # embedding, final norm, the gradient of the loss, ids, targets
    training = Memory(
        weights=_weight_bytes(method, size, table, num_params, blocks) + FP32 * adapters,
        gradients=FP32 * trained,
        optimizer=0 if is_away else state,
        copies=_copy_bytes(model, method, precision, blocks=blocks, head=head, lora=lora, again=again),
        activations_per_row=int(model.num_layers * ((1.0 - again) * per_layer + again * kept_input) + ends),
        logits_per_row=row * padded_vocab * size,
        logits_most=PIECE_LOGITS * size,
        head_gradient=FP32 * head if method == "full" else 0,
        scratch=scratch + (_loads_bytes(table, muon, moment, state) if is_away else 0),
        host=state if is_away else 0,
        layer=FP32 * blocks // model.num_layers if method == "full" else 0,
        ends=FP32 * (num_params - blocks) if method == "full" else 0,
        # One whole recomputed block, plus the gradients at its widest point.
        block_per_row=per_layer + row * size * (3 * model.ffn_width + 4 * model.width) if again else 0,
    )
    if rl is None:
        return training
    # rl samples from the weights themselves if they are in fp32 or frozen (with adapters); otherwise it needs a copy.
    lean = size * num_params * ((size != FP32) + bool(rl.kl)) if method == "full" else FP32 * adapters * bool(rl.kl)
    return _with_sampling(training, model, rl, size, lean, prompt, copies=0 if method == "full" else training.copies)


def _with_sampling(training: Memory, model: Model, rl: Rl, size: int, lean: int, prompt: int, *, copies: int) -> Memory:
    """Add to `training` the memory that rl needs to sample and to compute log-probabilities.

    `copies`: size of the copies that a forward pass makes even without gradients (adapters in the compute type,
    dequantized matrices).
    """
    prompt = prompt or prompt_tokens(model, rl)
    rows, places = rows_at_a_time(rl), round_up(prompt + rl.max_new_tokens, REACH)
    reading = cache_bytes(model, rows // rl.samples_per_prompt, prompt, size)
    looking_back = 0
    if rl.kl or rl.updates_per_rollout > 1:  # activations of one layer, and logits in fp32 and compute type
        tokens = min(LOOKED_BACK_TOKENS, num_rows(rl) * row_tokens(model, rl, prompt))
        looking_back = tokens * size * (4 * model.width + 3 * model.ffn_width)
        looking_back += min(PIECE_LOGITS, tokens * model.vocab_size) * (FP32 + size)
    return replace(
        training,
        lean=lean,
        rollout=cache_bytes(model, rows, places, size)
        + SAMPLED_LOGIT_BYTES * rows * round_up(model.vocab_size, 64)
        + copies,
        is_rollout_kept=rl.graphs != "off",
        passing=max(reading, looking_back + copies),
    )


def _weight_bytes(method: str, size: int, table: dict[str, int], num_params: int, blocks: int) -> int:
    """Return the bytes of the stored weights.

    Frozen norms and biases stay in fp32; with NF4 blocks, the frozen embedding and head are in bf16.
    """
    if method == "full":
        return FP32 * num_params
    small = sum(table.get(name, 0) for name in ("norms", "attention norms", "attention bias"))
    wide = num_params - blocks - small
    return FP32 * small + (size * (blocks + wide) if method == "lora" else int(NF4 * blocks) + BF16 * wide)


def _copy_bytes(
    model: Model, method: str, precision: str, *, blocks: int, head: int, lora: Lora | None, again: float
) -> int:
    """Return the bytes of the copies used in matrix multiplications.

    Of the recomputed blocks, only one is counted, because blocks are recomputed one at a time.
    """
    alive = min(1.0, 1.0 - again + 1 / model.num_layers)
    if method == "full":
        # FP8 keeps two copies of each matrix: the matrix cast to FP8, and its transpose.
        of_blocks = {"fp32": 0, "bf16": BF16 * blocks, "fp8": 2 * FP8 * blocks}[precision]
        return int(alive * of_blocks) + (BF16 * head if precision != "fp32" else 0)
    size, largest = FP32 if precision == "fp32" else BF16, model.width * model.ffn_width
    adapters = adapter_params(model, lora) if lora else 0
    dequantised = size * largest if method == "qlora" else 0
    norms = 2 * FP32 * largest if lora and lora.is_dora else 0  # the fp32 weight, both without and with its adapter
    return int(alive * size * adapters) + dequantised + norms


def layer_bytes(model: Model, size: int, *, is_fp8: bool, lora: Lora | None) -> int:
    """Return the bytes per token that one layer keeps for the backward pass, in either model family."""
    d, queries, keys = model.width, model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    is_swift = model.family == "swift"
    stream = (3 if is_swift else 2) * d  # residual streams; swift keeps one more to mix in the initial stream
    inputs = 2 * d  # outputs of the two norms, which are inputs of matrix multiplications
    heads = 2 * queries + 3 * keys + queries  # q, k, v as projected, q and k after RoPE, and the output of attention
    # In swift, every second layer keeps its value embeddings and their sum with v: one tensor per layer on average.
    heads += keys if is_swift else 0
    up = (1 if is_swift else 2) * model.ffn_width  # before the activation
    down = model.ffn_width  # after the activation: the input of a matrix multiplication
    if lora:  # a frozen matrix keeps its input only if it has an adapter, which also keeps its low-rank activation
        chosen = set(LORA_TARGETS if "all" in lora.targets else lora.targets)
        inputs = d * bool(chosen & {"q", "k", "v"}) + d * bool(chosen & {"gate", "up"}) + lora.rank * len(chosen)
        down = model.ffn_width if "down" in chosen else 0
        if lora.is_dora:  # DoRA also keeps each output in its unscaled form
            outs = {"q": queries, "k": keys, "v": keys, "o": d, "down": d}
            outs |= {"gate": model.ffn_width, "up": model.ffn_width}
            inputs += sum(outs[name] for name in chosen)
    if is_fp8:  # matmul inputs are kept in FP8, and the attention output is also kept in the compute type
        return size * (stream + heads + up) + FP8 * (inputs + queries + down)
    return size * (stream + inputs + heads + up + down)


def _largest_group(table: dict[str, int]) -> int:
    """Return the number of parameters in the largest group of matrices that Muon updates together.

    A group contains the matrices of one shape: gate and up (swift: up), or q and out.
    """
    return max(table["feed-forward"] * 2 // 3, table["attention q"] + table["attention out"])


def _loads_bytes(table: dict[str, int], muon: int, moment: float, state: int) -> int:
    """Return how many bytes of offloaded state are on the GPU at the same time.

    Muon's groups are loaded whole, largest first; the next group is loaded while the current one is updated.
    """
    stretch = int(2 * moment * AT_A_TIME)
    if not muon:
        return min(state, LOADS * stretch)
    largest = _largest_group(table)
    return min(state, FP32 * largest + max(FP32 * min(largest, muon - largest), stretch))


def fits(run: Run, phase: Phase | None = None, gpus: dict[str, Gpu] | None = None) -> list[Fit]:
    """Return a Fit for every known GPU, smallest memory first."""
    phase = phase or run.phases[0]
    known = sorted((gpus or GPUS).values(), key=lambda gpu: (gpu.memory_gib, gpu.name))
    return [_fit(run, phase, gpu) for gpu in known]


def fits_every_phase(run: Run, gpus: dict[str, Gpu] | None = None) -> list[Fit]:
    """Return a Fit for every known GPU: of the first phase that does not fit, else of the one with the highest peak."""
    found = []
    for each in zip(*(fits(run, phase, gpus) for phase in run.phases), strict=True):
        highest = max(each, key=lambda fit: fit.peak_bytes)
        found.append(next((fit for fit in each if not fit.is_fitting), highest))
    return found


def _fit(run: Run, phase: Phase, gpu: Gpu) -> Fit:
    usable = int(gpu.memory_gib * 2**30 * USABLE)
    rows = num_rows(phase.rl) if phase.rl else phase.batch_tokens // run.model.context
    rows = rows // run.cloud.num_gpus if rows % run.cloud.num_gpus == 0 else rows  # those of one GPU
    memories = rank_memories(run, phase, has_bf16=gpu.has_bf16)
    most = {kind: _most_rows(memory, usable, rows) for kind, memory in memories.items()}
    parallel = next((kind for kind, num in most.items() if num >= max(1, phase.micro_batch)), list(memories)[-1])
    memory, most_rows = memories[parallel], most[parallel]
    used = phase.micro_batch or most_rows
    lower = ""
    if run.train.precision == "bf16" and not gpu.has_bf16:
        lower = "train.precision: the GPU has no bf16, use auto or fp32"
    elif run.train.precision == "fp8" and not gpu.has_fp8:
        lower = "train.precision: the GPU has no fp8, use auto or bf16"
    elif most_rows == 0:
        lower = _what_to_shrink(run, phase, gpu, usable)
    elif phase.micro_batch > most_rows:
        lower = f"phases.{run.phases.index(phase)}.micro_batch to {most_rows}"
    return Fit(
        gpu=gpu,
        peak_bytes=memory.peak(max(1, used)),
        usable_bytes=usable,
        micro_batch=used if most_rows else 0,
        most_rows=most_rows,
        is_fitting=not lower,
        lower=lower,
        parallel=parallel,
    )


def _most_rows(memory: Memory, usable: int, rows: int) -> int:
    """Return the largest divisor of the batch's rows that fits. Gradient accumulation needs whole micro-batches."""
    divisors = [n for n in range(1, int(rows**0.5) + 1) if rows % n == 0]
    for n in sorted({*divisors, *(rows // n for n in divisors)}, reverse=True):
        if memory.peak(n) <= usable:
            return n
    return 0


def _what_to_shrink(run: Run, phase: Phase, gpu: Gpu, usable: int) -> str:
    """Suggest what to lower when not even one row fits, cheapest change first.

    The order: fewer rl samples at a time, recompute, optimizer offload, both, qlora, half (a quarter, ...) of the
    context, and finally the model itself.
    """
    number = run.phases.index(phase)
    if fewer := _fewer_rollout_rows(run, phase, gpu, usable):
        return f"phases.{number}.rl.rollout_rows to {fewer}"
    again, away = f"phases.{number}.recompute to all", f"phases.{number}.offload to optimizer"
    ways: list[tuple[str, dict[str, Any]]] = [
        (again, {"recompute": "all"}),
        (away, {"offload": "optimizer"}),
        (f"{again} and {away}", {"recompute": "all", "offload": "optimizer"}),
        (f"phases.{number}.method to qlora", {"recompute": "all", "method": "qlora"}),
    ]
    for text, changes in ways:
        smaller = replace(phase, **changes)
        if _is_change(phase, changes) and _least_peak(run, smaller, gpu) <= usable:
            return text
    context = run.model.context // 2
    while context >= 64:
        shorter = replace(run, model=replace(run.model, context=context))
        if _least_peak(shorter, phase, gpu) <= usable:
            return f"model.context to {context}"
        context //= 2
    return "model.layers or model.width: no context is short enough"


def _least_peak(run: Run, phase: Phase, gpu: Gpu) -> int:
    return min(memory.peak(1) for memory in rank_memories(run, phase, has_bf16=gpu.has_bf16).values())


def _is_change(phase: Phase, changes: dict[str, Any]) -> bool:
    """Return True if these settings, suggested to save memory, can be applied to this phase and would change it.

    Optimizer offload applies only to method full, because adapters have little optimizer state. Switching to qlora
    applies only to method lora.
    """
    if "method" in changes:
        return phase.method == "lora"
    is_possible = "offload" not in changes or phase.method == "full"
    return is_possible and all(getattr(phase, name) != value for name, value in changes.items())


def _fewer_rollout_rows(run: Run, phase: Phase, gpu: Gpu, usable: int) -> int:
    """Return the number of rollout rows, in whole groups, halved until they fit; 0 if none fit or without rl."""
    rl = phase.rl
    prompts = rows_at_a_time(rl) // rl.samples_per_prompt if rl else 0
    while rl and prompts > 1:
        prompts //= 2
        smaller = replace(phase, rl=replace(rl, rollout_rows=prompts * rl.samples_per_prompt))
        if training_memory(run, smaller, has_bf16=gpu.has_bf16).peak(1) <= usable:
            return prompts * rl.samples_per_prompt
    return 0
