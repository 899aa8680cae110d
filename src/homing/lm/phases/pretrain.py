"""Pretraining: every token of the train split is a target. Evaluation measures bits per byte on the val split.

A row may contain several documents, with no attention mask between them; each document begins with <|endoftext|>.

    R * T + 1 consecutive tokens  ->  R rows of T tokens: ids [0, RT), targets [1, RT]

Each rank takes consecutive rows of the step, so that all ranks together see the same tokens as a single rank would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from homing.errors import DataError, UsageError
from homing.lm.data.shards.pack_text import PackedStream, check_ids
from homing.lm.data.shards.read_shards import TokenSplit, open_split, read_manifest
from homing.lm.evals.bits_per_byte import Evaluation, evaluate
from homing.lm.model import Decoder
from homing.lm.tokenizer import load_tokenizer
from homing.lm.train.compute.batch import Batch, Feed
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.wire import file_names
from homing.wire.run_json import Phase, Run

__all__ = ["Pretrain", "TextRows"]

# Number of tokens evaluated at a time: enough to keep a GPU busy. Evaluation keeps no activations for gradients, so it
# can process more rows at a time than training.
_EVAL_TOKENS_AT_A_TIME = {"cuda": 65536, "mps": 16384, "cpu": 4096}


class Pretrain:
    evaluates_together = True

    def __init__(self, run: Run, phase: Phase, data_dir: Path) -> None:
        context = run.model.context
        if phase.batch_tokens % context or phase.batch_tokens <= 0:
            raise UsageError(
                what=f"A batch of {phase.batch_tokens:,} tokens cannot be split into whole rows of {context:,} tokens.",
                why="A step always trains on whole rows, so that no token is lost or repeated.",
                fix=f"Set batch_tokens to a multiple of {context}, such as "
                f"{max(1, round(phase.batch_tokens / context)) * context}.",
            )
        self._context, self._vocab_size = context, run.model.vocab_size
        self._num_eval_tokens = phase.eval_tokens
        self.rows_per_step = phase.batch_tokens // context
        manifest = read_manifest(data_dir)
        if run.data.tokenizer_sha256 and manifest.tokenizer_sha256 != run.data.tokenizer_sha256:
            raise DataError(
                what=f"The text in {data_dir} was encoded with a different tokenizer.",
                why=f"That tokenizer has the sha256 {manifest.tokenizer_sha256[:12]}..., but the run uses "
                f"{run.data.tokenizer_sha256[:12]}...",
                fix="Prepare the text again: homing prep RUN",
            )
        self._stream = PackedStream(open_split(data_dir, manifest, "train"), seed=run.seed)
        held_out = manifest.splits.get("val")
        # Evaluation needs at least two tokens, because the first token is never a target.
        self.can_evaluate = held_out is not None and held_out.num_tokens > 1
        self._val: TokenSplit | None = open_split(data_dir, manifest, "val") if self.can_evaluate else None
        self._token_bytes = load_tokenizer(data_dir / file_names.TOKENIZER).token_bytes()

    def open_batches(
        self, model: Decoder, *, first_row: int, device: torch.device, rank: int = 0, num_ranks: int = 1
    ) -> Feed:
        rows = TextRows(
            self._stream, rows_per_step=self.rows_per_step, context=self._context, vocab_size=self._vocab_size,
            rank=rank, num_ranks=num_ranks,
        )  # fmt: skip
        return Feed(rows, first_row=first_row, rows_per_step=self.rows_per_step, device=device)

    def evaluate(self, model: Decoder, notify: Callable[[int, int], None], ranks: Ranks = ALONE) -> Evaluation:
        assert self._val is not None, "evaluated without held-out text; check can_evaluate first"
        return evaluate(
            model,
            self._val,
            token_bytes=self._token_bytes,
            num_tokens=self._num_eval_tokens,
            rows_at_a_time=max(1, _EVAL_TOKENS_AT_A_TIME[model.device.type] // self._context),
            notify=notify,
            ranks=ranks,
        )


class TextRows:
    """The rows that one rank reads: its share of the `rows_per_step` rows of each step."""

    def __init__(
        self, stream: PackedStream, *, rows_per_step: int, context: int, vocab_size: int, rank: int, num_ranks: int
    ) -> None:
        self.name = f"split {stream.split.name!r}"
        self._stream, self._vocab_size = stream, vocab_size
        self._rows = rows_per_step // num_ranks
        self._context, self._rank = context, rank
        self._num_targets = rows_per_step * context

    def host_shape(self) -> tuple[int, ...]:
        return (self._rows * self._context + 1,)

    def read_into(self, first_row: int, host: Tensor) -> int:
        ids = host.numpy()
        self._stream.read_into((first_row + self._rank * self._rows) * self._context, ids)
        check_ids(ids, self._vocab_size, self._stream.split.name)
        return self._num_targets

    def to_batch(self, device_tensor: Tensor, num_targets: int) -> Batch:
        tokens, shape = device_tensor.long(), (self._rows, self._context)
        return Batch(tokens[:-1].view(shape), tokens[1:].view(shape), num_targets)
