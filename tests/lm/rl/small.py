"""A run of rl on a tiny model: its data, its settings, and a model that can be sampled from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tiny import count_params, make_data, make_run

from homing.lm.model import Decoder
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.wire.run_json import Rl, RlTask, Run

__all__ = ["make_rl_run", "small_model"]

ADDITION = RlTask(kind="arithmetic")


def make_rl_run(folder: Path, *, tasks: list[RlTask] | None = None, phase: dict[str, Any] | None = None,
                context: int = 48, **rl: Any) -> Run:  # fmt: skip
    """The keywords change the phase's rl; `phase` changes the phase."""
    if not folder.exists():
        make_data(folder, num_documents=20, specials=SPECIALS["standard"])
    settings = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "eval_prompts": 8} | rl
    run = make_run(
        folder, kind="rl", rl=Rl(tasks=tasks or [ADDITION], **settings), batch_tokens=16 * context,
        **({"num_steps": 4, "micro_batch": 8, "eval_every": 2, "save_every": 2} | (phase or {})),
    )  # fmt: skip
    model = dataclasses.replace(run.model, context=context)
    num_params, num_matmul_params = count_params(model)
    sizes = dataclasses.replace(run.sizes, num_params=num_params, num_matmul_params=num_matmul_params)
    return dataclasses.replace(run, model=model, sizes=sizes)


def small_model(run: Run, **shape: Any) -> Decoder:
    model = Decoder(dataclasses.replace(run.model, **shape))
    model.init_weights(3)
    return model
