"""Generates all samples of an rl step (a rollout) in one batch of prompts x samples rows, with a KV cache.

    prompts, padded on the right -> prefill each once -> copy to the rows of their samples
    -> [ one token of each row -> on the host: is it a stop token, does it end a calculator call, what comes next ] ...

Each row has its own position, so no prompt waits for another. Finished rows are still computed but ignored, so that
shapes stay the same. The loop starts with each prompt's last token, so the prefill needs no logits. The caller supplies
each row's random draws (see `named_random`). Rows do not depend on each other.

Sampling uses a copy of the weights in the compute dtype (`lean_copy`), because a step reads every weight to generate
one token per row. With fp32 weights, each step would read twice as many bytes and would have to cast them. The results
are the same, because the weights would be cast to that dtype anyway.

Shapes: P prompts, B rows, V vocabulary, N new tokens, T positions of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from homing.errors import RunFailed
from homing.lm.cuda_graphs import RecentGraphs
from homing.lm.decoding_step import REACH, Steps, room_for
from homing.lm.device import free_memory
from homing.lm.model import Decoder, lora
from homing.lm.model.attention import RowCache
from homing.lm.model.swift import SwiftStack
from homing.lm.rl.calculator import Calculator
from homing.lm.rl.named_random import pick_rows

__all__ = ["Decoding", "Sample", "Sampler", "copy_weights", "lean_copy"]


@dataclass(frozen=True)
class Sample:
    """The tokens generated after a prompt, including the stop token and tokens that a tool inserted."""

    ids: list[int]
    is_own: list[bool]  # whether the model chose the token; False if a tool inserted it
    is_ended: bool  # False if the sample was truncated at the maximum length
    entropy: float  # mean entropy of the model's predictions, in nats, over the tokens that it chose

    @property
    def is_empty(self) -> bool:
        return self.is_ended and len(self.ids) == 1


class Sampler:
    """Generates samples. Create one sampler per phase, because it keeps buffers and CUDA graphs between steps."""

    def __init__(
        self, model: Decoder, *, stop_ids: Sequence[int], calculator: Calculator | None, max_new_tokens: int,
        temperature: float, top_k: int, rows_at_a_time: int = 0, graphs: str = "off",
        notify: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:  # fmt: skip
        self.model, self._notify = model, notify
        # With adapters, use the model itself: its frozen weights are stored in the compute dtype or a smaller one, and
        # merging the adapters into a bf16 copy would round away much of their effect.
        is_read_itself = model.lora is not None or all(p.dtype == model.compute_dtype for p in model.parameters())
        self._reader = model if is_read_itself else lean_copy(model, model.compute_dtype)
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
        self._calculator = calculator
        self._num_new, self._temperature, self._top_k = max_new_tokens, temperature, top_k
        self._rows_at_a_time = rows_at_a_time
        self._graphs, self._is_captured = graphs, graphs != "off" and model.device.type == "cuda"
        self._kept: Decoding | None = None

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], draws_BN: NDArray[np.int64], *, may_call: Sequence[bool] | None = None
    ) -> list[Sample]:
        """Return `len(draws_BN) / len(prompts)` samples for each prompt, in the order of the prompts."""
        if self._reader is not self.model:
            copy_weights(self.model, self._reader)
        repeats = len(draws_BN) // len(prompts)
        assert repeats * len(prompts) == len(draws_BN), "every prompt must have the same number of samples"
        with lora.lengths_held(self.model):
            return self._in_parts(prompts, draws_BN, may_call, repeats)

    def _in_parts(
        self, prompts: Sequence[Sequence[int]], draws_BN: NDArray[np.int64], may_call: Sequence[bool] | None,
        repeats: int,
    ) -> list[Sample]:  # fmt: skip
        samples: list[Sample] = []
        while len(samples) < len(draws_BN):
            done = len(samples) // repeats
            at_a_time = max(1, (self._rows_at_a_time or len(draws_BN)) // repeats)
            part = slice(done, done + at_a_time)
            rows = slice(part.start * repeats, part.stop * repeats)
            tools = [may_call is None or may_call[number] for number in range(len(prompts))][part]
            try:
                samples += self._sample(prompts[part], draws_BN[rows], tools)
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            else:
                continue
            self._halve(at_a_time, repeats, problem)
        return samples

    def _sample(
        self, prompts: Sequence[Sequence[int]], draws_BN: NDArray[np.int64], may_call: list[bool]
    ) -> list[Sample]:
        repeats = len(draws_BN) // len(prompts)
        decoding = self._open(prompts, repeats)
        rows = _Rows([list(ids) for ids in prompts for _ in range(repeats)], self._num_new)
        tools = self._calculator
        can_call = np.array([tools is not None and allowed for allowed in may_call for _ in range(repeats)])
        device, entropies = self.model.device, []
        # Copy the random draws for all steps to the device in one transfer. Each step uses one row.
        draws_NB = torch.from_numpy(np.ascontiguousarray(draws_BN.T)).to(device)
        while not rows.is_over:
            ids_B, places_B = torch.from_numpy(rows.last), torch.from_numpy(rows.places)
            picked_B, entropy_B = decoding.step(
                ids_B, places_B, draws_NB[rows.num_steps], furthest=int(rows.places.max())
            )
            entropies.append(entropy_B.clone())
            rows.take(picked_B.cpu().numpy(), self._stop_ids)
            if tools is not None:
                for row in np.flatnonzero(can_call & rows.was_open & np.isin(rows.last, tools.call_ends)).tolist():
                    if words := tools.answer(rows.written(row)):
                        rows.insert(row, words)
        if self._kept is not decoding:
            del decoding
        return rows.samples(torch.stack(entropies).cpu().numpy())

    def _open(self, prompts: Sequence[Sequence[int]], repeats: int) -> Decoding:
        """Prefill the prompts into a cache with one row per sample.

        The first decoding step processes the last token of each prompt again, to get its logits.
        """
        model, num_rows = self._reader, len(prompts) * repeats
        longest = max(map(len, prompts))
        decoding = self._decoding(num_rows, longest + self._num_new)
        cache, ids_PT = decoding.cache, torch.zeros(len(prompts), longest, dtype=torch.int64)
        for number, ids in enumerate(prompts):
            ids_PT[number, : len(ids)] = torch.tensor(ids)
        ids_PT = ids_PT.to(model.device)
        read = model.new_cache(batch=len(prompts), capacity=longest)
        model.model(ids_PT, slice(0, longest), read, model.compute_dtype)
        cache.fill(read, repeats=repeats)
        if isinstance(model.model, SwiftStack):
            cache.embedded_B1D = _embedded_before_last(model, ids_PT, [len(ids) for ids in prompts], repeats)
        return decoding

    def _decoding(self, num_rows: int, num_places: int) -> Decoding:
        kept = self._kept
        if kept and len(kept.cache.places_B) == num_rows and kept.cache.capacity >= num_places:
            return kept
        model = self._reader
        self._kept = None  # free the old buffers before allocating new ones
        cache = RowCache(
            model.shape, batch=num_rows, capacity=room_for(num_places), device=model.device, dtype=model.compute_dtype
        )
        decoding = Decoding(
            model, cache, temperature=self._temperature, top_k=self._top_k, is_captured=self._is_captured,
            notify=self._not_captured,
        )  # fmt: skip
        self._kept = decoding if self._is_captured else None
        return decoding

    def _not_captured(self, problem: str) -> None:
        """Handle a failed capture: if `graphs` is `auto`, warn and continue without graphs; if `on`, fail the run."""
        if self._graphs == "on":
            raise RunFailed(
                what="Capturing the sampling steps as CUDA graphs failed.",
                why=problem,
                fix="Under rl: in the phase, set graphs: off (slower, but with the same samples) or graphs: auto.",
            )
        self._is_captured, self._kept = False, None
        self._notify(
            "graphs_failed", f"warning: CUDA graphs failed; sampling continues without them and is slower. {problem}"
        )

    def _halve(self, prompts_at_a_time: int, repeats: int, problem: str) -> None:
        self._kept = None
        if prompts_at_a_time == 1:
            raise RunFailed(
                what=f"Out of memory while sampling {repeats} answers to one prompt.",
                why=problem,
                fix="Lower rl.samples_per_prompt or rl.answer_tokens in the phase, or use a GPU with more memory.",
            )
        free_memory()
        self._rows_at_a_time = prompts_at_a_time // 2 * repeats
        text = (
            f"Out of memory while sampling: continuing with {self._rows_at_a_time} rows at a time."
            " The samples stay the same."
        )
        self._notify("rollout_rows_lowered", text)


class _Rows:
    """The state of each row, kept on the host. The next step takes as input each row's last token and its position."""

    def __init__(self, prompts: list[list[int]], num_new: int) -> None:
        self.last = np.array([ids[-1] for ids in prompts], dtype=np.int64)
        self.places = np.array([len(ids) - 1 for ids in prompts], dtype=np.int64)
        self.is_open = np.ones(len(prompts), dtype=bool)
        self.was_open = self.is_open  # value of `is_open` before the most recent token
        self.is_ended = np.zeros(len(prompts), dtype=bool)
        self.lengths = np.zeros(len(prompts), dtype=np.int64)
        self.pending: list[list[int]] = [[] for _ in prompts]  # tokens of a tool's result that are still to be inserted
        self.num_steps, self._num_new = 0, num_new
        self._ids_BN = np.zeros((len(prompts), num_new), dtype=np.int64)
        self._is_own_BN = np.zeros((len(prompts), num_new), dtype=bool)

    @property
    def is_over(self) -> bool:
        return self.num_steps >= self._num_new or not self.is_open.any()

    def take(self, picked: NDArray[np.int64], stop_ids: NDArray[np.int64]) -> None:
        """Append the next token of each open row: a tool's token if one is pending, else the sampled one."""
        is_own = np.ones(len(picked), dtype=bool)
        taken = picked.copy()
        for row, words in enumerate(self.pending):
            if words and self.is_open[row]:
                taken[row], is_own[row] = words.pop(0), False
        n, is_open = self.num_steps, self.is_open
        self._ids_BN[:, n], self._is_own_BN[:, n] = taken, is_own
        self.lengths += is_open
        self.is_ended |= is_open & is_own & np.isin(taken, stop_ids)
        self.last = np.where(is_open, taken, self.last)
        self.places += is_open & ~self.is_ended
        self.was_open, self.is_open = is_open, is_open & ~self.is_ended
        self.num_steps += 1

    def insert(self, row: int, words: list[int]) -> None:
        """Queue the tokens of a tool's result. If the tool call had ended the sample, reopen it."""
        self.pending[row] = words
        if self.is_ended[row]:
            self.is_ended[row], self.is_open[row] = False, True
            self.places[row] += 1

    def written(self, row: int) -> list[int]:
        ids: list[int] = self._ids_BN[row, : self.lengths[row]].tolist()
        return ids

    def samples(self, entropy_NB: NDArray[np.float32]) -> list[Sample]:
        made = []
        for row, length in enumerate(self.lengths.tolist()):
            is_own = self._is_own_BN[row, :length]
            entropy = float(entropy_NB[:length, row][is_own].mean()) if is_own.any() else 0.0
            made.append(Sample(self.written(row), is_own.tolist(), bool(self.is_ended[row]), entropy))
        return made


def _embedded_before_last(model: Decoder, ids_PT: Tensor, lengths: list[int], repeats: int) -> Tensor:
    """Return the embeddings of the prompts' second-to-last tokens; `swift` adds part of them to the last tokens'."""
    before = torch.tensor([[max(0, length - 2)] for length in lengths], device=ids_PT.device)
    x_P1D = model.embedding_for_next(ids_PT.gather(1, before))
    assert x_P1D is not None, "only swift keeps the embedding of the last token"
    has_before = torch.tensor([length > 1 for length in lengths], device=ids_PT.device).view(-1, 1, 1)
    return (x_P1D * has_before).repeat_interleave(repeats, dim=0)


# -- one decoding step -------------------------------------------------------------------------------------------------


class Decoding:
    """Decodes a fixed number of rows, with or without CUDA graphs; see `lm.decoding_step`."""

    def __init__(
        self, model: Decoder, cache: RowCache, *, temperature: float, top_k: int, is_captured: bool,
        notify: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.cache = cache
        self._draws_B = torch.zeros(len(cache.places_B), dtype=torch.int64, device=model.device)
        # Do not pass a bound method: the reference cycle would keep the cache in memory until garbage collection runs.
        pick = partial(_pick, draws_B=self._draws_B, temperature=temperature, top_k=top_k)
        # Every round of sampling goes through all values of `reach` again, so all their graphs are kept.
        graphs = RecentGraphs(model.device, most_graphs=cache.capacity // REACH)
        self._steps = Steps(model, cache, pick, is_captured=is_captured, notify=notify, graphs=graphs, reach=room_for)

    @property
    def is_captured(self) -> bool:
        return self._steps.is_captured

    def step(self, ids_B: Tensor, places_B: Tensor, draws_B: Tensor, *, furthest: int) -> tuple[Tensor, Tensor]:
        """Process `ids_B` at positions `places_B`, none past `furthest`; return sampled ids and entropies in nats.

        The next step may overwrite both returned tensors.
        """
        self._draws_B.copy_(draws_B, non_blocking=True)
        return self._steps.step(ids_B, places_B, furthest=furthest)


def _pick(logits_BV: Tensor, *, draws_B: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    logs_BV = torch.log_softmax(logits_BV, dim=-1)
    # Clamp the logarithm: it is infinite for a probability of 0, which must contribute nothing.
    entropy_B = -(logs_BV.exp() * logs_BV.clamp(min=-1e4)).sum(dim=-1)
    return pick_rows(logits_BV, draws_B, temperature=temperature, top_k=top_k), entropy_B


# -- weights for sampling ----------------------------------------------------------------------------------------------


def lean_copy(model: Decoder, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):  # do not allocate fp32 weights, because they would be replaced below
        copy = Decoder(model.shape)
    for module in copy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=model.device, dtype=dtype)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    copy.model.rope.to(model.device)
    copy.compute_dtype = dtype
    copy_weights(model, copy)
    return copy.eval()


@torch.no_grad()
def copy_weights(model: Decoder, copy: Decoder) -> None:
    for mine, source in zip(copy.parameters(), model.parameters(), strict=True):
        mine.copy_(source)
