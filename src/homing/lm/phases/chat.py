"""Training on conversations: only assistant tokens are targets, and packed conversations cannot attend to each other.

Evaluation measures the loss on held-out conversations, counting only the assistant's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homing.errors import DataError, UsageError
from homing.lm.data.shards.pack_chats import IGNORED, PackedConversations, mixture_of, open_conversations
from homing.lm.data.shards.pack_text import check_ids
from homing.lm.data.shards.read_shards import read_manifest
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model import Decoder
from homing.lm.train.compute.batch import Batch, Feed
from homing.lm.train.distributed.ranks import ALONE, Ranks
from homing.wire.run_json import Phase, Run
from homing.wire.shard_manifest import DataManifest

__all__ = ["Chat"]

_EVAL_TOKENS_AT_A_TIME = {"cuda": 32768, "mps": 8192, "cpu": 4096}
_REPORT_EVERY_S = 20.0
# Rows are packed with the longest conversations first, so evaluating only the first rows would be biased. Therefore
# the order of the validation rows, like that of the training rows, is random, with this fixed seed.
_VAL_SEED = 0


class Chat:
    evaluates_together = True

    def __init__(self, run: Run, phase: Phase, data_dir: Path) -> None:
        self._context, self._vocab_size = run.model.context, run.model.vocab_size
        if phase.batch_tokens % self._context or phase.batch_tokens <= 0:
            raise UsageError(
                what=f"A batch of {phase.batch_tokens:,} tokens cannot be split"
                f" into whole rows of {self._context:,} tokens.",
                why="A step always trains on whole rows of packed conversations.",
                fix=f"Set batch_tokens to a multiple of {self._context}.",
            )
        self.rows_per_step = phase.batch_tokens // self._context
        manifest = read_manifest(data_dir)
        if run.data.tokenizer_sha256 and manifest.tokenizer_sha256 != run.data.tokenizer_sha256:
            raise DataError(
                what=f"The conversations in {data_dir} were encoded with a different tokenizer.",
                why=f"That tokenizer has the sha256 {manifest.tokenizer_sha256[:12]}..., but the run uses "
                f"{run.data.tokenizer_sha256[:12]}...",
                fix="Prepare the conversations again: homing prep RUN",
            )
        self._rows = self._packed(data_dir, manifest, "train", seed=run.seed)
        if not self._rows.num_rows():
            raise DataError(
                what=f"There are no conversations to train on in {data_dir}.",
                why="Either no conversation is usable, or all of them are held out for evaluation.",
                fix="Find out what is wrong with each line: homing data check",
            )
        held_out = manifest.splits.get("val")
        self.can_evaluate = held_out is not None and held_out.num_documents > 0
        self._val = self._packed(data_dir, manifest, "val", seed=_VAL_SEED) if self.can_evaluate else None
        self._most_val_rows = max(1, phase.eval_tokens // self._context)

    def _packed(self, data_dir: Path, manifest: DataManifest, split: str, seed: int) -> PackedConversations:
        conversations = open_conversations(data_dir, manifest, split)
        return PackedConversations(conversations, mixture_of(manifest, split), context=self._context, seed=seed)

    def open_batches(
        self, model: Decoder, *, first_row: int, device: torch.device, rank: int = 0, num_ranks: int = 1
    ) -> Feed:
        rows = _ChatRows(self._rows, self.rows_per_step, self._vocab_size, rank, num_ranks)
        return Feed(rows, first_row=first_row, rows_per_step=self.rows_per_step, device=device)

    @torch.no_grad()
    def evaluate(self, model: Decoder, notify: Callable[[int, int], None], ranks: Ranks = ALONE) -> Evaluation:
        assert self._val is not None, "evaluated without held-out conversations; check can_evaluate first"
        num_rows = min(self._val.num_rows(), self._most_val_rows)
        at_a_time = max(1, _EVAL_TOKENS_AT_A_TIME[model.device.type] // self._context)
        at_a_time = max(1, min(at_a_time, -(-num_rows // ranks.count)))
        nats, count, reported_at = 0.0, 0, time.monotonic()
        for number, is_counted in ranks.turns(-(-num_rows // at_a_time)):
            first = number * at_a_time
            host = np.empty((3, min(at_a_time, num_rows - first), self._context), dtype=np.int32)
            count += is_counted * _read(self._val, first, host, self._vocab_size, "val")
            ids_BT, targets_BT, segments_BT = torch.from_numpy(host).to(model.device).unbind()
            losses_BT = model.token_losses(ids_BT.long(), targets_BT.long(), segments=segments_BT)
            nats += is_counted * float(losses_BT.double().sum())
            if time.monotonic() - reported_at > _REPORT_EVERY_S:
                notify(first + len(host[0]), num_rows)
                reported_at = time.monotonic()
        nats, total = ranks.sums([nats, count])
        count = int(total)
        # `exam` identifies the rows that were evaluated, because only losses on the same rows are comparable. It is
        # empty if all validation rows were evaluated.
        exam = f"{num_rows} rows drawn" if num_rows < self._val.num_rows() else ""
        return Evaluation(loss=nats / max(1, count), bits_per_byte=None, num_tokens=count, exam=exam)


class _ChatRows:
    """The rows of one rank. Each rank reads the rows of all ranks in order to count the targets in the whole step."""

    name = "the conversations"

    def __init__(
        self, rows: PackedConversations, rows_per_step: int, vocab_size: int, rank: int, num_ranks: int
    ) -> None:
        self._rows, self._vocab_size = rows, vocab_size
        self._step_NRT = np.empty((3, rows_per_step, rows.context), dtype=np.int32)  # ids, targets, segments
        share = rows_per_step // num_ranks
        self._mine = slice(rank * share, (rank + 1) * share)

    def host_shape(self) -> tuple[int, ...]:
        return self._step_NRT[:, self._mine].shape

    def read_into(self, first_row: int, host: Tensor) -> int:
        num_targets = _read(self._rows, first_row, self._step_NRT, self._vocab_size, "train")
        host.numpy()[:] = self._step_NRT[:, self._mine]
        return num_targets

    def to_batch(self, device_tensor: Tensor, num_targets: int) -> Batch:
        ids_RT, targets_RT, segments_RT = device_tensor.unbind()
        return Batch(ids_RT.long(), targets_RT.long(), num_targets, segments_RT=segments_RT)


def _read(
    rows: PackedConversations, first_row: int, ids_targets_segments: NDArray[np.int32], vocab_size: int, split: str
) -> int:
    """Read consecutive rows into `ids_targets_segments`; return the number of unmasked targets.

    Both ids and targets are range-checked, because the last token of a conversation occurs only as a target.
    """
    ids, targets, segments = ids_targets_segments
    num_targets = rows.read_into(first_row, ids, targets, segments)
    check_ids(ids, vocab_size, split)
    check_ids(np.where(targets == IGNORED, 0, targets), vocab_size, split)
    return num_targets
