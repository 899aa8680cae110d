"""`homing.load(name)` returns a trained model, which can generate, chat, score, be evaluated and be exported.

`load` imports torch; importing this module does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.api.models.open_model import OpenModel, open_model
from homing.errors import UsageError
from homing.sampling_settings import SamplingSettings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Model", "Score", "load"]


@dataclass(frozen=True)
class Score:
    bits_per_byte: float
    tokens: list[int]
    log_probs: list[float]  # natural logarithm, one per token


class Model(OpenModel):
    """A trained model and its tokenizer."""

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        stop: Sequence[str] = (),
        seed: int | None = None,
        **settings: float,
    ) -> str:
        """Return the continuation of the prompt, without the prompt.

        `settings`: `top_p`, `min_p`, `repetition_penalty`, `presence_penalty` and `frequency_penalty`.
        """
        from homing.api.models.generate_text import continue_text, with_seed

        sampling = with_seed(_sampling(temperature, top_k, settings), seed)
        return "".join(continue_text(self, prompt, tokens=tokens, sampling=sampling, stop=stop))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        stop: Sequence[str] = (),
        seed: int | None = None,
        **settings: float,
    ) -> str:
        """Return the answer to the last message. `messages`: a question, or dicts with `role` and `content`.

        `settings`: as for `generate`.
        """
        from homing.api.models.chat_session import ChatSession

        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
        roles = [message.get("role") for message in said]
        if roles != (["user", "assistant"] * len(roles))[: len(roles)] or len(roles) % 2 == 0:
            raise UsageError(
                what="The messages are not a conversation that ends with a question.",
                why=f"Roles: {', '.join(map(str, roles)) or 'none'}. They must alternate: user, assistant, ..., user.",
                fix='model.chat([{"role": "user", "content": "Hello"}])',
            )
        sampling = _sampling(temperature, top_k, settings)
        session = ChatSession(self, tokens=tokens, sampling=sampling, stop=stop, seed=seed, is_conversation=True)
        for question, answer in zip(said[:-1:2], said[1::2], strict=True):
            session.recall(question["content"], answer["content"])
        return "".join(session.reply(said[-1]["content"]))

    def logits(self, text_or_ids: str | Sequence[int]) -> Tensor:
        """Return the logits (tokens, vocabulary) in fp32; a text is preceded by the end-of-text token."""
        import torch

        ids = list(text_or_ids) if not isinstance(text_or_ids, str) else self._ids(text_or_ids)
        if len(ids) > self.model.shape.context:
            raise UsageError(
                what=f"{len(ids):,} tokens do not fit in the model's context of {self.model.shape.context:,}.",
                fix="Pass a shorter text.",
            )
        with torch.inference_mode():
            logits_TV: Tensor = self.model(torch.tensor([ids], device=self.model.device))[0]
            return logits_TV

    def score(self, text: str) -> Score:
        """Return how well the model predicts the text: bits per byte, and the log-probability of each token."""
        import torch

        ids = self._ids(text)
        if len(ids) < 2:
            raise UsageError(what="There is no text to score.", fix='Pass text, for example: model.score("some text")')
        log_probs = torch.log_softmax(self.logits(ids)[:-1].double(), dim=-1)
        taken = log_probs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
        return Score(-sum(taken) / math.log(2) / len(text.encode()), ids[1:], taken)

    def export(self, to: str = "hf", out: str | Path | None = None, *, licence: str = "", force: bool = False) -> Path:
        """Export the model for other tools (hf, gguf, ollama, adapter, merged), verify it, and return its folder."""
        from homing.api.models.export_model import export_model

        target = Path(out) if out is not None else None
        return export_model(self, to=to, out=target, licence=licence, force=force).out

    def eval(
        self,
        *,
        text: Sequence[str] = (),
        task: Sequence[str] = (),
        chat: Sequence[str] = (),
        text_field: str = "text",
        pass_at: Sequence[int] = (),
        samples: int = 0,
        temperature: float | None = None,
        new_tokens: int | None = None,
        window: int = 0,
        at_most: int = 0,
        seed: int = 0,
        out: str | Path | None = None,
    ) -> dict[str, Any]:
        """Measure the model on text, tasks and conversations, each figure with a 95% interval, like `homing eval`.

        If `text`, `task` and `chat` are empty, its run's held-out data is used. Returns what `homing eval --json`
        prints; `out` also writes the report (.md, and a .json next to it).
        """
        from homing.api.models.eval_model import eval_model

        done = eval_model(
            self,
            text=text,
            task=task,
            chat=chat,
            text_field=text_field,
            pass_at=pass_at,
            samples=samples,
            temperature=temperature,
            new_tokens=new_tokens,
            window=window,
            at_most=at_most,
            seed=seed,
            out=Path(out) if out is not None else None,
        )
        return done.document

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"Model({str(self.folder)!r}, {count:,} parameters, {self.model.device})"

    def _ids(self, text: str) -> list[int]:
        return [self.tokenizer.end_of_text_id, *self.tokenizer.encode(text)]


def _sampling(temperature: float, top_k: int, settings: dict[str, float]) -> SamplingSettings:
    try:
        return SamplingSettings(temperature=temperature, top_k=top_k, **settings)  # type: ignore[arg-type]
    except TypeError:
        known = [each.name for each in fields(SamplingSettings)]
        raise UsageError(
            what=f"Unknown sampling setting: {', '.join(sorted(settings.keys() - set(known)))}.",
            why=f"Known settings: {', '.join(known)}.",
            fix="Use only known settings, for example: model.generate(prompt, temperature=0.7, top_p=0.9)",
        ) from None


def load(
    name_or_path: str | Path | None = None,
    *,
    checkpoint: str | None = None,
    phase: str | None = None,
    device: str = "auto",
    base: str = "",
) -> Model:
    """Load a trained model by the name or id of its run, or by its folder; None: the newest finished one."""
    opened = open_model(name_or_path, verb="generate", checkpoint=checkpoint, phase=phase, device=device, base=base)
    return Model(opened.folder, opened.model, opened.tokenizer)
