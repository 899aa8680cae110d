"""Loss on held-out conversations: nats of what the assistant says, read through the model's own chat template.

    file -> the data doctor -> ids and mask (`lm/chat`) -> nats of the masked tokens -> sums over conversations

The tokens that count are those that SFT learns from: the assistant's words and the marker that ends its turn. A line
that the doctor finds fault with stops the measure, with its number; what is merely too long is cut, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from homing.errors import DataError
from homing.lm.chat.doctor import Doctor, Kept
from homing.lm.chat.render import Renderer, need_template
from homing.lm.chat.template import find_template
from homing.lm.chat.tokens import ChatTokens
from homing.lm.evals.likelihood import Row, score_rows
from homing.lm.evals.result import Measured, Score, joint_sha256
from homing.lm.model import Decoder
from homing.lm.text.find import find_sources
from homing.lm.tokenizer import Tokenizer

__all__ = ["measure_conversations"]

_MOST_TOLD = 20


def measure_conversations(
    model: Decoder, tokenizer: Tokenizer, patterns: Sequence[str], folder: Path,
    *, at_most: int = 0, tell: Callable[[str], None] = lambda done: None,
) -> Measured:  # fmt: skip
    """`folder` holds the model, and with it the chat template."""
    renderer = Renderer(need_template(find_template(folder), str(folder)), ChatTokens(folder))
    doctor = Doctor(renderer, context=model.shape.context)
    sources = find_sources(patterns, key="chat").sources
    kept = [one for source in sources for one in doctor.examine(source, "val")]
    _refuse_faults(doctor)
    kept = kept[: at_most or None]
    if not kept:
        raise DataError(
            what="There is no conversation to measure on.",
            why=f"{', '.join(patterns)}: not one answer fits the context of {model.shape.context:,} tokens.",
            fix="Name other conversations: --chat FILE.jsonl",
        )
    sums = _sums(model, tokenizer, kept, tell)
    nats, tokens, text_nats, num_bytes = sums.T
    what = f"{len(kept):,} conversations"
    scores = [
        Score("nats_per_token", nats, tokens, what, by_tokenizer=True),
        Score("perplexity", nats, tokens, what, is_exp=True, by_tokenizer=True, is_compared=False),
        Score("bits_per_byte", text_nats / math.log(2), num_bytes, what),
    ]
    num_cut = sum(file.num_cut for file in doctor.files)
    num_skipped = sum(file.num_skipped for file in doctor.files)
    notes = [f"{num_cut} conversations were cut at the last answer that fits."] if num_cut else []
    notes += [f"{num_skipped} lines were left out: twice there, or not one answer fits."] if num_skipped else []
    counts = {"conversations": len(kept), "tokens": int(tokens.sum()), "cut": num_cut, "skipped": num_skipped}
    name = ", ".join(Path(source.path).name for source in sources)
    sha256s = [file.sha256 for file in doctor.files]
    sha256 = sha256s[0] if len(sha256s) == 1 else joint_sha256(sha256s)
    return Measured(name, "conversations", scores, counts, sha256, {"at_most": at_most}, notes)


def _sums(model: Decoder, tokenizer: Tokenizer, kept: list[Kept], tell: Callable[[str], None]) -> np.ndarray:
    """Of each conversation: nats, tokens, nats of those that are text, bytes."""
    bytes_of = np.array(tokenizer.token_bytes(), dtype=np.int64)
    examples = [(number, example) for number, one in enumerate(kept) for example in one.examples]
    rows = (Row(example.ids.tolist(), example.mask) for _, example in examples)
    sums = np.zeros((len(kept), 4))
    for scored, (number, example) in zip(score_rows(model, rows, tell=tell), examples, strict=True):
        sizes = bytes_of[example.ids[1:][example.mask[1:]]]
        sums[number] += [scored.nats.sum(), len(scored.nats), scored.nats[sizes > 0].sum(), sizes.sum()]
    return sums


def _refuse_faults(doctor: Doctor) -> None:
    if not doctor.num_faults:
        return
    faults = (finding for finding in doctor.findings if finding.is_fault)
    told = [f"{fault.path}:{fault.line}: {fault.text}" for fault in islice(faults, _MOST_TOLD)]
    more = [f"and {doctor.num_faults - len(told)} more."] if doctor.num_faults > len(told) else []
    lines = "1 line is" if doctor.num_faults == 1 else f"{doctor.num_faults} lines are"
    raise DataError(
        what=f"These conversations cannot be measured on: {lines} wrong.",
        why="\n".join(told + more),
        fix="Mend these lines or take them out.",
    )
