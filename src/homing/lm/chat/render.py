"""A conversation to ids and mask, through the model's own template.

    words, their markers broken -> template -> text -> markers and stretches between them -> ids
                                            -> where the assistant speaks                 -> mask

Breaking: one character that occurs nowhere is put into every marker that somebody's words spell, and taken out again
when the template has done its work. So only what the template itself wrote is read as markers, and yet the stretches
between them are encoded whole, as every inference engine encodes them: the ids are those of `apply_chat_template`.

Mask: the assistant's words, and the marker that ends the turn. A template with `{% generation %}` says it itself.
Otherwise each answer is found by rendering up to it: what `add_generation_prompt` gives is the question, what comes
after is the answer, and both must be a prefix of the whole. Where a template rewrites earlier turns (Qwen3 forgets old
reasoning), there is no such whole: then each answer becomes an example of its own, read as it is read in use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homing.errors import DataError
from homing.lm.chat.messages import Conversation, Fault
from homing.lm.chat.template import ChatTemplate
from homing.lm.chat.tokens import ChatTokens

__all__ = ["Example", "Renderer"]

# Never characters, in any text: Unicode sets them aside for use inside programs. Should one occur all the same,
# another is taken.
_SPARE = [chr(code) for code in range(0xFDD0, 0xFDF0)]
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    ids: NDArray[np.uint32]
    mask: NDArray[np.bool_]  # True: predicted, and learned from
    turn_ends: list[int]  # after which token each learned answer is over

    def up_to_answer(self) -> Example:
        """Without what follows the last answer, from which nothing is learned."""
        return self.cut(self.turn_ends[-1])

    def cut(self, end: int) -> Example:
        return Example(self.ids[:end], self.mask[:end], [stop for stop in self.turn_ends if stop <= end])


@dataclass(frozen=True)
class _Text:
    """What the template gave, with broken markers, and the spans of it that are learned."""

    text: str
    spans: list[Span]
    breaker: str


class Renderer:
    def __init__(self, template: ChatTemplate, tokens: ChatTokens) -> None:
        self.template, self.tokens = template, tokens

    def render_all(self, conversations: Sequence[Conversation]) -> list[list[Example] | Fault]:
        """Of each conversation its examples, one as a rule; or why the template cannot render it."""
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

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Everything so far, and the beginning of the assistant's turn."""
        marks = _spare_characters(Conversation(messages))
        text = self.template.render(_broken(messages, marks[0], self.tokens), None, add_generation_prompt=True)
        (example,) = self._encode([_Text(text, [], marks[0])])
        return [int(i) for i in example.ids]

    def end_id(self) -> int | None:
        """The marker with which the assistant ends a turn; None where the template has none."""
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
        """One answer with what came before it, as the model will read it when it is asked for this answer."""
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
                f"the chat template marks {len(spans)} stretches as the assistant's; the conversation has"
                f" {len(conversation.answers)} answers",
            )
        kept = [span for number, span in zip(conversation.answers, spans, strict=True) if number in learned]
        return _Text(clean, [self._to_turn_end(clean, span) for span in kept], breaker)

    def _to_turn_end(self, text: str, span: Span) -> Span:
        """To the marker that ends the turn, and not to the line break that templates put behind it."""
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
        """All stretches of all texts at one go: the tokenizer is fastest so."""
        pieces: list[str] = []
        plans: list[list[tuple[int, int | None]]] = []  # of each text: where a piece begins, and its id if a marker
        for text in texts:
            plan: list[tuple[int, int | None]] = []
            at = clean_at = 0
            # The header ends a piece where the answer begins with white space: in use it is encoded before the answer
            # is known. Else a line break of each would be one token, which counts as the header's and is not learned.
            borders = [(start, start) for start, _ in text.spans if text.text[start : start + 1].isspace()]
            markers = [*self.tokens.markers_in(text.text), (len(text.text), len(text.text))]
            for first, last in sorted([*markers, *borders]):
                stretch = text.text[at:first].replace(text.breaker, "")
                if stretch:
                    pieces.append(stretch)
                    plan.append((clean_at, None))
                clean_at += len(stretch)
                if last > first:
                    plan.append((clean_at, self.tokens.markers[text.text[first:last]]))
                clean_at, at = clean_at + last - first, last
            plans.append(plan)
        encoded = iter(self.tokens.encode(pieces))
        for text, plan in zip(texts, plans, strict=True):
            ids: list[int] = []
            starts: list[int] = []
            for begin, marker in plan:
                piece_ids, piece_starts = ([marker], [0]) if marker is not None else next(encoded)
                ids += piece_ids
                starts += [begin + start for start in piece_starts]
            yield _example(ids, starts, [_without(text, span) for span in text.spans])


def _example(ids: list[int], starts: list[int], spans: list[Span]) -> Example:
    """A token that begins in the question is the question's, also where it reaches into the answer."""
    places = np.array(starts, dtype=np.int64)
    mask, ends = np.zeros(len(ids), dtype=bool), []
    for start, end in spans:
        first, last = np.searchsorted(places, [start, end], side="left")
        mask[first:last] = True
        ends.append(int(last))
    return Example(np.array(ids, dtype=np.uint32), mask, ends)


def _without(text: _Text, span: Span) -> Span:
    """The same span where the breaking characters are gone."""
    start, end = span
    before = text.text.count(text.breaker, 0, start)
    return start - before, end - before - text.text.count(text.breaker, start, end)


def _check_answer(asked: str, answered: str) -> None:
    if not answered.startswith(asked) or len(answered) == len(asked):
        raise Fault(
            "template", "the chat template asks for an answer in other words than it writes one, so none can be found"
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
    """Three that occur nowhere in it: one to break markers, two for the ends of what is generated."""
    words = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
    spare = [character for character in _SPARE if character not in words]
    if len(spare) < 3:
        raise Fault("control-character", "its text is made of noncharacters (U+FDD0 and after)")
    return spare[:3]


def _broken(messages: list[dict[str, Any]], breaker: str, tokens: ChatTokens) -> list[dict[str, Any]]:
    """The assistant's own <think> and the like stay what they are; what ends a turn is nobody's to say."""
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
        # Some vocabularies have runs of spaces among their added tokens: those are words like others.
        if marker not in tokens.specials and (keeps_own or marker.isspace()):
            continue
        parts += [text[at : first + 1], breaker]
        at = first + 1
    return "".join([*parts, text[at:]])


def need_template(template: ChatTemplate | None, where: str) -> ChatTemplate:
    if template is None:
        raise DataError(
            what=f"There is no chat template in {where}.",
            why="Neither chat_template.jinja nor tokenizer_config.json says how turns are written.",
            fix="A tokenizer with `specials: standard` has one; a base model's folder gets one from its chat sibling.",
        )
    return template
