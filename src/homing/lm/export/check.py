"""An export is proven before it is called done, by a reader that is not ours.

    logits     transformers on the exported files against the trainer's decoder, on random ids and on text
    ids        its tokenizer against ours, on awkward text
    chats      its apply_chat_template against our renderer, on random conversations

The trainer's side is computed first and let go, so that the two models are never in memory together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from homing.errors import IntegrityError
from homing.lm.chat.messages import Conversation, Fault
from homing.lm.chat.render import Renderer
from homing.lm.chat.tokens import ChatTokens
from homing.lm.export.opened import Opened
from homing.lm.generate.load import whose_template
from homing.lm.model import Decoder
from homing.lm.tokenizer.encode import AWKWARD
from homing.wire import names

__all__ = ["MOST_GAP", "Expected", "Proof", "expect", "need_template", "prove"]

MOST_GAP = 1e-3  # between logits, fp32 against fp32
NUM_ROWS, ROW = 4, 64
NUM_CHATS = 40
QWEN2_NOTE = (
    "AutoTokenizer of transformers 5 reads every qwen2 folder with Qwen2's own split of digits, which is not this "
    "model's. Open its tokenizer with PreTrainedTokenizerFast.from_pretrained; llama.cpp and homing read it right."
)
_WORDS = ["Hello", "name", "zwölf", "42", "  two  spaces", "tabs\tand\nlines", "日本語", "🙂", "What's", "?", "x=1;"]


@dataclass(frozen=True)
class Proof:
    reader: str  # what opened it, with its version
    max_gap: float  # largest difference of a logit
    num_logit_rows: int
    num_texts: int  # whose ids are equal
    num_chats: int  # whose ids are equal; 0 without a template
    note: str = ""  # what a person who opens it must know

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        chats = f" and {self.num_chats} random chats" if self.num_chats else ""
        return (
            f"{self.reader} computes the trainer's logits within {self.max_gap:.1e} on {self.num_logit_rows} rows,"
            f" and turns {self.num_texts} awkward texts{chats} to the same ids."
        )


@dataclass(frozen=True)
class Expected:
    """What the trainer's decoder says, in the numbers that the export holds."""

    ids_RT: Tensor
    logits_RTV: Tensor
    vocab_size: int


@torch.no_grad()
def expect(opened: Opened, dtype: torch.dtype) -> Expected:
    """With weights as the export rounds them: rounding is chosen by the person, another model is not."""
    model = opened.model
    vocab_size, length = opened.tokenizer.vocab_size, min(ROW, model.shape.context)
    generator = torch.Generator().manual_seed(7)
    ids_RT = torch.randint(vocab_size, (NUM_ROWS, length), generator=generator)
    text = opened.tokenizer.encode(" ".join(AWKWARD))[: length - 1]
    ids_RT[0, : len(text) + 1] = torch.tensor([opened.tokenizer.end_of_text_id, *text])
    if dtype != torch.float32 and not opened.is_adapter:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return Expected(ids_RT, _logits(model, ids_RT), model.shape.vocab_size)


def _logits(model: Decoder, ids_RT: Tensor) -> Tensor:
    logits_RTV: Tensor = model.set_precision("fp32").eval()(ids_RT)
    return logits_RTV


def prove(
    opened: Opened, folder: Path, expected: Expected, *, open_theirs: Callable[[Path], Any] | None = None
) -> Proof:
    """Raises IntegrityError at the first thing that is not the same."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    theirs = (open_theirs or _open)(folder)
    with torch.no_grad():
        logits_RTV = theirs(input_ids=expected.ids_RT).logits.float()[..., : expected.vocab_size]
    del theirs
    gap = float((logits_RTV - expected.logits_RTV).abs().max())
    if not gap <= MOST_GAP:  # also where it is no number
        raise _failed(
            "logits", f"transformers' differ from the trainer's by {gap:.3g}; at most {MOST_GAP:g} is allowed."
        )
    # Without these two, transformers asks on a terminal whether to run the modelling file, and looks on the Hub.
    known = {"trust_remote_code": _has_own_code(folder), "local_files_only": True}
    tokenizer, note = transformers.AutoTokenizer.from_pretrained(folder, **known), ""
    odd = _read_otherwise(opened, tokenizer)
    if odd and opened.model.shape.arch == "qwen2":
        # transformers gives every qwen2 folder Qwen2's own split of digits, whatever its tokenizer.json says.
        tokenizer, note = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **known), QWEN2_NOTE
        odd = _read_otherwise(opened, tokenizer)
    if odd:
        raise _failed("token ids", f"transformers and homing read {odd[:40]!r} differently.")
    num_chats = _compare_chats(opened, tokenizer)
    reader = f"transformers {transformers.__version__}"
    return Proof(reader, gap, len(expected.ids_RT), len(AWKWARD), num_chats, note)


def need_template(opened: Opened) -> None:
    """Of a model that was asked in turns, whatever it becomes: without the template nobody could ask it so."""
    if opened.was_taught_turns and opened.template is None:
        raise IntegrityError(
            what=f"{opened.folder} has no chat template, so its export would not be the model that was trained.",
            why=f"Its phase {opened.card.phase} asked it in turns, and neither {names.CHAT_TEMPLATE} nor"
            f" {names.TOKENIZER_CONFIG} says there how they are written.",
            fix=f"Copy the file with the template into that folder: {whose_template(opened.card)}",
        )


def _read_otherwise(opened: Opened, tokenizer: Any) -> str:
    """The first text that gives other ids; "" where none does."""
    for text in AWKWARD:
        if tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) != opened.tokenizer.encode(text):
            return text
    return ""


def _has_own_code(folder: Path) -> bool:
    """Our own modelling file, written a moment ago, is the only code that is ever trusted here."""
    from homing.lm.export.folder import CODE

    return all((folder / name).is_file() for name in CODE)


def _open(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    trusts = _has_own_code(folder)
    opened, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trusts, output_loading_info=True, local_files_only=True
    )
    odd = [*told["missing_keys"], *told["unexpected_keys"], *told["mismatched_keys"]]
    if odd:
        raise _failed("tensors", f"transformers does not find its own: {', '.join(map(str, odd[:6]))}.")
    return opened.eval()


def _compare_chats(opened: Opened, tokenizer: Any) -> int:
    """On random chats; one that the template refuses must be refused by both."""
    if opened.template is None:
        return 0
    if not tokenizer.chat_template:
        raise _failed("chats", "transformers finds no chat template in what was written.")
    renderer, source, same = Renderer(opened.template, ChatTokens(opened.folder)), random.Random(11), 0
    for _ in range(NUM_CHATS):
        messages = _random_chat(source)
        try:
            examples = renderer.render(Conversation(messages))
        except Fault:
            examples = []
        theirs = _their_ids(tokenizer, messages)
        # A template that rewrites earlier turns gives an example per answer; the last one has read them all.
        ours = [int(i) for i in examples[-1].ids] if examples else None
        if ours != theirs:
            raise _failed("chats", f"the template gives other ids for {messages[0]['content'][:40]!r}.")
        same += ours is not None
    if opened.was_taught_turns and not same:
        raise _failed("chats", "the template refuses every chat that was tried, so none could be compared.")
    return same


def _their_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int] | None:
    from jinja2 import TemplateError

    try:
        return [int(i) for i in tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)]
    except TemplateError:
        return None


def _random_chat(source: random.Random) -> list[dict[str, Any]]:
    def words() -> str:
        return " ".join(source.choice(_WORDS) for _ in range(source.randint(1, 12)))

    messages = [{"role": "system", "content": words()}] if source.random() < 0.5 else []
    for _ in range(source.randint(1, 4)):
        messages += [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]
    return messages


def _failed(what: str, why: str) -> IntegrityError:
    return IntegrityError(
        what=f"The export is not the model that was trained: its {what} differ.",
        why=why,
        fix="Nothing was written. Report it with the line above; homing's own folder opens as before.",
    )
