"""How the next token is picked: the sampling settings of generate, chat, serve and samples, and their valid values.

Loads neither torch nor a model; `lm.generate.pick_token` applies the settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

__all__ = ["COLDEST", "DEFAULT_SAMPLING", "SamplingSettings", "check_settings"]

COLDEST = 1e-6  # below this, sampling is already greedy, and dividing logits by a tiny number would overflow

_RANGES = {
    "temperature": "0 or more",
    "top_p": "more than 0 and at most 1",
    "min_p": "from 0 to 1",
    "repetition_penalty": "more than 0",
    "presence_penalty": "a finite number",
    "frequency_penalty": "a finite number",
}


@dataclass(frozen=True)
class SamplingSettings:
    """How to pick tokens. The defaults of homing are a temperature of 0.8 and the 50 likeliest tokens."""

    temperature: float = 0.8  # 0 picks the likeliest token
    top_k: int = 50  # keep this many of the likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together have this probability
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest token's probability
    repetition_penalty: float = 1.0  # divides the logits of tokens in the prompt and the text, as in transformers
    presence_penalty: float = 0.0  # subtracted once from the logit of each token in the text, as in OpenAI's API
    frequency_penalty: float = 0.0  # subtracted for each time the token is in the text
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> what to add to its logit
    seed: int = 0

    def describe(self) -> str:
        """Return the settings in a line: temperature, top-k, those that are not the default, and the seed."""
        others = (
            f"{each.name.replace('_', '-')} {getattr(self, each.name):g}"
            for each in fields(self)
            if each.name not in ("temperature", "top_k", "seed", "logit_bias")
            and getattr(self, each.name) != each.default
        )
        biased = [f"{len(self.logit_bias)} biased tokens"] if self.logit_bias else []
        parts = [f"temperature {self.temperature:g}", f"top-k {self.top_k}", *others, *biased, f"seed {self.seed}"]
        return ", ".join(parts)


DEFAULT_SAMPLING = SamplingSettings()


def check_settings(settings: SamplingSettings, vocab_size: int) -> list[str]:
    """Return a sentence for each invalid setting."""
    problems = []
    for name, least, most in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf),
        ("presence_penalty", -math.inf, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
    ):
        value = getattr(settings, name)
        is_inside = math.isfinite(value) and least <= value <= most
        if not is_inside or (value == 0 and name in ("top_p", "repetition_penalty")):
            problems.append(f"{name} is {value}; it must be {_RANGES[name]}")
    if settings.top_k < 0:
        problems.append(f"top_k is {settings.top_k}; it must be 0 (no limit) or more")
    if unknown := [i for i in settings.logit_bias if not 0 <= i < vocab_size]:
        problems.append(f"logit_bias names token {unknown[0]}, but the vocabulary has {vocab_size} tokens")
    if any(math.isnan(bias) for bias in settings.logit_bias.values()):
        problems.append("logit_bias contains a value that is not a number")
    return problems
