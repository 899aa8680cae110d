"""Generates many texts at once (continuous batching): texts join and leave while the others continue.

    add(text) -> waiting -> [ a free row, with the longest known beginning of the prompt copied from any row ]
              -> the rest of the prompt, in chunks -> first token
              -> [ one step for all rows: one token of each text ] ...            -> the row is free, its keys are kept

All rows share one KV cache, and each has its own position. One step reads the weights once for all texts, so sixty-four
texts take little longer than one. `step` reads at most PROMPT_TOKENS of waiting prompts and then generates one token
for each text, so a long prompt delays the others only a little.

Rows in use are kept at the low numbers, because a step computes the first 1, 2, 4, ... rows. A finished text's keys
stay in the cache until their row is needed. If a later prompt begins with the same tokens, such as the next turn of a
conversation or another answer to the same prompt, that part is copied and not computed again.

A constraint, such as a JSON schema, is asked in a thread which tokens may come next, while the model computes their
logits. If the answer is late, the text pauses: its logits are kept, the others go on, and it joins them again when the
answer is there. So a schema that needs tens of milliseconds per token slows down only its own text.

A text gets the same tokens as if it were alone, except where two tokens are so close that rounding decides: matmuls
over a different number of rows round differently.

Not thread-safe: everything here is called from one thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from homing.lm.cuda_graphs import MOST_BYTES, MOST_GRAPHS, RecentGraphs
from homing.lm.decoding_step import Steps, room_for
from homing.lm.device import free_host_bytes, on_gpu
from homing.lm.generate.pick_token import (
    Constraint,
    Picked,
    TokenPicker,
    logprobs_of,
    on_device,
    pick_tokens,
    refuse_bad_settings,
)
from homing.lm.generate.sampling import WORTH, is_stepped, warn
from homing.lm.model import Decoder
from homing.lm.model.attention import RowCache
from homing.sampling_settings import SamplingSettings

__all__ = ["BatchGenerator", "Listener", "TextRequest"]

PROMPT_TOKENS = 512  # number of prompt tokens that one step may read
_FIRST_ROWS = 4
_LEAST_KEPT = 16  # a shorter beginning is read again, which is as fast as copying it
_LOGITS_AT_A_TIME = 2**24  # maximum number of logits at a time when a prompt is scored
_MASK_WAIT_S = 0.001  # how long a step waits for late constraints, all of them together
_MASK_THREADS = 2
_MASK_NICENESS = 10
_CACHE_SHARE = {"cuda": 0.8, "cpu": 0.25}  # of the free memory


@dataclass(frozen=True)
class TextRequest:
    """What to generate. Prompt and new tokens must fit into the context."""

    prompt_ids: Sequence[int]
    num_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_ids: Collection[int] = ()
    num_logprobs: int | None = None  # alternatives to report with each token; None: no log-probabilities
    scores_prompt: bool = False  # also report the log-probability of each prompt token; needs num_logprobs
    constraint: Constraint | None = None  # which tokens may come next


class Listener(Protocol):
    """Receives one text. None of the methods may raise or block."""

    @property
    def is_wanted(self) -> bool:
        """Whether the text is still needed; asked before each token."""

    def scored(self, picked: Sequence[Picked]) -> None:
        """Take the log-probabilities of the next prompt tokens; the first token of a prompt has none."""

    def picked(self, picked: Picked) -> bool:
        """Take the next token; return whether to generate more."""

    def ended(self, *, is_stopped: bool, stop: Picked | None = None) -> None:
        """The text is complete. `is_stopped`: at the stop token `stop` or by `picked`, not by its maximum length."""

    def failed(self, error: Exception) -> None:
        """The text cannot be completed."""


@dataclass(eq=False)
class _Text:
    request: TextRequest
    listener: Listener
    picker: TokenPicker
    last_id: int = -1  # the newest token, which is not in the cache yet
    num_made: int = 0
    is_reading: bool = True  # False once the whole prompt is in the cache
    kept_logits_V: Tensor | None = None  # while the text pauses, because its constraint is late


@dataclass(eq=False)
class _Row:
    ids: list[int] = field(default_factory=list)  # the tokens whose keys and values are in this row
    text: _Text | None = None
    used_at: int = 0


class BatchGenerator:
    """Generates texts with one model. Must be closed, because captured CUDA graphs occupy memory."""

    def __init__(
        self, model: Decoder, *, max_rows: int = 64, memory_share: float = 1.0, notify: Callable[[str], None] = warn
    ) -> None:
        """`memory_share`: how much of the free memory the texts of this model may use."""
        self._model, self._notify = model, notify
        # One place more than the context, where rows without a text write what is never read.
        self._capacity = room_for(model.shape.context + 1)
        self.max_rows = max(1, min(max_rows, _rows_in_memory(model, self._capacity, memory_share)))
        self._rows: list[_Row] = []
        self._cache: RowCache | None = None
        self._steps: dict[int, Steps[Tensor]] = {}  # by number of rows, which is a power of two
        # One bound for all numbers of rows. Several models have the bound of one together.
        self._graphs = RecentGraphs(
            model.device,
            most_graphs=max(4, int(MOST_GRAPHS * memory_share)),
            most_bytes=int(MOST_BYTES * memory_share),
        )
        self._waiting: deque[_Text] = deque()
        self._clock = 0
        self._threads: ThreadPoolExecutor | None = None
        self.num_reused = 0  # number of prompt tokens that were copied and not computed

    @property
    def num_active(self) -> int:
        return sum(row.text is not None for row in self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.num_active

    def add(self, request: TextRequest, listener: Listener) -> None:
        """Queue a text. Raises UsageError if its settings are invalid."""
        problems = []
        if not request.prompt_ids:
            problems.append("the prompt has no tokens")
        elif len(request.prompt_ids) + request.num_tokens > self._model.shape.context:
            problems.append(f"the prompt plus the new tokens exceed the context of {self._model.shape.context} tokens")
        if request.num_tokens < 0 or (request.num_tokens == 0 and not request.scores_prompt):
            problems.append(f"the number of new tokens must be 1 or more, not {request.num_tokens}")
        if any(not 0 <= i < self._model.shape.vocab_size for i in request.prompt_ids):
            problems.append(f"the prompt contains ids outside the vocabulary of {self._model.shape.vocab_size} tokens")
        refuse_bad_settings(request.sampling, self._model.shape.vocab_size, problems)
        picker = TokenPicker(
            request.sampling, request.prompt_ids, num_logprobs=request.num_logprobs, constraint=request.constraint
        )
        picker.begin_mask(self._mask_threads)
        self._waiting.append(_Text(request, listener, picker))

    @torch.no_grad()
    def step(self) -> None:
        """Read a part of the waiting prompts, then generate one token for each text."""
        with on_gpu(self._model.device):
            self._step()

    def _step(self) -> None:
        self._drop_unwanted()
        try:
            self._read_prompts()
            self._drop_unwanted()
            self._resume()
            self._decode()
        except Exception as error:  # such as out of memory: no text can continue, but later ones may
            texts = [row.text for row in self._rows if row.text is not None]
            for text in texts:
                text.listener.failed(error.with_traceback(None))  # the traceback would keep tensors in memory
            self._forget()
            self._check_gpu()

    def _check_gpu(self) -> None:
        """Raise an error if the GPU cannot be used any more, as after an illegal address.

        The caller then reports that it failed, and does not accept texts that could not be generated.
        """
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        for steps in self._steps.values():
            steps.close()
        self._forget()

    # -- texts come and go ---------------------------------------------------------------------------------------------

    def _drop_unwanted(self) -> None:
        self._waiting = deque(text for text in self._waiting if text.listener.is_wanted)
        for row in self._rows:
            if row.text is not None and not row.text.listener.is_wanted:
                row.text = None

    def _read_prompts(self) -> None:
        budget = PROMPT_TOKENS
        while budget > 0:
            row = next((row for row in self._rows if row.text is not None and row.text.is_reading), None)
            if row is None:
                if not self._waiting or not self._make_room():
                    return
                row = self._seat(self._waiting.popleft())
            budget -= self._read(row, budget)

    def _make_room(self) -> bool:
        """Return True if there is a row for one more text, after adding rows if needed; False if it has to wait."""
        wanted = min(_bucket(self.num_active + 1), self.max_rows)
        if self.num_active >= self.max_rows:
            return False
        if len(self._rows) < wanted or not self._rows:
            try:
                self._grow(min(max(wanted, _FIRST_ROWS), self.max_rows))
            except RuntimeError as error:  # out of memory
                self._check_gpu()
                if not self._rows:
                    self._waiting.popleft().listener.failed(error.with_traceback(None))
                    return False
                self.max_rows = len(self._rows)
                self._notify(f"warning: there is memory for {self.max_rows} texts at once, and others wait.")
                return self.num_active < self.max_rows
        return True

    def _seat(self, text: _Text) -> _Row:
        """Give the text a row, with as much of its prompt as any row already contains."""
        wanted = _bucket(self.num_active + 1)
        prompt = list(text.request.prompt_ids)
        # The last prompt token is always computed, because its logits are needed.
        donor, num_shared = self._longest_beginning(prompt[:-1])
        if text.request.scores_prompt or num_shared < _LEAST_KEPT:
            num_shared = 0
        low = [row for row in self._rows[:wanted] if row.text is None]
        row = min(low, key=lambda each: each.used_at)
        if num_shared and donor in low and num_shared * 2 >= len(donor.ids):
            row = donor  # the same conversation continues in its own row
        elif row.ids and row is not donor:
            self._keep(row, spare=donor)
        if num_shared and donor is not row:
            self._copy(donor, row, num_shared)
        row.ids, row.text = prompt[:num_shared], text
        self.num_reused += num_shared
        self._touch(row)
        return row

    def _longest_beginning(self, ids: list[int]) -> tuple[_Row, int]:
        best, most = self._rows[0], 0
        for row in self._rows:
            shared = _num_shared(row.ids, ids)
            if shared > most:
                best, most = row, shared
        return best, most

    def _keep(self, row: _Row, *, spare: _Row | None = None) -> None:
        """Save the keys of a row that is about to be overwritten, in the free row that was unused for longest.

        The row `spare` is not overwritten.
        """
        others = [each for each in self._rows if each.text is None and each is not row and each is not spare]
        if others and (oldest := min(others, key=lambda each: each.used_at)).used_at < row.used_at:
            self._copy(row, oldest, len(row.ids))
            oldest.ids, oldest.used_at = row.ids, row.used_at

    def _touch(self, row: _Row) -> None:
        self._clock += 1
        row.used_at = self._clock

    # -- the cache -----------------------------------------------------------------------------------------------------

    def _grow(self, num_rows: int) -> None:
        model, old = self._model, self._cache
        for steps in self._steps.values():
            steps.close()
        self._steps.clear()
        self._cache = RowCache(
            model.shape, batch=num_rows, capacity=self._capacity, device=model.device, dtype=model.compute_dtype
        )
        if old is not None:
            self._cache.take_over(old)
        self._rows += [_Row() for _ in range(num_rows - len(self._rows))]

    def _copy(self, source: _Row, target: _Row, num_places: int) -> None:
        assert self._cache is not None, "there are rows, so there is a cache"
        self._cache.copy_row(self._rows.index(source), self._rows.index(target), num_places)

    def _forget(self) -> None:
        for steps in self._steps.values():
            steps.close()
        self._steps.clear()
        self._rows, self._cache = [], None

    # -- computation ---------------------------------------------------------------------------------------------------

    def _read(self, row: _Row, most: int) -> int:
        """Read the next part of a prompt and return its length; after the last part, pick the first token."""
        text, model = row.text, self._model
        assert text is not None, "only rows with a text are read"
        assert self._cache is not None, "there are rows, so there is a cache"
        request, start = text.request, len(row.ids)
        if request.scores_prompt:
            most = min(most, max(1, _LOGITS_AT_A_TIME // model.shape.vocab_size))
        part = list(request.prompt_ids[start : start + most])
        number = self._rows.index(row)
        before = row.ids[-1:] if start else []
        view = self._cache.row(
            number,
            start,
            model.embedding_for_next(on_device(before, torch.int64, model.device).unsqueeze(0)) if before else None,
        )
        ids_BT = on_device(part, torch.int64, model.device).unsqueeze(0)
        if request.scores_prompt:
            logits_TV = model(ids_BT, cache=view)[0]
            self._score(text, logits_TV, start)
            logits_V = logits_TV[-1]
        else:
            logits_V = model.next_logits(ids_BT, view)[0]
        self._cache.set_embedded(number, view)
        row.ids += part
        if len(row.ids) == len(request.prompt_ids):
            text.is_reading = False
            if request.num_tokens == 0:
                self._finish(row, is_stopped=False)
            else:
                self._deliver([row], logits_V.unsqueeze(0))
        return len(part)

    def _score(self, text: _Text, logits_TV: Tensor, start: int) -> None:
        ids = text.request.prompt_ids[start + 1 : start + 1 + len(logits_TV)]
        if ids:
            counts = [text.request.num_logprobs or 0] * len(ids)
            text.listener.scored(logprobs_of(logits_TV[: len(ids)], ids, counts))

    def _decode(self) -> None:
        """Generate the next token of each text."""
        self._compact()
        active = [
            (number, row)
            for number, row in enumerate(self._rows)
            if row.text is not None and not row.text.is_reading and row.text.kept_logits_V is None
        ]
        if not active:
            return
        assert self._cache is not None, "there are rows, so there is a cache"
        num_rows = min(_bucket(active[-1][0] + 1), len(self._rows))
        ids = [0] * num_rows
        places = [self._capacity - 1] * num_rows
        for number, row in active:
            assert row.text is not None
            ids[number], places[number] = row.text.last_id, len(row.ids)
        if num_rows not in self._steps:
            view = self._cache.first(num_rows)
            self._steps[num_rows] = Steps(
                self._model, view, _as_they_are, is_captured=is_stepped(self._model.device), notify=self._not_captured,
                graphs=self._graphs,
            )  # fmt: skip
        logits_BV = self._steps[num_rows].step(
            torch.tensor(ids), torch.tensor(places), furthest=max(places[number] for number, _ in active),
            is_worth=self._longest_to_come() >= WORTH,
        )  # fmt: skip
        for _, row in active:
            assert row.text is not None
            row.ids.append(row.text.last_id)
        numbers = [number for number, _ in active]
        if numbers != list(range(num_rows)):
            logits_BV = logits_BV[on_device(numbers, torch.int64, logits_BV.device)]
        self._deliver([row for _, row in active], logits_BV)

    def _deliver(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        """Pick the next token of each row and pass it to the row's listener. Texts whose constraint is late pause."""
        until = time.monotonic() + _MASK_WAIT_S
        ready = []
        for number, row in enumerate(rows):
            if self._is_ready(row, until):
                ready.append(number)
            elif row.text is not None:  # a copy, because the next step overwrites the logits
                row.text.kept_logits_V = logits_BV[number].clone()
        if len(ready) < len(rows):
            rows = [rows[number] for number in ready]
            logits_BV = logits_BV[on_device(ready, torch.int64, logits_BV.device)]
        if not rows:
            return
        texts = [row.text for row in rows if row.text is not None]
        for row, text, picked in zip(rows, texts, pick_tokens(logits_BV, [t.picker for t in texts]), strict=True):
            if picked.id in text.request.stop_ids:
                self._finish(row, is_stopped=True, stop=picked)
                continue
            text.last_id = picked.id
            text.num_made += 1
            if not text.listener.picked(picked):
                self._finish(row, is_stopped=True)
            elif text.num_made == text.request.num_tokens:
                self._finish(row, is_stopped=False)
            else:
                text.picker.begin_mask(self._mask_threads)

    def _is_ready(self, row: _Row, until: float) -> bool:
        """Whether it is known which tokens may come next in this text. If that fails, only this text ends."""
        assert row.text is not None, "only a row with a text is delivered"
        try:
            return row.text.picker.is_prepared(max(0.0, until - time.monotonic()))
        except Exception as error:
            text, row.text = row.text, None
            text.listener.failed(error)
            return False

    def _resume(self) -> None:
        """Pick the next token of texts that paused and whose constraint is there now."""
        paused = [row for row in self._rows if row.text is not None and row.text.kept_logits_V is not None]
        if not paused:
            return
        if self.num_active == len(paused) and not self._waiting:  # nothing else to do
            coming = [row.text.picker.coming for row in paused if row.text is not None]
            wait([each for each in coming if each is not None], timeout=_MASK_WAIT_S, return_when=FIRST_COMPLETED)
        now = time.monotonic()
        ready = [row for row in paused if self._is_ready(row, now)]
        logits = []
        for row in ready:
            assert row.text is not None
            assert row.text.kept_logits_V is not None
            logits.append(row.text.kept_logits_V)
            row.text.kept_logits_V = None
        if ready:
            self._deliver(ready, torch.stack(logits))

    def _mask_threads(self) -> ThreadPoolExecutor:
        """Return the threads that compute masks. They must not take the processor from the one that generates."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MASK_THREADS, "homing-masks", initializer=_yield_to_others)
        return self._threads

    def _finish(self, row: _Row, *, is_stopped: bool, stop: Picked | None = None) -> None:
        text, row.text = row.text, None
        self._touch(row)
        assert text is not None, "only a row with a text ends one"
        text.listener.ended(is_stopped=is_stopped, stop=stop)

    def _compact(self) -> None:
        """Move texts to lower rows, if a step can then compute fewer rows."""
        while True:
            busy = [row for row in self._rows if row.text is not None]
            if not busy or _bucket(self._rows.index(busy[-1]) + 1) <= _bucket(len(busy)):
                return
            target = next(row for row in self._rows if row.text is None)
            last = busy[-1]
            if target.ids:
                self._keep(target)
            self._copy(last, target, len(last.ids))
            target.ids, target.text, target.used_at = last.ids, last.text, last.used_at
            last.ids, last.text, last.used_at = [], None, 0

    def _longest_to_come(self) -> int:
        return max(row.text.request.num_tokens - row.text.num_made for row in self._rows if row.text is not None)

    def _not_captured(self, problem: str) -> None:
        self._notify(f"warning: CUDA graphs failed; generation continues without them and is slower. {problem}")


def _yield_to_others() -> None:
    """Lower the priority of this thread. Linux has priorities of threads; elsewhere this would change the process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _MASK_NICENESS)


def _as_they_are(logits_BV: Tensor) -> Tensor:
    return logits_BV


def _bucket(num_rows: int) -> int:
    """Return the number of rows that a step computes, if it needs the first `num_rows`: a power of two."""
    return 1 << max(0, math.ceil(math.log2(num_rows)))


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    most = min(len(first), len(second))
    if list(first[:most]) == list(second[:most]):
        return most
    return next(place for place in range(most) if first[place] != second[place])


def _rows_in_memory(model: Decoder, capacity: int, memory_share: float) -> int:
    """Return the number of rows whose keys and values fit into a share of the free memory."""
    shape = model.shape
    per_row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * capacity * model.compute_dtype.itemsize
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = free_host_bytes() or 4 << 30  # macOS does not say how much is free
    # Growing needs the old and the new cache at once, and the old one has at most half as many rows.
    return int(free * memory_share * _CACHE_SHARE.get(model.device.type, 0.25)) * 2 // 3 // per_row
