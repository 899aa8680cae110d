"""Verifies an export with third-party software before it is published.

    logits     compares the exported model in transformers with the trainer's decoder, on random ids and on text
    ids        compares transformers' tokenizer with homing's, on difficult texts
    chats      compares apply_chat_template with homing's renderer, on random conversations

The expected logits are computed first, so that the two models need not be in memory at the same time.
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
from homing.lm.data.chat.messages import Conversation, Fault
from homing.lm.data.chat.render import ChatTokens, Renderer
from homing.lm.export.source_model import Opened
from homing.lm.generate.load_model import template_owner
from homing.lm.model import Decoder
from homing.lm.tokenizer.encode import AWKWARD
from homing.wire import file_names

__all__ = ["MOST_GAP", "Expected", "Proof", "expect", "need_template", "prove"]

MOST_GAP = 1e-3  # maximum difference between logits if both models compute in fp32
NUM_ROWS, ROW = 4, 64
NUM_CHATS = 40
QWEN2_NOTE = (
    "For every qwen2 model, AutoTokenizer in transformers 5 splits digits as Qwen2 does, which is wrong for this "
    "model. Load its tokenizer with PreTrainedTokenizerFast.from_pretrained; llama.cpp and homing load it correctly."
)
_WORDS = ["Hello", "name", "zwölf", "42", "  two  spaces", "tabs\tand\nlines", "日本語", "🙂", "What's", "?", "x=1;"]


@dataclass(frozen=True)
class Proof:
    reader: str  # the package that opened the export, with its version
    max_gap: float  # largest difference between a logit and its expected value
    num_logit_rows: int
    num_texts: int  # number of texts that both tokenizers encode to the same ids
    num_chats: int  # number of chats that both tokenizers encode to the same ids; 0 without a template
    note: str = ""  # a remark that users of the export must read

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        chats = f" and {self.num_chats} random chats" if self.num_chats else ""
        return (
            f"{self.reader} reproduces the trainer's logits to within {self.max_gap:.1e} on {self.num_logit_rows} rows,"
            f" and encodes {self.num_texts} difficult texts{chats} to the same ids."
        )


@dataclass(frozen=True)
class Expected:
    """The outputs of the trainer's decoder with its weights rounded to the export's precision."""

    ids_RT: Tensor
    logits_RTV: Tensor
    vocab_size: int


@torch.no_grad()
def expect(opened: Opened, dtype: torch.dtype) -> Expected:
    """Return the logits to expect from the export. The weights are first rounded to `dtype`, as in the export."""
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
    opened: Opened, folder: Path, expected: Expected, *, open_model: Callable[[Path], Any] | None = None
) -> Proof:
    """Compare the export with the trainer's model. Raises IntegrityError at the first difference."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    upstream = (open_model or _open)(folder)
    with torch.no_grad():
        logits_RTV = upstream(input_ids=expected.ids_RT).logits.float()[..., : expected.vocab_size]
    del upstream
    gap = float((logits_RTV - expected.logits_RTV).abs().max())
    if not gap <= MOST_GAP:  # also true for NaN
        raise _failed(
            "logits", f"transformers' logits differ from the trainer's by {gap:.3g}; at most {MOST_GAP:g} is allowed."
        )
    # Without these settings, transformers would ask before running the modeling file, and would access the Hub.
    known = {"trust_remote_code": _has_own_code(folder), "local_files_only": True}
    tokenizer, note = transformers.AutoTokenizer.from_pretrained(folder, **known), ""
    odd = _read_otherwise(opened, tokenizer)
    if odd and opened.model.shape.arch == "qwen2":
        # transformers uses Qwen2's own digit split for every qwen2 folder and ignores the one in its tokenizer.json.
        tokenizer, note = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **known), QWEN2_NOTE
        odd = _read_otherwise(opened, tokenizer)
    if odd:
        raise _failed("token ids", f"transformers and homing encode {odd[:40]!r} differently.")
    num_chats = _compare_chats(opened, tokenizer)
    reader = f"transformers {transformers.__version__}"
    return Proof(reader, gap, len(expected.ids_RT), len(AWKWARD), num_chats, note)


def need_template(opened: Opened) -> None:
    """Raise IntegrityError if a chat model has no template. Users need one to prompt it the way it was trained."""
    if opened.was_taught_turns and opened.template is None:
        raise IntegrityError(
            what=f"{opened.folder} has no chat template, so its export would differ from the trained model.",
            why=f"The {opened.card.phase} phase trained it on chats, but neither {file_names.CHAT_TEMPLATE} nor"
            f" {file_names.TOKENIZER_CONFIG} defines a template.",
            fix=f"Copy the file that contains the template to that folder: {template_owner(opened.card)}",
        )


def _read_otherwise(opened: Opened, tokenizer: Any) -> str:
    """Return the first text for which the two tokenizers give different ids, or "" if there is none."""
    for text in AWKWARD:
        if tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) != opened.tokenizer.encode(text):
            return text
    return ""


def _has_own_code(folder: Path) -> bool:
    """Return whether the folder contains the modeling file that homing has just written. No other code is trusted."""
    from homing.lm.export.hf_folder import CODE

    return all((folder / name).is_file() for name in CODE)


def _open(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    trusts = _has_own_code(folder)
    opened, loading_info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trusts, output_loading_info=True, local_files_only=True
    )
    odd = [*loading_info["missing_keys"], *loading_info["unexpected_keys"], *loading_info["mismatched_keys"]]
    if odd:
        raise _failed("tensors", f"transformers cannot load these tensors: {', '.join(map(str, odd[:6]))}.")
    return opened.eval()


def _compare_chats(opened: Opened, tokenizer: Any) -> int:
    """Encode random chats with homing and with transformers; return the number of chats for which the ids are equal.

    If the chat template raises an error for a chat in one of the two, it must also raise one in the other.
    """
    if opened.template is None:
        return 0
    if not tokenizer.chat_template:
        raise _failed("chats", "transformers finds no chat template in the export.")
    renderer, source, same = Renderer(opened.template, ChatTokens(opened.folder)), random.Random(11), 0
    for _ in range(NUM_CHATS):
        messages = _random_chat(source)
        try:
            examples = renderer.render(Conversation(messages))
        except Fault:
            examples = []
        upstream = _their_ids(tokenizer, messages)
        # If the template rewrites earlier turns, there is one example per answer, and the last example has all turns.
        ours = [int(i) for i in examples[-1].ids] if examples else None
        if ours != upstream:
            raise _failed("chats", f"the ids differ for the chat that begins with {messages[0]['content'][:40]!r}.")
        same += ours is not None
    if opened.was_taught_turns and not same:
        raise _failed("chats", "the template rejects every test chat, so none could be compared.")
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
        what=f"The export differs from the trained model: its {what} differ.",
        why=why,
        fix="Please report this error, including the line above."
        " No export was written, and the original folder is unchanged.",
    )
