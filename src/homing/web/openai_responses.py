"""Writes responses in OpenAI's format: events of a generation -> one document, or chunks of a stream."""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from homing.lm.generate.pick_token import Picked
from homing.lm.generate.text_stream import TextStream
from homing.lm.tokenizer import Tokenizer
from homing.web.generation import Choice, Event, Generation, Token
from homing.web.openai_requests import Wanted
from homing.web.tool_calls import BEGINNINGS, split_calls

__all__ = ["Answer", "embeddings_document", "event_line"]

Document = dict[str, Any]


class Answer:
    """Formats the response to one request as its route requires, either complete or in chunks."""

    def __init__(self, model: str, wanted: Wanted, generation: Generation, tokenizer: Tokenizer) -> None:
        """Begin the response to a request that was accepted."""
        self._wanted, self._generation, self._tokenizer = wanted, generation, tokenizer
        self._choices = choices = generation.choices
        self._is_chat = wanted.messages is not None
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._texts = ["" for _ in choices]  # of each choice, what was received and not sent
        self._is_begun = [False for _ in choices]
        self._num_sent = [0 for _ in choices]  # number of characters sent, for the offsets of tokens

    def usage(self) -> dict[str, int]:
        read, made = self._generation.num_prompt_tokens, self._generation.num_tokens
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    # -- one document --------------------------------------------------------------------------------------------------

    def whole(self, events: Sequence[Event]) -> Document:
        """Return the response, when all texts are complete."""
        by_choice: list[list[Event]] = [[] for _ in self._choices]
        for event in events:
            by_choice[event.choice].append(event)
        choices = []
        for number, (choice, own) in enumerate(zip(self._choices, by_choice, strict=True)):
            text = "".join(event.text for event in own)
            tokens = [token for event in own for token in event.tokens]
            ending = own[-1].ending if own else "length"
            choices.append(self._whole_choice(number, choice, text, tokens, ending))
        name = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": name, "choices": choices, "usage": self.usage()}

    def _whole_choice(self, number: int, choice: Choice, text: str, tokens: list[Token], ending: str) -> Document:
        if not self._is_chat:
            echoed = self._echo(number) if self._wanted.is_echoed else ""
            logprobs = self._completion_logprobs(choice, tokens, number, len(echoed))
            return {"index": number, "text": echoed + text, "logprobs": logprobs, "finish_reason": ending}
        content, calls = split_calls(text) if self._wanted.tools else (text, [])
        message: Document = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        logprobs = self._chat_logprobs(tokens)
        ending = "tool_calls" if calls else ending
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": ending}

    # -- chunks of a stream --------------------------------------------------------------------------------------------

    def first(self) -> Iterator[Document]:
        for number in range(len(self._choices)):
            if self._is_chat:
                yield self._chunk(number, {"role": "assistant", "content": ""}, None)

    def pieces(self, event: Event) -> Iterator[Document]:
        """Yield the chunks for an event."""
        number, text = event.choice, event.text
        calls: list[Document] = []
        if self._wanted.tools:
            text, calls = self._hold_back_calls(number, text, is_last=bool(event.ending))
        if not self._is_chat:
            yield from self._completion_pieces(event)
            return
        if text or event.tokens:
            yield self._chunk(number, {"content": text}, None, self._chat_logprobs(event.tokens))
        if calls:
            delta = [{"index": place, **call} for place, call in enumerate(calls)]
            yield self._chunk(number, {"tool_calls": delta}, None)
        if event.ending:
            yield self._chunk(number, {}, "tool_calls" if calls else event.ending)

    def _hold_back_calls(self, number: int, text: str, *, is_last: bool) -> tuple[str, list[Document]]:
        self._texts[number] += text
        held = self._texts[number]
        if is_last:
            self._texts[number] = ""
            return split_calls(held)
        starts = [at for mark in BEGINNINGS if (at := held.find(mark)) >= 0]
        if not starts:  # what may be the beginning of a marker is held back too
            starts = [
                len(held) - length
                for mark in BEGINNINGS
                for length in range(1, len(mark))
                if held.endswith(mark[:length])
            ]
        end = min(starts, default=len(held))
        self._texts[number] = held[end:]
        return held[:end], []

    def _completion_pieces(self, event: Event) -> Iterator[Document]:
        number, text, choice = event.choice, event.text, self._choices[event.choice]
        if not self._is_begun[number]:
            self._is_begun[number] = True
            if self._wanted.is_echoed:
                echoed = self._echo(number)
                self._num_sent[number] = len(echoed)
                yield self._chunk(number, {"content": echoed}, None, self._completion_logprobs(choice, [], number, 0))
        if text or event.tokens:
            logprobs = self._completion_logprobs(None, event.tokens, number, self._num_sent[number])
            yield self._chunk(number, {"content": text}, None, logprobs)
        if event.ending:
            yield self._chunk(number, {}, event.ending)

    def last(self) -> Iterator[Document]:
        if self._wanted.has_usage:
            yield {**self._chunk(0, {}, None), "choices": [], "usage": self.usage()}

    def _chunk(self, number: int, delta: Document, ending: str | None, logprobs: Document | None = None) -> Document:
        choice: Document = {"index": number, "logprobs": logprobs, "finish_reason": ending}
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._wanted.has_usage else {}
        return {**self._head, "object": name, "choices": [choice], **usage}

    # -- prompts and log-probabilities ---------------------------------------------------------------------------------

    def _prompt_ids(self, number: int) -> Sequence[int]:
        """Return the prompt of a choice, without the end-of-text token that the server put before a text."""
        place = number // self._wanted.num_choices
        is_text = isinstance(self._wanted.prompts[place], str)
        ids = self._generation.prompts[place]
        return ids[1:] if is_text else ids

    def _echo(self, number: int) -> str:
        return self._tokenizer.decode(self._prompt_ids(number))

    def _chat_logprobs(self, tokens: Sequence[Token]) -> Document | None:
        if self._wanted.num_logprobs is None:
            return None
        return {"content": [self._chat_token(token.picked) for token in tokens], "refusal": None}

    def _chat_token(self, picked: Picked) -> Document:
        top = [self._named(i, logprob) for i, logprob in picked.top]
        return {**self._named(picked.id, picked.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float | None) -> Document:
        raw = self._tokenizer.bytes_of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    def _completion_logprobs(
        self, choice: Choice | None, tokens: Sequence[Token], number: int, num_before: int
    ) -> Document | None:
        """Return the log-probabilities of echoed prompt tokens, if `choice` is given, and of generated tokens."""
        if self._wanted.num_logprobs is None:
            return None
        rows: list[tuple[Picked, int]] = []
        if choice is not None and self._wanted.is_echoed:
            rows += self._prompt_rows(choice, number)
        rows += [(token.picked, num_before + token.start) for token in tokens]
        return {
            "tokens": [self._token_text(picked.id) for picked, _ in rows],
            "token_logprobs": [_finite(picked.logprob) for picked, _ in rows],
            "top_logprobs": [
                None if picked.logprob is None else {self._token_text(i): _finite(value) for i, value in picked.top}
                for picked, _ in rows
            ],
            "text_offset": [start for _, start in rows],
        }

    def _prompt_rows(self, choice: Choice, number: int) -> list[tuple[Picked, int]]:
        ids = self._prompt_ids(number)
        scores = choice.prompt_scores
        # The first token of a prompt has no log-probability, unless the server put the end-of-text token before it.
        picked = [*scores] if len(scores) == len(ids) else [Picked(ids[0]), *scores]
        rows, stream = [], TextStream(self._tokenizer)
        for each in picked:
            rows.append((each, stream.num_characters))
            stream.add(each.id)
        return rows

    def _token_text(self, token_id: int) -> str:
        """Return the token as text; bytes that are no text are written out, so that different tokens stay different."""
        raw = self._tokenizer.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def embeddings_document(model: str, found: Sequence[tuple[bytes, int]], *, is_base64: bool) -> Document:
    """Return the response to a request for embeddings: for each text its vector of 32-bit floats, and its tokens."""

    def written(vector: bytes) -> str | list[float]:
        return base64.b64encode(vector).decode() if is_base64 else list(struct.unpack(f"<{len(vector) // 4}f", vector))

    count = sum(num_tokens for _, num_tokens in found)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": written(vector)}
            for place, (vector, _) in enumerate(found)
        ],
        "model": model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        # Not part of OpenAI's format: this model was not trained to embed texts.
        "pooling": "mean of the last hidden states",
    }


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity: a token that cannot occur gets OpenAI's -9999."""
    return None if logprob is None else max(logprob, -9999.0)


def event_line(document: Document | str) -> bytes:
    """Return one server-sent event.

    ASCII JSON contains neither line breaks nor characters that clients treat as line breaks, so one line is one event.
    """
    data = document if isinstance(document, str) else json.dumps(document)
    return f"data: {data}\n\n".encode()
