"""A loaded model for the server: a request -> ids of its prompts -> what to generate for each of its texts.

    messages -> check their size -> the model's own template -> ids ┐
    text     -> check its size   -> <|endoftext|> + ids             ┼-> one TextRequest per text
    ids      -> as they are                                         ┘

A text ends where the model ends it, at a stop string, after the maximum number of tokens, or when the context is full.
The server never truncates a prompt to make it fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from homing.errors import UsageError
from homing.lm.data.chat.messages import Message
from homing.lm.data.chat.prompt_ids import Prompter, learned_to_answer
from homing.lm.device import on_gpu
from homing.lm.generate import read_card
from homing.lm.generate.batching import BatchGenerator, TextRequest
from homing.lm.generate.json_constraint import JsonConstraint, JsonGrammars
from homing.sampling_settings import check_settings
from homing.web.generation import Choice, Generation
from homing.web.openai_requests import MOST_SCORES

if TYPE_CHECKING:
    from homing.lm.model import Decoder
    from homing.lm.tokenizer import Tokenizer
    from homing.web.openai_requests import Wanted

__all__ = ["BadIds", "GenerationSession", "GivenUp", "TooLong"]

_FIRST_PART = 1 << 14  # length in characters of the first prefix that is encoded
Prompt = str | list[int]


class TooLong(Exception):
    """Raised if a prompt is so long that the context has no room for an answer."""

    def __init__(self, num_tokens: int, *, is_at_least: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens, self.is_at_least = num_tokens, is_at_least


class BadIds(Exception):
    """Raised if a prompt contains ids that the vocabulary does not have."""


class GivenUp(Exception):
    """Raised if the client is no longer waiting for the text."""


class GenerationSession:
    def __init__(self, model: Decoder, tokenizer: Tokenizer, folder: Path, *, name: str = "") -> None:
        """`name`: how requests name this model; by default the name of its run, or of its folder."""
        card = read_card(folder)
        self.name = name or card.run_name or folder.resolve().name
        self.phase, self.step = card.phase, card.step
        self.context = model.shape.context
        self.tokenizer = tokenizer
        self._model = model
        self._prompter = Prompter(folder, tokenizer) if learned_to_answer(card) else None
        self._rendering = Lock()  # only one thread may render a template at a time, because templates have state
        # A prompt with more bytes than this cannot fit, even if each of its tokens is the longest one.
        self.max_prompt_bytes = self.context * max(1, *tokenizer.token_bytes())
        self._grammars = JsonGrammars(tokenizer, model.shape.vocab_size, self._stop_ids)

    @property
    def is_chat(self) -> bool:
        return self._prompter is not None

    @property
    def knows_tools(self) -> bool:
        """Whether the model's chat template can show tools to it."""
        return self._prompter is not None and self._prompter.knows_tools

    def new_batch(self, max_rows: int, *, memory_share: float = 1.0) -> BatchGenerator:
        return BatchGenerator(self._model, max_rows=max_rows, memory_share=memory_share)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def check_bytes(self, texts: Iterable[str]) -> None:
        """Raise TooLong if the texts are too long for the context under any tokenization, without encoding them."""
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_bytes > self.max_prompt_bytes:
            longest = self.max_prompt_bytes // self.context
            raise TooLong(-(-num_bytes // longest), is_at_least=True)

    def ask(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, is_wanted: Callable[[], bool]
    ) -> list[int]:
        """Return a conversation as ids, including the start of the assistant's turn.

        Raise Fault if the template rejects the conversation.
        """
        assert self._prompter is not None, "a base model has no chat template"
        for message in messages:
            if len(message["content"]) > _FIRST_PART:  # check long texts before the template makes copies of them
                self._encode(message["content"], is_wanted)
        with self._rendering:
            return self._prompter.prompt(messages, tools)

    def begin(self, prompt: Prompt, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Return the ids of a text, starting with the end-of-text token. A prompt of ids is used as it is."""
        if isinstance(prompt, str):
            return [self.tokenizer.end_of_text_id, *self._encode(prompt, is_wanted)]
        if any(not 0 <= i < self.tokenizer.vocab_size for i in prompt):
            raise BadIds(f"the vocabulary has the ids 0 to {self.tokenizer.vocab_size - 1}")
        return prompt

    def _encode(self, text: str, is_wanted: Callable[[], bool]) -> list[int]:
        """Encode a prefix of the text, then a prefix twice as long, and so on, until the whole text is encoded.

        If the text is far too long, only as much of it is encoded as is needed to detect that. Before each prefix,
        GivenUp is raised if the client has disconnected.
        """
        part = _FIRST_PART
        while True:
            if not is_wanted():
                raise GivenUp
            # Unlike `encode`, this call releases the GIL, so that the server stays responsive.
            (ids,) = self.tokenizer.encode_many([text[:part]])
            if part >= len(text):
                return ids
            # The rest of the text may change the last tokens of this part, so allow twice the context.
            if len(ids) > 2 * self.context:
                raise TooLong(len(ids), is_at_least=True)
            part *= 2

    # -- texts ---------------------------------------------------------------------------------------------------------

    def prepare(self, wanted: Wanted, generation: Generation) -> list[TextRequest]:
        """Encode the prompts of a request, create its choices, and return what to generate for each of them."""

        def is_wanted() -> bool:
            return generation.is_wanted

        if wanted.messages is not None:
            prompts = [self.ask(wanted.messages, wanted.tools, is_wanted)]
        else:
            prompts = [self.begin(prompt, is_wanted) for prompt in wanted.prompts]
        if problems := check_settings(wanted.sampling, self._model.shape.vocab_size):
            raise UsageError(what="Invalid sampling settings.", why="; ".join(problems))
        constraint = self._grammars.constraint(wanted.json_schema) if wanted.is_json else None
        texts = []
        for ids in prompts:
            room = self.context - len(ids)
            # Scoring a prompt needs no room for new tokens.
            if room < (0 if wanted.num_tokens == 0 else 1):
                raise TooLong(len(ids), is_at_least=False)
            num_scores = wanted.num_texts * min(wanted.num_tokens, room) * (wanted.num_logprobs or 0)
            if num_scores > MOST_SCORES:
                raise UsageError(
                    what="The request asks for too many log-probabilities.",
                    why=f"Texts x tokens x alternatives are {num_scores:,}; at most {MOST_SCORES:,} are allowed.",
                )
            generation.prompts.append(ids)
            for number in range(wanted.num_choices):
                wants_tokens = wanted.num_logprobs is not None
                place = len(generation.choices)
                # Clients that score a prompt, such as lm-eval, expect one token after it, even if the text ends there.
                wants_stop = wanted.messages is None
                hides_specials = wanted.hides_specials and not wanted.tools  # they may mark tool calls
                generation.choices.append(
                    Choice(generation, place, self.tokenizer, wanted.stop, wants_tokens, wants_stop, hides_specials)
                )
                own = constraint.copy() if constraint is not None else None
                texts.append(self._request(ids, min(wanted.num_tokens, room), wanted, number, own))
        return texts

    def _request(
        self, ids: list[int], num_tokens: int, wanted: Wanted, number: int, constraint: JsonConstraint | None
    ) -> TextRequest:
        return TextRequest(
            ids,
            num_tokens,
            dataclasses.replace(wanted.sampling, seed=wanted.sampling.seed + number),
            stop_ids=self._stop_ids,
            num_logprobs=wanted.num_logprobs,
            # A prompt that is only echoed is scored too, because a text must have tokens or scores.
            scores_prompt=wanted.is_echoed and (wanted.num_logprobs is not None or not wanted.num_tokens),
            constraint=constraint,
        )

    @property
    def _stop_ids(self) -> Sequence[int]:
        """Return the tokens that end a text. A chat model's turn also ends a text completion.

        Its exported generation_config.json says the same, so transformers and vLLM stop there too.
        """
        return self._prompter.stop_ids if self._prompter else self.tokenizer.stop_ids

    def begin_embedding(self, prompt: Prompt, is_wanted: Callable[[], bool] = lambda: True) -> list[int]:
        """Return the ids of a text to embed. Raise GivenUp if the text is no longer wanted."""
        ids = self.begin(prompt, is_wanted)
        if len(ids) > self.context:
            raise TooLong(len(ids), is_at_least=False)
        return ids

    @torch.no_grad()
    def embed(self, ids: list[int]) -> bytes:
        """Return the mean of the last hidden states of the tokens, as 32-bit floats in little-endian order."""
        with on_gpu(self._model.device):  # called in the thread that generates
            hidden_BTD = self._model.hidden(torch.tensor([ids], device=self._model.device))
            return hidden_BTD[0].float().mean(dim=0).cpu().numpy().astype("<f4").tobytes()
