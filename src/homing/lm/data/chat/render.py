"""Renders a conversation to ids and a loss mask with the model's own chat template.

    messages with broken markers -> template -> text -> markers, and the text between them -> ids
                                                     -> the assistant's text               -> mask

How markers are broken: if a message contains a marker, a character that occurs nowhere else in the conversation (the
separator) is inserted into it, and removed after the template has run. So only markers that the template itself wrote
are treated as markers, and the text between them is still encoded as a whole, as inference engines do. The ids are the
same as those from `apply_chat_template`.

The mask covers the assistant's text and the marker that ends the turn. A template with `{% generation %}` blocks marks
these itself. Otherwise, to find an answer, the conversation is rendered twice: up to the answer, with
`add_generation_prompt`, and including the answer. The difference is the answer. Both texts must be prefixes of the
whole rendered conversation. If they are not, because the template rewrites earlier turns (Qwen3 drops old reasoning),
each answer becomes a separate example, rendered as at inference.

`ChatTokens` encodes plain text and markers separately. It encodes text with the tokenizer's added tokens removed, so
nothing in a message can become a marker. This works with any BPE tokenizer, including those of third-party models.

    encode(texts)   ids of each text, and the character at which each id begins; never the id of a marker
    markers_in      positions of markers in a rendered text
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError
from homing.lm.data.chat.messages import Conversation, Fault
from homing.lm.data.chat.template import ChatTemplate
from homing.lm.tokenizer.tokenizer import panics_as_errors, read_tokenizer_json
from homing.wire.file_names import TOKENIZER

__all__ = ["ChatTokens", "Encoded", "Example", "Renderer"]

Encoded = tuple[list[int], list[int]]  # ids, and the character position at which each id begins


class ChatTokens:
    def __init__(self, path: Path) -> None:
        """Load the tokenizer. `path` is tokenizer.json, or the folder that contains it."""
        from tokenizers import Tokenizer as Backend

        self.path = path / TOKENIZER if path.is_dir() else path
        data = read_tokenizer_json(self.path)
        added = [entry for entry in data.get("added_tokens") or [] if entry.get("content")]
        _refuse_odd(self.path, added)
        self.markers: dict[str, int] = {entry["content"]: int(entry["id"]) for entry in added}
        self._names = {number: name for name, number in self.markers.items()}
        # Special markers, such as those that end turns and texts, count as plain text if they occur in a message. Other
        # markers, such as <think>, are accepted in the assistant's messages.
        self.specials = frozenset(entry["content"] for entry in added if entry.get("special"))
        bare = {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        with panics_as_errors(self.path):
            self._backend: Any = Backend.from_str(json.dumps(bare))
        longest_first = sorted(self.markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        ids = [*data["model"]["vocab"].values(), *self.markers.values()]
        self.vocab_size = int(max(ids)) + 1

    def encode(self, texts: list[str]) -> list[Encoded]:
        with panics_as_errors(self.path):
            rows = self._backend.encode_batch(texts, add_special_tokens=False)
        return [(row.ids, [start for start, _ in row.offsets]) for row in rows]

    def markers_in(self, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) of each marker, without overlaps. At each position, the longest match wins."""
        return [found.span() for found in self._pattern.finditer(text)]

    def show(self, number: int) -> str:
        """Format one token for display: a marker by its name, invalid bytes as U+FFFD."""
        return self._names.get(number) or str(self._backend.decode([number], skip_special_tokens=False))


def _refuse_odd(path: Path, added: list[dict[str, Any]]) -> None:
    flags = ("lstrip", "rstrip", "single_word")
    odd = [entry["content"] for entry in added if any(entry.get(flag) for flag in flags)]
    if odd:
        raise DataError(
            what=f"{path} has special tokens that strip the spaces around them: {', '.join(odd[:4])}.",
            why="With such tokens, homing cannot determine exactly where a turn's text ends.",
            fix="Use a byte-level tokenizer, such as one from Llama 3, Qwen or homing.",
        )


# Unicode noncharacters, which are reserved for internal use by programs. For each conversation, only those
# that do not occur in it are used.
_SPARE = list(map(chr, range(0xFDD0, 0xFDF0)))
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    ids: NDArray[np.uint32]
    mask: NDArray[np.bool_]  # True for tokens that count in the loss
    turn_ends: list[int]  # position of the first token after each learned answer

    def up_to_answer(self) -> Example:
        """Return the example truncated after the last learned answer, because nothing after that is learned."""
        return self.cut(self.turn_ends[-1])

    def cut(self, end: int) -> Example:
        return Example(self.ids[:end], self.mask[:end], [stop for stop in self.turn_ends if stop <= end])


@dataclass(frozen=True)
class _Text:
    """The template's output, in which markers from messages still contain the separator, and the spans to learn."""

    text: str
    spans: list[Span]
    breaker: str


class Renderer:
    def __init__(self, template: ChatTemplate, tokens: ChatTokens) -> None:
        self.template, self.tokens = template, tokens

    def render_all(self, conversations: Sequence[Conversation]) -> list[list[Example] | Fault]:
        """Return each conversation's examples (usually one), or a Fault that explains why it cannot be rendered."""
        texts: list[list[_Text] | Fault] = []
        for conversation in conversations:
            try:
                texts.append(self._texts(conversation))
            except Fault as fault:
                texts.append(fault)
        examples = iter(self._encode([text for row in texts if isinstance(row, list) for text in row]))
        return [row if isinstance(row, Fault) else [next(examples) for _ in row] for row in texts]

    def render(self, conversation: Conversation) -> list[Example]:
        (row,) = self.render_all([conversation])
        if isinstance(row, Fault):
            raise row
        return row

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of all messages, followed by the beginning of the assistant's turn."""
        marks = _spare_characters(Conversation(messages, tools))
        broken_tools = _broken_values(tools, marks[0], self.tokens, keeps_own=False)
        text = self.template.render(_broken(messages, marks[0], self.tokens), broken_tools, add_generation_prompt=True)
        (example,) = self._encode([_Text(text, [], marks[0])])
        return [int(i) for i in example.ids]

    def end_id(self) -> int | None:
        """Return the id of the marker that ends the assistant's turn, or None if the template has none."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        last = int(self.render(Conversation(messages))[-1].up_to_answer().ids[-1])
        return last if last in self.tokens.markers.values() else None

    def _texts(self, conversation: Conversation) -> list[_Text]:
        breaker, *marks = _spare_characters(conversation)
        messages = _broken(conversation.messages, breaker, self.tokens)
        tools = _broken_values(conversation.tools, breaker, self.tokens, keeps_own=False)
        learned = [number for number in conversation.answers if number not in conversation.unlearned]
        if self.template.has_generation:
            text = self.template.render(messages, tools, marks=(marks[0], marks[1]))
            return [self._by_marks(text, (marks[0], marks[1]), breaker, conversation, learned)]
        whole = self.template.render(messages, tools)
        spans = []
        for number in learned:
            asked = self.template.render(messages[:number], tools, add_generation_prompt=True)
            answered = self.template.render(messages[: number + 1], tools)
            _check_answer(asked, answered)
            if not whole.startswith(answered):
                return [self._alone(messages, tools, number, breaker) for number in learned]
            spans.append(self._to_turn_end(whole, (len(asked), len(answered))))
        return [_Text(whole, spans, breaker)]

    def _alone(self, messages: list[Any], tools: Any, number: int, breaker: str) -> _Text:
        """Render one answer after exactly the text that the model would read before generating it."""
        asked = self.template.render(messages[:number], tools, add_generation_prompt=True)
        answered = self.template.render(messages[: number + 1], tools)
        _check_answer(asked, answered)
        return _Text(answered, [self._to_turn_end(answered, (len(asked), len(answered)))], breaker)

    def _by_marks(
        self, text: str, marks: tuple[str, str], breaker: str, conversation: Conversation, learned: list[int]
    ) -> _Text:
        clean, spans = _take_out(text, marks)
        if len(spans) != len(conversation.answers):
            raise Fault(
                "template",
                f"the chat template marks {len(spans)} spans as assistant text; the conversation has"
                f" {len(conversation.answers)} answers",
            )
        kept = [span for number, span in zip(conversation.answers, spans, strict=True) if number in learned]
        return _Text(clean, [self._to_turn_end(clean, span) for span in kept], breaker)

    def _to_turn_end(self, text: str, span: Span) -> Span:
        """Return the span with its end moved to just after the end-of-turn marker, before any line break."""
        start, end = span
        answer, specials = text[start:end], self.tokens.specials
        inside = [last for first, last in self.tokens.markers_in(answer) if answer[first:last] in specials]
        if inside and not answer[inside[-1] :].strip():
            return start, start + inside[-1]
        for first, last in self.tokens.markers_in(text[end : end + 100])[:1]:
            if first == 0 and text[end : end + last] in specials:
                return start, end + last
        return span

    def _encode(self, texts: list[_Text]) -> Iterator[Example]:
        """Encode all texts in a single call to the tokenizer, which is faster than one call per text."""
        chunks: list[str] = []
        # For each text, one pair per part: the position at which it begins, and its id if it is a marker.
        plans: list[list[tuple[int, int | None]]] = []
        for text in texts:
            plan: list[tuple[int, int | None]] = []
            at = clean_at = 0
            # If an answer begins with white space, encode it separately from the header of its turn, because at
            # inference the header is encoded before the answer is known. Otherwise a line break at the end of the
            # header and one at the start of the answer would merge into one token, which would count as part of the
            # header and not be learned.
            borders = [(start, start) for start, _ in text.spans if text.text[start : start + 1].isspace()]
            markers = [*self.tokens.markers_in(text.text), (len(text.text), len(text.text))]
            for first, last in sorted([*markers, *borders]):
                stretch = text.text[at:first].replace(text.breaker, "")
                if stretch:
                    chunks.append(stretch)
                    plan.append((clean_at, None))
                clean_at += len(stretch)
                if last > first:
                    plan.append((clean_at, self.tokens.markers[text.text[first:last]]))
                clean_at, at = clean_at + last - first, last
            plans.append(plan)
        encoded = iter(self.tokens.encode(chunks))
        for text, plan in zip(texts, plans, strict=True):
            ids: list[int] = []
            starts: list[int] = []
            for begin, marker in plan:
                piece_ids, piece_starts = ([marker], [0]) if marker is not None else next(encoded)
                ids += piece_ids
                starts += [begin + start for start in piece_starts]
            yield _example(ids, starts, [_without(text, span) for span in text.spans])


def _example(ids: list[int], starts: list[int], spans: list[Span]) -> Example:
    """Build an example from ids, their character positions, and the spans to learn.

    A token that begins in the question belongs to the question, even if it extends into the answer.
    """
    places = np.array(starts, dtype=np.int64)
    mask, ends = np.zeros(len(ids), dtype=bool), []
    for start, end in spans:
        first, last = np.searchsorted(places, [start, end], side="left")
        mask[first:last] = True
        ends.append(int(last))
    return Example(np.array(ids, dtype=np.uint32), mask, ends)


def _without(text: _Text, span: Span) -> Span:
    """Return the span's position in the text without the separators."""
    start, end = span
    before = text.text.count(text.breaker, 0, start)
    return start - before, end - before - text.text.count(text.breaker, start, end)


def _check_answer(asked: str, answered: str) -> None:
    if not answered.startswith(asked) or len(answered) == len(asked):
        raise Fault(
            "template",
            "the chat template's generation prompt differs from the start of its answers, so homing cannot find them",
        )


def _take_out(text: str, marks: tuple[str, str]) -> tuple[str, list[Span]]:
    before, after = marks
    clean, spans = "", []
    for number, part in enumerate(text.split(before)):
        inside, _, rest = part.partition(after) if number else ("", "", part)
        if number:
            spans.append((len(clean), len(clean) + len(inside)))
        clean += inside + rest
    return clean, spans


def _spare_characters(conversation: Conversation) -> list[str]:
    """Return three characters that do not occur in the conversation: a separator, and two delimiters for answers."""
    words = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
    spare = [character for character in _SPARE if character not in words]
    if len(spare) < 3:
        raise Fault("control-character", "the text contains Unicode noncharacters (U+FDD0 and up)")
    return spare[:3]


def _broken(messages: list[dict[str, Any]], breaker: str, tokens: ChatTokens) -> list[dict[str, Any]]:
    """Return the messages with the separator inserted into every marker, so that it counts as plain text.

    In the assistant's messages, only special markers such as end-of-turn are changed; <think> is not.
    """
    return [
        {
            name: value
            if name in ("role", "type")
            else _broken_values(value, breaker, tokens, keeps_own=message["role"] == "assistant")
            for name, value in message.items()
        }
        for message in messages
    ]


def _broken_values(value: Any, breaker: str, tokens: ChatTokens, *, keeps_own: bool) -> Any:
    if isinstance(value, str):
        return _break(value, breaker, tokens, keeps_own)
    if isinstance(value, list):
        return [_broken_values(item, breaker, tokens, keeps_own=keeps_own) for item in value]
    if isinstance(value, dict):
        return {
            _break(name, breaker, tokens, keeps_own): _broken_values(item, breaker, tokens, keeps_own=keeps_own)
            for name, item in value.items()
        }
    return value


def _break(text: str, breaker: str, tokens: ChatTokens, keeps_own: bool) -> str:
    parts, at = [], 0
    for first, last in tokens.markers_in(text):
        marker = text[first:last]
        # In some vocabularies, runs of spaces are added tokens. They are ordinary text.
        if marker not in tokens.specials and (keeps_own or marker.isspace()):
            continue
        parts += [text[at : first + 1], breaker]
        at = first + 1
    return "".join([*parts, text[at:]])


def need_template(template: ChatTemplate | None, where: str) -> ChatTemplate:
    if template is None:
        raise DataError(
            what=f"No chat template in {where}.",
            why="Neither chat_template.jinja nor tokenizer_config.json defines one.",
            fix="Use `specials: standard` for a new tokenizer, or copy the template from the model's chat version.",
        )
    return template
