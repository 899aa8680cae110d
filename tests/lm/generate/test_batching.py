"""Many texts at once give each text what it gets alone, whoever joins, leaves or shares its beginning."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.lm.streams import StreamsOnly
from tests.lm.test_decoding_step import MODELS, built

from homing.errors import UsageError
from homing.lm.cuda_graphs import MOST_GRAPHS
from homing.lm.decoding_step import REACH
from homing.lm.device import on_gpu
from homing.lm.generate import batching, generate
from homing.lm.generate.batching import BatchGenerator, TextRequest
from homing.lm.generate.pick_token import Picked, TokenPicker, pick_tokens
from homing.lm.model import Decoder
from homing.lm.model.attention import RowCache
from homing.sampling_settings import SamplingSettings

GREEDY = SamplingSettings(temperature=0.0)


class Recorder:
    """Keeps what a text's listener is given; may leave after some tokens."""

    def __init__(self, *, leaves_after: int = 10**9, most: int = 10**9) -> None:
        self.ids: list[int] = []
        self.picks: list[Picked] = []
        self.prompt: list[Picked] = []
        self.is_stopped: bool | None = None
        self.stop: Picked | None = None
        self.error: Exception | None = None
        self._leaves_after, self._most = leaves_after, most

    @property
    def is_wanted(self) -> bool:
        return len(self.ids) < self._leaves_after

    def scored(self, picked: Sequence[Picked]) -> None:
        self.prompt += picked

    def picked(self, picked: Picked) -> bool:
        self.ids.append(picked.id)
        self.picks.append(picked)
        return len(self.ids) < self._most

    def ended(self, *, is_stopped: bool, stop: Picked | None = None) -> None:
        assert self.is_stopped is None, "a text ends once"
        self.is_stopped = is_stopped
        self.stop = stop

    def failed(self, error: Exception) -> None:
        self.error = error


def run(batch: BatchGenerator) -> None:
    for _ in range(10_000):
        if batch.is_idle:
            return
        batch.step()
    raise AssertionError("the batch does not end")


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=length)


@pytest.mark.parametrize("name", MODELS)
def test_texts_in_a_batch_are_those_generated_alone(name: str) -> None:
    model = built(**MODELS[name])
    settings = [GREEDY, SamplingSettings(seed=4), SamplingSettings(top_p=0.9, top_k=0, seed=5)]
    requests = [
        TextRequest(prompt_of(3 + 11 * n, n), 5 + 7 * (n % 4), settings[n % 3], stop_ids=[n]) for n in range(12)
    ]
    recorded = [Recorder() for _ in requests]
    batch = BatchGenerator(model, max_rows=5)
    for number, (request, listener) in enumerate(zip(requests, recorded, strict=True)):
        batch.add(request, listener)
        if number % 3 == 0:
            batch.step()
    run(batch)
    for request, listener in zip(requests, recorded, strict=True):
        alone = list(generate(
            model, request.prompt_ids, num_tokens=request.num_tokens, sampling=request.sampling,
            stop_ids=request.stop_ids,
        ))  # fmt: skip
        assert listener.ids == alone
        assert listener.is_stopped == (len(alone) < request.num_tokens)


@pytest.mark.parametrize("name", ["qwen3, two heads for one", "swift"])
def test_a_known_beginning_is_copied_and_changes_nothing(name: str) -> None:
    model = built(**MODELS[name])
    batch = BatchGenerator(model, max_rows=4)
    system = prompt_of(40, 1)
    texts: dict[int, list[int]] = {who: system + prompt_of(5, 10 + who) for who in range(6)}
    for turn in range(4):
        for who in texts:
            recorded = Recorder()
            batch.add(TextRequest(texts[who], 6, GREEDY), recorded)
            run(batch)
            assert recorded.ids == list(generate(model, texts[who], num_tokens=6, sampling=GREEDY)), (turn, who)
            texts[who] = texts[who] + recorded.ids + prompt_of(4, 100 * turn + who)
    # At least the system prompt is copied each time but the first; most turns find all of their conversation.
    assert batch.num_reused >= 23 * len(system)


def test_several_answers_to_one_prompt_read_it_once() -> None:
    model, batch = built(), BatchGenerator(built(), max_rows=8)
    prompt, recorded = prompt_of(50, 3), [Recorder() for _ in range(6)]
    for number, listener in enumerate(recorded):
        batch.add(TextRequest(prompt, 10, SamplingSettings(seed=number)), listener)
    run(batch)
    assert batch.num_reused == 5 * (len(prompt) - 1)
    for number, listener in enumerate(recorded):
        assert listener.ids == list(generate(model, prompt, num_tokens=10, sampling=SamplingSettings(seed=number)))


def test_a_text_nobody_wants_any_more_leaves_its_row_at_once() -> None:
    batch = BatchGenerator(built(), max_rows=2)
    gone, stays, waits = Recorder(leaves_after=3), Recorder(), Recorder()
    for listener in (gone, stays, waits):
        batch.add(TextRequest(prompt_of(9, 1), 20, GREEDY), listener)
    run(batch)
    assert len(gone.ids) == 3
    assert gone.is_stopped is None
    assert len(stays.ids) == len(waits.ids) == 20


def test_a_listener_can_end_its_text() -> None:
    batch, recorded = BatchGenerator(built()), Recorder(most=4)
    batch.add(TextRequest(prompt_of(5, 1), 20, GREEDY), recorded)
    run(batch)
    assert len(recorded.ids) == 4
    assert recorded.is_stopped is True


def test_texts_come_and_go_in_any_order() -> None:
    model, source = built(), random.Random(7)
    batch = BatchGenerator(model, max_rows=6)
    known: list[tuple[TextRequest, Recorder]] = []
    bases = [prompt_of(60, seed) for seed in range(3)]
    for round_ in range(80):
        if source.random() < 0.5:
            prompt = source.choice(bases)[: source.randint(1, 60)] + prompt_of(source.randint(0, 9), round_)
            leaves = source.choice([10**9, 10**9, source.randint(0, 5)])
            known.append((TextRequest(prompt, source.randint(1, 30), GREEDY), Recorder(leaves_after=leaves)))
            batch.add(*known[-1])
        batch.step()
    run(batch)
    for request, recorded in known:
        alone = list(generate(model, request.prompt_ids, num_tokens=request.num_tokens, sampling=GREEDY))
        assert recorded.ids == alone[: len(recorded.ids)]
        assert recorded.is_stopped is False or len(recorded.ids) == recorded._leaves_after


@pytest.mark.parametrize("name", ["qwen3, two heads for one", "swift"])
def test_logprobs_are_those_of_the_plain_model(name: str) -> None:
    model, recorded = built(**MODELS[name]), Recorder()
    prompt = prompt_of(30, 2)
    batch = BatchGenerator(model)
    batch.add(TextRequest(prompt, 5, SamplingSettings(seed=1), num_logprobs=3, scores_prompt=True), recorded)
    run(batch)
    ids = [*prompt, *recorded.ids]
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([ids]))[0], dim=-1)
    found = [*recorded.prompt, *recorded.picks]
    assert [each.id for each in found] == ids[1:]
    for place, each in enumerate(found):
        assert each.logprob == pytest.approx(float(logs[place, each.id]), abs=1e-4)
        assert [i for i, _ in each.top] == logs[place].topk(3).indices.tolist()


def test_a_prompt_can_be_scored_without_generating() -> None:
    batch, recorded = BatchGenerator(built()), Recorder()
    batch.add(TextRequest(prompt_of(8, 1), 0, GREEDY, num_logprobs=0, scores_prompt=True), recorded)
    run(batch)
    assert len(recorded.prompt) == 7
    assert recorded.ids == []
    assert recorded.is_stopped is False


def test_a_failing_step_fails_its_texts_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    batch, first, second = BatchGenerator(model), Recorder(), Recorder()
    batch.add(TextRequest(prompt_of(5, 1), 20, GREEDY), first)
    batch.step()
    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "forward", lambda *_, **__: 1 / 0)
        batch.step()
    assert isinstance(first.error, ZeroDivisionError)
    batch.add(TextRequest(prompt_of(5, 1), 6, GREEDY), second)
    run(batch)
    assert second.ids == list(generate(model, prompt_of(5, 1), num_tokens=6, sampling=GREEDY))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [100]}, "outside the vocabulary of 100"),
        ({"num_tokens": 0}, "must be 1 or more, not"),
        ({"num_tokens": 384}, "exceed the context of 384"),
        ({"sampling": SamplingSettings(top_p=0.0)}, "top_p is 0.0"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        BatchGenerator(built()).add(TextRequest(**({"prompt_ids": [1], "num_tokens": 4} | changes)), Recorder())
    assert named in caught.value.why


class Broken:
    """A constraint that fails after some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def mask(self) -> torch.Tensor:
        if not self.left:
            raise RuntimeError("too much computation")
        return torch.ones(100, dtype=torch.bool)

    def saw(self, token_id: int) -> None:
        self.left -= 1


def test_a_constraint_that_fails_ends_its_own_text_alone() -> None:
    model = built()
    batch, broken, others = BatchGenerator(model), Recorder(), [Recorder() for _ in range(3)]
    batch.add(TextRequest(prompt_of(5, 1), 20, GREEDY, constraint=Broken(4)), broken)
    for listener in others:
        batch.add(TextRequest(prompt_of(5, 1), 20, GREEDY), listener)
    run(batch)
    assert str(broken.error) == "too much computation"
    assert len(broken.ids) == 4
    alone = list(generate(model, prompt_of(5, 1), num_tokens=20, sampling=GREEDY))
    assert [listener.ids for listener in others] == [alone] * 3


@pytest.mark.parametrize("most_rows", [0, 4])
def test_without_memory_for_more_rows_the_others_wait(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    def limited(*given: Any, batch: int, **settings: Any) -> RowCache:
        if batch > most_rows:
            raise torch.OutOfMemoryError("out of memory")
        return RowCache(*given, batch=batch, **settings)

    monkeypatch.setattr(batching, "RowCache", limited)
    model, recorded, notices = built(), [Recorder() for _ in range(9)], list[str]()
    batch = BatchGenerator(model, notify=notices.append)
    for number, listener in enumerate(recorded):
        batch.add(TextRequest(prompt_of(5, number), 8, GREEDY), listener)
    run(batch)
    if most_rows:
        assert all(len(listener.ids) == 8 for listener in recorded)
        assert batch.max_rows == 4
        assert "memory for 4 texts" in notices[0]
    else:
        assert all("out of memory" in str(listener.error) for listener in recorded)


def test_captured_graphs_are_bounded_over_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graphs are kept, and the texts are those of plain steps."""
    cuda = StreamsOnly()
    model = built(context=3 * REACH)

    def texts() -> list[list[int]]:
        batch = BatchGenerator(model, max_rows=8, memory_share=4 / MOST_GRAPHS)
        listeners = [Recorder() for _ in range(8)]
        for number, listener in enumerate(listeners):
            # Texts end one after another, so steps of 8, 4, 2 and 1 rows and every reach occur.
            batch.add(TextRequest(prompt_of(5, number), 40 * (number + 1), GREEDY), listener)
        most = 0
        while not batch.is_idle:
            batch.step()
            most = max(most, len(batch._graphs))
        assert most <= 4
        batch.close()
        return [listener.ids for listener in listeners]

    monkeypatch.setattr(batching, "is_stepped", lambda device: False)
    wanted = texts()
    cuda.take_over(monkeypatch)
    monkeypatch.setattr(batching, "is_stepped", lambda device: True)
    assert texts() == wanted
    assert cuda.log.count("captured on side, thread_local") > 4
    assert cuda.log[-1] == "emptied"


class Slow:
    """A constraint that allows everything, and takes as long as the test wants for each token."""

    def __init__(self) -> None:
        self.may_go_on, self.num_asked = threading.Semaphore(0), 0

    def mask(self) -> torch.Tensor:
        self.num_asked += 1
        assert self.may_go_on.acquire(timeout=60)
        return torch.ones(100, dtype=torch.bool)

    def saw(self, token_id: int) -> None:
        pass


def test_a_slow_constraint_delays_only_its_own_text() -> None:
    model, slow, held, others = built(), Slow(), Recorder(), [Recorder() for _ in range(3)]
    batch = BatchGenerator(model)
    batch.add(TextRequest(prompt_of(5, 1), 12, SamplingSettings(seed=7), constraint=slow), held)
    for number, listener in enumerate(others):
        batch.add(TextRequest(prompt_of(5, 2 + number), 30, GREEDY), listener)
    while any(listener.is_stopped is None for listener in others):
        batch.step()
    assert (held.ids, slow.num_asked) == ([], 1)
    late = Recorder()
    batch.add(TextRequest(prompt_of(5, 9), 30, GREEDY), late)  # joins while the other one still pauses
    slow.may_go_on.release(12)
    run(batch)
    alone = list(generate(model, prompt_of(5, 1), num_tokens=12, sampling=SamplingSettings(seed=7)))
    assert held.ids == alone, "a pause changes nothing in the text"
    assert late.ids == list(generate(model, prompt_of(5, 9), num_tokens=30, sampling=GREEDY))
    batch.close()


def test_the_next_mask_is_computed_while_the_model_runs() -> None:
    """Else the time of both would add up."""
    model, slow, recorded = built(), Slow(), Recorder()
    batch = BatchGenerator(model)
    batch.add(TextRequest(prompt_of(5, 1), 3, GREEDY, constraint=slow), recorded)
    slow.may_go_on.release()
    while not recorded.ids:
        batch.step()
    deadline = time.monotonic() + 30  # another thread asks for it
    while slow.num_asked < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert slow.num_asked == 2, "it was asked for the second token right after the first one"
    slow.may_go_on.release(5)
    run(batch)
    batch.close()


def test_a_paused_text_that_nobody_wants_leaves_its_row() -> None:
    batch, slow, recorded = BatchGenerator(built()), Slow(), Recorder()
    batch.add(TextRequest(prompt_of(5, 1), 3, GREEDY, constraint=slow), recorded)
    batch.step()
    assert batch.num_active == 1
    recorded._leaves_after = 0
    batch.step()
    assert batch.is_idle
    slow.may_go_on.release()
    batch.close()


def test_a_gpu_that_cannot_be_used_any_more_fails_the_batch_and_not_only_its_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the server would accept requests forever, and answer none."""
    batch, recorded = BatchGenerator(built()), Recorder()
    batch.add(TextRequest(prompt_of(5, 1), 20, GREEDY), recorded)
    batch.step()

    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(BatchGenerator, "_decode", broken)
    batch.step()
    assert str(recorded.error) == "an illegal memory access was encountered"
    batch.add(TextRequest(prompt_of(5, 1), 20, GREEDY), Recorder())
    monkeypatch.setattr(BatchGenerator, "_check_gpu", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        batch.step()


def test_a_step_runs_on_the_gpu_of_its_model_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own current GPU, which is the first one until it is changed."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "device", noted)
        with on_gpu(torch.device("cuda:1")), on_gpu(torch.device("cpu")):
            assert entered == [torch.device("cuda:1")]
    monkeypatch.setattr(batching, "on_gpu", noted)
    batch = BatchGenerator(built())
    batch.step()
    assert entered[1:] == [torch.device("cpu")]


# -- on a GPU ----------------------------------------------------------------------------------------------------------

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SETTINGS = [
    GREEDY,
    SamplingSettings(seed=4),
    SamplingSettings(top_p=0.8, top_k=0, seed=5),
    SamplingSettings(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=6),
    SamplingSettings(min_p=0.05, logit_bias={7: 2.0, 9: -50.0}, seed=7),
]


class Even:
    """Allows every other token."""

    def mask(self) -> torch.Tensor:
        return torch.arange(100) % 2 == 0

    def saw(self, token_id: int) -> None:
        assert token_id % 2 == 0


def batched(model: Decoder, *, constraint: bool = False) -> tuple[list[list[int]], int]:
    """Return texts with all kinds of settings, and the number of graphs at the end."""
    batch, listeners = BatchGenerator(model, max_rows=16, notify=pytest.fail), [Recorder() for _ in range(15)]
    for number, listener in enumerate(listeners):
        settings, allowed = SETTINGS[number % 5], Even() if constraint and number % 3 == 0 else None
        batch.add(TextRequest(prompt_of(20 + number, number), 20 + 8 * number, settings, constraint=allowed), listener)
    run(batch)
    num_graphs = len(batch._graphs)
    batch.close()
    assert [listener.error for listener in listeners] == [None] * 15
    return [listener.ids for listener in listeners], num_graphs


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_a_gpu) for name in MODELS])
def test_on_a_gpu_texts_of_captured_steps_are_those_of_plain_ones(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(**MODELS[name]).to("cuda").set_precision(precision)
    found, num_graphs = batched(model, constraint=True)
    assert num_graphs
    monkeypatch.setattr(batching, "WORTH", 10**9)
    wanted, num_graphs = batched(model, constraint=True)
    assert not num_graphs
    assert found == wanted


@pytest.mark.parametrize("place", [pytest.param(0, marks=on_a_gpu)])
def test_on_a_gpu_logits_give_the_tokens_that_they_give_on_a_cpu(place: int) -> None:
    """The sums over probabilities are integers, so their order does not matter."""
    logits_BV = torch.randn(5, 5000, generator=torch.Generator().manual_seed(3)) * 3
    found = []
    for device in ("cpu", f"cuda:{place}"):
        pickers = [TokenPicker(settings, [1, 2, 3]) for settings in SETTINGS]
        picked = [pick_tokens(logits_BV.to(device).roll(step, 1), pickers) for step in range(50)]
        found.append([[each.id for each in step] for step in picked])
    same = sum(one == other for one, other in zip(*found, strict=True))
    assert same >= 49, "softmax itself may round differently, which matters once in thousands of draws"


@pytest.mark.parametrize("place", [pytest.param(0, marks=on_a_gpu)])
def test_on_a_gpu_a_step_waits_for_the_gpu_only_to_read_its_tokens(place: int) -> None:
    model = built().to(f"cuda:{place}")
    batch, listener = BatchGenerator(model, notify=pytest.fail), Recorder()
    for number, settings in enumerate(SETTINGS):
        batch.add(TextRequest(prompt_of(20, number), 60, settings), listener)
    for _ in range(20):  # capture, and allocate what is kept
        batch.step()
    with warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            batch.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    batch.close()
    assert len(waited) <= 1, [str(each.message) for each in waited]


@pytest.mark.parametrize("place", [pytest.param(0, marks=on_a_gpu)])
def test_on_a_gpu_memory_is_given_back_and_graphs_are_bounded(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built().to(f"cuda:{place}").set_precision("bf16")
    batched(model)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(batching, "MOST_GRAPHS", 4)
    _, num_graphs = batched(model)
    assert num_graphs <= 4
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("place", [pytest.param(0, marks=on_a_gpu)])
def test_on_a_gpu_another_thread_generates_the_same_texts(place: int) -> None:
    model, found = built().to(f"cuda:{place}").set_precision("bf16"), list[Any]()
    thread = threading.Thread(target=lambda: found.append(batched(model)[0]))
    thread.start()
    thread.join()
    assert found == [batched(model)[0]]
