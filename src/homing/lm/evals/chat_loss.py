"""Computes loss on held-out conversations: nats of the assistant's text, rendered with the model's own chat template.

    file -> check of every line -> ids and mask (`lm/data/chat`) -> nats of the target tokens -> sums over conversations
    shards held out by `homing prep` -> ids and mask -> the same; works only with the tokenizer that encoded the shards

The tokens counted are those that SFT trains on: the assistant's text and the marker that ends its turn. An invalid
line stops the evaluation with an error that gives the line number. Conversations that are merely too long are
truncated, and the report says how many were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from homing.errors import DataError
from homing.find_source_files import find_sources
from homing.lm.data.chat.check_chats import Doctor
from homing.lm.data.chat.render import ChatTokens, Renderer, need_template
from homing.lm.data.chat.template import find_template
from homing.lm.data.shards.pack_chats import open_conversations
from homing.lm.data.shards.read_shards import file_sha256, read_manifest
from homing.lm.evals.eval_result import Measured, Score, joint_sha256
from homing.lm.evals.likelihood import Row, score_rows
from homing.lm.model import Decoder
from homing.lm.tokenizer import Tokenizer
from homing.wire import file_names

__all__ = ["measure_conversations", "measure_held_out"]

_MAX_LISTED = 20


def measure_conversations(
    model: Decoder, tokenizer: Tokenizer, patterns: Sequence[str], folder: Path,
    *, at_most: int = 0, notify: Callable[[str], None] = lambda done: None,
) -> Measured:  # fmt: skip
    """Evaluate on chat files. `folder` contains the model and its chat template."""
    renderer = Renderer(need_template(find_template(folder), str(folder)), ChatTokens(folder))
    doctor = Doctor(renderer, context=model.shape.context)
    sources = find_sources(patterns, key="chat").sources
    kept = [one for source in sources for one in doctor.examine(source, "val")]
    _refuse_faults(doctor)
    kept = kept[: at_most or None]
    if not kept:
        raise DataError(
            what="No conversations to evaluate on.",
            why=f"No answer in {', '.join(patterns)} fits in the context of {model.shape.context:,} tokens.",
            fix="Use other conversations: --chat FILE.jsonl",
        )
    rows = [[Row(example.ids.tolist(), example.mask) for example in one.examples] for one in kept]
    scores, num_tokens = _scores(model, tokenizer, rows, notify)
    num_cut = sum(file.num_cut for file in doctor.files)
    num_skipped = sum(file.num_skipped for file in doctor.files)
    notes = [f"{num_cut} conversations were truncated after the last answer that fits the context."] if num_cut else []
    notes += (
        [f"{num_skipped} lines were skipped, because they are duplicates or none of their answers fits in the context."]
        if num_skipped
        else []
    )
    counts = {"conversations": len(kept), "tokens": num_tokens, "cut": num_cut, "skipped": num_skipped}
    name = ", ".join(Path(source.path).name for source in sources)
    sha256s = [file.sha256 for file in doctor.files]
    sha256 = sha256s[0] if len(sha256s) == 1 else joint_sha256(sha256s)
    return Measured(name, "conversations", scores, counts, sha256, {"at_most": at_most}, notes)


def measure_held_out(
    model: Decoder, tokenizer: Tokenizer, data_dir: Path, run_name: str, folder: Path,
    *, at_most: int = 0, notify: Callable[[str], None] = lambda done: None,
) -> Measured:  # fmt: skip
    """Evaluate on the conversations that `homing prep` held out for a phase and stored in the phase's shards."""
    manifest = read_manifest(data_dir)
    if manifest.tokenizer_sha256 != file_sha256(folder / file_names.TOKENIZER):
        raise DataError(
            what=f"The conversations held out for {run_name} were not encoded with the tokenizer in {folder}.",
            why=f"{data_dir} was prepared with a different tokenizer.",
            fix="Evaluate on the original chat file instead: --chat FILE.jsonl",
        )
    split = open_conversations(data_dir, manifest, "val")
    count = min(at_most or len(split.lengths), len(split.lengths))
    read = (split.read(number) for number in range(count))
    rows = [[Row(ids.tolist(), mask.astype(bool) & (np.arange(len(mask)) > 0))] for ids, mask in read]
    scores, num_tokens = _scores(model, tokenizer, rows, notify)
    sha256 = joint_sha256(shard.sha256 for shard in manifest.splits["val"].shards)
    counts = {"conversations": count, "tokens": num_tokens}
    return Measured(f"conversations held out for {run_name}", "conversations", scores, counts, sha256)


def _scores(
    model: Decoder, tokenizer: Tokenizer, conversations: list[list[Row]], notify: Callable[[str], None]
) -> tuple[list[Score], int]:
    """Return the scores, and the number of assistant tokens. A conversation may have several rows, one per answer."""
    bytes_of = np.array(tokenizer.token_bytes(), dtype=np.int64)
    rows = [(number, row) for number, each in enumerate(conversations) for row in each]
    sums = np.zeros((len(conversations), 4))  # columns: nats, tokens, nats of text tokens, bytes
    for scored, (number, row) in zip(score_rows(model, (row for _, row in rows), notify=notify), rows, strict=True):
        sizes = bytes_of[np.array(row.ids)[row.is_target]]
        sums[number] += [scored.nats.sum(), len(scored.nats), scored.nats[sizes > 0].sum(), sizes.sum()]
    nats, tokens, text_nats, num_bytes = sums.T
    what = f"{len(conversations):,} conversations"
    scores = [
        Score("nats_per_token", nats, tokens, what, by_tokenizer=True),
        Score("perplexity", nats, tokens, what, is_exp=True, by_tokenizer=True, is_compared=False),
        Score("bits_per_byte", text_nats / math.log(2), num_bytes, what),
    ]
    return scores, int(tokens.sum())


def _refuse_faults(doctor: Doctor) -> None:
    if not doctor.num_faults:
        return
    faults = (finding for finding in doctor.findings if finding.is_fault)
    listed = [f"{fault.path}:{fault.line}: {fault.text}" for fault in islice(faults, _MAX_LISTED)]
    more = [f"and {doctor.num_faults - len(listed)} more."] if doctor.num_faults > len(listed) else []
    lines = "1 line is" if doctor.num_faults == 1 else f"{doctor.num_faults} lines are"
    raise DataError(
        what=f"Cannot evaluate on these conversations: {lines} invalid.",
        why="\n".join(listed + more),
        fix="Fix or remove these lines.",
    )
