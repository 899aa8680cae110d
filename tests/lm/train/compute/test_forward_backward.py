"""Micro-batches as CUDA graphs: when they are captured, what stays plain, and that no number depends on it.

Machines that run tests rarely have a GPU. `RecordedCard` simulates one: what a pass computes is written down op by op
with the tensors it reads and writes, and a replay does exactly that again, on the same memory and with the numbers that
the host had at the time. So an input that is no buffer, or a gradient that is not where it was, shows here too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import Recorder
from tiny import make_data, make_run, make_run_dir
from torch import Tensor

from homing.errors import UsageError
from homing.lm.model import Decoder, lora
from homing.lm.train.compute import forward_backward
from homing.lm.train.compute.batch import Batch
from homing.lm.train.compute.forward_backward import Card, Passes, Timing
from homing.lm.train.loop import train
from homing.lm.train.stop_requests import ControlRequests, FatalError, Stop
from homing.wire import file_names
from homing.wire.run_json import Lora, Model, Run

CPU = torch.device("cpu")
SHAPE = Model("stock", "qwen3", 2, 32, 2, 1, 16, 64, 32, 272, True)
HOST_BOUND, CARD_BOUND, QUICK = Timing(0.036, 0.037), Timing(0.035, 0.160), Timing(0.001, 0.020)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


class RecordedCard(Card):
    """`plain` and `graph` are the simulated durations of a pass; `fails` is what capturing raises."""

    def __init__(self, plain: Timing = HOST_BOUND, graph: Timing = QUICK, *, fails: str = "") -> None:
        super().__init__(CPU)
        self.plain, self.graph, self.fails, self.is_roomy = plain, graph, fails, True
        self.num_captured = self.num_replays = self.num_forgotten = 0

    def timing(self, run: Callable[[], object]) -> Timing:
        before = self.num_replays
        run()
        return self.plain if self.num_replays == before else self.graph

    def has_room(self) -> bool:
        return self.is_roomy

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()  # as before a real capture: it leaves gradients behind
        if self.fails:
            raise RuntimeError(self.fails)
        recorder = Recorder()
        with recorder:
            compute()
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            recorder.replay()

        return replay

    def forget(self) -> None:
        self.num_forgotten += 1


class Messages:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, kind: str, text: str, *, notice: bool = False, step: int | None = None, **data: object) -> None:
        assert notice
        self.events.append((kind, text))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def make_model() -> Decoder:
    model = Decoder(SHAPE)
    model.init_weights(3)
    return model


def make_batch(seed: int, rows: int = 8, *, T: int = 32, has_weights: bool = False, num_targets: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE.vocab_size, (rows, T + 1), generator=generator)
    weights = torch.randn(rows, T, generator=generator) if has_weights else None
    return Batch(ids[:, :-1], ids[:, 1:], num_targets or rows * T, weights_RT=weights)


def with_card(monkeypatch: pytest.MonkeyPatch, card: Card, asked: str = "auto", **more: Any) -> tuple[Passes, Messages]:
    monkeypatch.setattr(forward_backward, "card_of", lambda device: card)
    messages = Messages()
    return Passes(make_model(), CPU, asked, messages, **more), messages


def step(found: Passes, batch: Batch, micro_batch: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients as the engine gathers them; afterwards there are none, as the optimizer leaves it."""
    micro_batches, total = list(batch.micro_batches(micro_batch)), torch.zeros((), device=batch.ids_RT.device)
    found.begin(micro_batches)
    for piece in micro_batches:
        total += found.run(piece)
    gradients = [parameter.grad.clone() for parameter in found._model.parameters() if parameter.grad is not None]
    for parameter in found._model.parameters():
        parameter.grad = None
    return total, gradients


def plain_step(batch: Batch, micro_batch: int = 4) -> tuple[Tensor, list[Tensor]]:
    return step(Passes(make_model(), CPU, "off", Messages()), batch, micro_batch)


def assert_same(found: tuple[Tensor, list[Tensor]], wanted: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(found[0], wanted[0])
    assert len(found[1]) == len(wanted[1])
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_graph_adds_the_gradients_of_the_plain_pass_bit_for_bit_whatever_rows_come(
    monkeypatch: pytest.MonkeyPatch, has_weights: bool
) -> None:
    card = RecordedCard()
    found, _ = with_card(monkeypatch, card)
    found.decide(next(make_batch(0, has_weights=has_weights).micro_batches(4)))
    assert found.picked == "on"
    replays = card.num_replays
    for seed, num_targets in ((1, 256), (2, 100), (3, 0)):  # the count of targets is another in each step
        batch = make_batch(seed, has_weights=has_weights, num_targets=num_targets)
        assert_same(step(found, batch), plain_step(batch))
    assert card.num_replays == replays + 6


def test_deciding_leaves_no_gradient_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for card in (RecordedCard(), RecordedCard(plain=CARD_BOUND), RecordedCard(fails="no")):
        found, _ = with_card(monkeypatch, card)
        found.decide(make_batch(0))
        assert all(parameter.grad is None for parameter in found._model.parameters())
        assert found.has_tried


def test_rows_of_several_conversations_are_captured_with_a_mask_and_not_with_flex(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def packed(seed: int) -> Batch:
        segments = (torch.arange(32) // (9 + seed)).int().expand(8, -1)
        return dataclasses.replace(make_batch(seed), segments_RT=segments)

    found, _ = with_card(monkeypatch, RecordedCard())
    found.decide(next(packed(0).micro_batches(4)))
    assert_same(step(found, packed(2)), plain_step(packed(2)))
    found, messages = with_card(monkeypatch, RecordedCard())
    found._model.has_flex = True
    found.decide(packed(0))
    assert (found.picked, messages.kinds) == ("", ["graphs_left"])
    assert "FlexAttention" in messages.events[0][1]


def test_adapters_without_dropout_are_captured_and_with_dropout_they_stay_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dropout, picked in ((0.0, "on"), (0.1, "")):
        found, messages = with_card(monkeypatch, RecordedCard(), asked="on")
        lora.freeze(found._model, "fp32", CPU)
        lora.add_lora(found._model, Lora(rank=4, alpha=8.0, targets=["all"], dropout=dropout), seed=0)
        found.decide(next(make_batch(0).micro_batches(4)))
        assert found.picked == picked
        assert ("dropout" in messages.events[0][1]) == bool(dropout)


# -- which way ---------------------------------------------------------------------------------------------------------


def test_a_graph_is_used_and_reported_if_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, messages = with_card(monkeypatch, RecordedCard())
    found.decide(make_batch(0))
    assert messages.events == [
        (
            "graphs_picked",
            "Each micro-batch runs as one CUDA graph: 20.0 ms, compared with 37.0 ms without CUDA graphs, 36.0 ms of it"
            " launching kernels.",
        )
    ]


def test_where_the_host_is_far_ahead_of_the_card_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard(plain=CARD_BOUND)
    found, messages = with_card(monkeypatch, card)
    found.decide(make_batch(0))
    assert (found.picked, card.num_captured, messages.kinds) == ("off", 0, ["graphs_picked"])
    assert "the GPU does not wait for the host" in messages.events[0][1]
    assert_same(step(found, make_batch(1)), plain_step(make_batch(1)))


def test_a_graph_that_is_hardly_faster_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard(graph=Timing(0.001, 0.036))
    found, messages = with_card(monkeypatch, card)
    found.decide(make_batch(0))
    assert (found.picked, card.num_captured, card.num_forgotten) == ("off", 1, 1)
    assert "but 36.0 ms as a CUDA graph" in messages.events[0][1]
    replays = card.num_replays
    assert_same(step(found, make_batch(1)), plain_step(make_batch(1)))
    assert card.num_replays == replays


def test_what_was_found_out_on_this_card_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard(plain=CARD_BOUND)  # which would be plain
    found, _ = with_card(monkeypatch, card)
    found.settle("on")
    found.decide(make_batch(0))
    assert (found.picked, card.num_captured) == ("on", 1)
    card = RecordedCard()  # which would be a graph
    found, messages = with_card(monkeypatch, card)
    found.settle("off")
    found.decide(make_batch(0))
    assert (found.picked, card.num_captured, messages.events, found.has_tried) == ("off", 0, [], False)


def test_on_captures_without_measuring_and_off_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard(plain=CARD_BOUND)
    found, _ = with_card(monkeypatch, card, asked="on")
    found.settle("off")
    found.decide(make_batch(0))
    assert (found.picked, card.num_captured) == ("on", 1)
    card = RecordedCard()
    found, messages = with_card(monkeypatch, card, asked="off")
    found.settle("on")
    found.decide(make_batch(0))
    assert (found.picked, card.num_captured, messages.events) == ("", 0, [])


def test_several_cards_and_a_full_one_stay_plain_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found, messages = with_card(monkeypatch, RecordedCard(), asked="on", num_ranks=2)
    found.decide(make_batch(0))
    assert "this run uses 2" in messages.events[0][1]
    full = RecordedCard()
    full.is_roomy = False
    found, messages = with_card(monkeypatch, full)
    found.decide(make_batch(0))
    assert "20% of GPU memory must stay free" in messages.events[0][1]
    assert (found.picked, full.num_captured) == ("", 0)


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_each_shape_that_comes_again_gets_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard()
    found, _ = with_card(monkeypatch, card, asked="on")
    found.decide(next(make_batch(0).micro_batches(3)))
    counts = []
    for seed in range(1, 4):  # rows 3, 3 and 2
        assert_same(step(found, make_batch(seed), 3), plain_step(make_batch(seed), 3))
        counts.append(card.num_captured)
    assert counts == [1, 2, 2]
    assert_same(step(found, make_batch(9, T=16)), plain_step(make_batch(9, T=16)))
    # Twice in one step is again.
    assert card.num_captured == 3


def test_a_shape_for_which_there_is_no_room_stays_plain_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard()
    found, messages = with_card(monkeypatch, card, asked="on")
    found.decide(next(make_batch(0).micro_batches(4)))
    card.is_roomy = False
    for seed in (1, 2):
        batch = make_batch(seed, T=16)
        assert_same(step(found, batch), plain_step(batch))
    assert_same(step(found, make_batch(3)), plain_step(make_batch(3)))
    assert (card.num_captured, messages.kinds) == (1, ["graphs_picked", "graphs_left"])
    assert "Micro-batches of 4 x 16 tokens" in messages.events[1][1]


def test_what_was_forgotten_for_want_of_memory_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RecordedCard()
    found, _ = with_card(monkeypatch, card, asked="on")
    found.decide(next(make_batch(0).micro_batches(4)))
    found.forget()
    assert card.num_forgotten == 1
    for seed in (1, 2, 3):  # with fewer rows at a time, as after running out of memory
        assert_same(step(found, make_batch(seed), 2), plain_step(make_batch(seed), 2))
    assert card.num_captured == 2


# -- failing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_a_failed_capture_is_reported_and_the_gradients_are_right(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    card = RecordedCard(fails="" if is_late else "operation not permitted when stream is capturing")
    found, messages = with_card(monkeypatch, card)
    found.decide(next(make_batch(0).micro_batches(4)))
    if is_late:  # of another shape, in the middle of the run
        assert found.picked == "on"
        card.fails = "operation not permitted when stream is capturing"
    batch = make_batch(1, T=16)
    assert_same(step(found, batch), plain_step(batch))
    assert found.picked == "off"
    assert messages.kinds[-1] == "graphs_failed"
    assert "operation not permitted" in messages.events[-1][1]
    replays = card.num_replays
    assert_same(step(found, make_batch(2)), plain_step(make_batch(2)))
    assert card.num_replays == replays


def test_a_capture_that_fails_ends_the_run_where_it_was_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = with_card(monkeypatch, RecordedCard(fails="not permitted"), asked="on")
    with pytest.raises(FatalError, match="Capturing a micro-batch as a CUDA graph failed") as caught:
        found.decide(make_batch(0))
    assert "RuntimeError: not permitted" in str(caught.value)
    assert "train.graphs: off" in str(caught.value)


def test_a_graph_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(RecordedCard):
        """Its graphs leave out the last gradient that is added."""

        def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
            recorder = Recorder()
            with recorder:
                compute()
            added = [n for n, op in enumerate(recorder.ops) if op[0] is torch.ops.aten.add_.Tensor]
            del recorder.ops[added[-1]]
            return recorder.replay

    found, messages = with_card(monkeypatch, Forgetful())
    found.decide(make_batch(0))
    assert (found.picked, messages.kinds) == ("off", ["graphs_failed"])
    assert "differs from the plain pass by" in messages.events[0][1]


def test_a_pass_without_any_gradient_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in rl, where all answers were equally good."""
    found, _ = with_card(monkeypatch, RecordedCard(), asked="on")
    batch = make_batch(0)
    found.decide(dataclasses.replace(batch, weights_RT=torch.zeros(8, 32)))
    assert found.picked == "on"


# -- how a card is asked -----------------------------------------------------------------------------------------------


def test_there_is_room_where_a_pass_more_than_was_ever_held_leaves_a_fifth_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, held = Card(CPU), {"memory_reserved": 60, "max_memory_allocated": 50, "memory_allocated": 20}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for free, is_roomy in ((40, True), (39, False)):  # 50 and 30 more, of 100 and of 99
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 200))
        assert card.has_room() is is_roomy


# -- in the loop -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


def go(run_dir: Path, run: Run, requests: ControlRequests | None = None) -> list[str]:
    make_run_dir(run_dir, run)
    said: list[str] = []
    train(run_dir, say=said.append, requests=requests)
    return said


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]
    return [(m["step"], m["num_tokens"], m["loss"], m["grad_norm"], m["val_loss"]) for m in lines]


def choices(run_dir: Path, at: int) -> dict[str, Any]:
    path = run_dir / "checkpoints/pretrain" / file_names.step_dir(at) / file_names.MANIFEST
    found: dict[str, Any] = json.loads(path.read_text())["choices"]
    return found


class StopAt(ControlRequests):
    def __init__(self, run_dir: Path, looks: int) -> None:
        super().__init__(run_dir)
        self.looks = looks

    def stop(self, *, save_s: float = 0.0) -> Stop | None:
        self.looks -= 1
        return Stop("signal", "SIGTERM was received.") if self.looks <= 0 else None


@pytest.mark.slow
def test_a_run_with_graphs_has_the_same_losses_and_resumes_with_its_choice(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "plain", make_run(data_dir))
    card = RecordedCard()
    monkeypatch.setattr(forward_backward, "card_of", lambda device: card)
    run = make_run(data_dir, train={"graphs": "auto"})
    said = go(tmp_path / "graphs", run, StopAt(tmp_path / "graphs", 5))
    assert any("runs as one CUDA graph: 20.0 ms" in line for line in said)
    assert choices(tmp_path / "graphs", 5)["graphs"] == "on"
    replays = card.num_replays
    assert replays >= 2 * 4  # two micro-batches in each step but the first
    card.plain = CARD_BOUND  # measured now it would be plain: but nothing changes in the middle of a run
    go(tmp_path / "graphs", run)
    assert card.num_replays >= replays + 2 * 6
    assert figures(tmp_path / "graphs") == figures(tmp_path / "plain")


@pytest.mark.slow
def test_a_run_that_falls_back_has_the_losses_of_one_without(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "plain", make_run(data_dir, num_steps=4))
    monkeypatch.setattr(forward_backward, "card_of", lambda device: RecordedCard(fails="not permitted"))
    said = go(tmp_path / "graphs", make_run(data_dir, num_steps=4, train={"graphs": "auto"}))
    assert any(line.startswith("warning: CUDA graphs failed") for line in said)
    assert figures(tmp_path / "graphs") == figures(tmp_path / "plain")
    assert choices(tmp_path / "graphs", 4)["graphs"] == "off"


@pytest.mark.slow
def test_out_of_memory_frees_the_graphs_and_continues_with_fewer_rows(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "plain", make_run(data_dir, num_steps=5, micro_batch=0))
    card, whole = RecordedCard(), Passes.run
    monkeypatch.setattr(forward_backward, "card_of", lambda device: card)

    def run(self: Passes, piece: Batch) -> Tensor:
        if card.num_replays >= 2 and len(piece.ids_RT) > 4:  # in the third step; one replay was to compare
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, piece)

    monkeypatch.setattr(Passes, "run", run)
    said = go(tmp_path / "graphs", make_run(data_dir, num_steps=5, micro_batch=0, train={"graphs": "on"}))
    assert any("micro-batch lowered from 8 to 4 rows" in line for line in said)
    assert (card.num_forgotten, card.num_captured) == (1, 2)
    for (*_, a, norm_a, _), (*_, b, norm_b, _) in zip(
        figures(tmp_path / "graphs"), figures(tmp_path / "plain"), strict=True
    ):
        assert (a, norm_a) == (pytest.approx(b, abs=1e-4), pytest.approx(norm_b, rel=1e-3))


def test_on_is_refused_without_a_card_before_anything_is_loaded_and_auto_is_off(tmp_path: Path, data_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"train.graphs: on needs a CUDA GPU, but the device is cpu") as caught:
        go(tmp_path / "on", make_run(data_dir, train={"graphs": "on"}))
    assert "train.graphs=off" in str(caught.value)
    said = go(tmp_path / "auto", make_run(data_dir, num_steps=2, train={"graphs": "auto"}))
    assert not any("graph" in line for line in said)
    assert "graphs" not in choices(tmp_path / "auto", 2)


# -- on a card ---------------------------------------------------------------------------------------------------------


def on_card(asked: str) -> Passes:
    shape = Model("stock", "qwen3", 4, 256, 4, 4, 64, 512, 256, 2048, False)
    model = Decoder(shape)
    model.init_weights(3)
    model.to("cuda").set_precision("bf16")
    return Passes(model, torch.device("cuda"), asked, Messages())


def card_batch(seed: int) -> Batch:
    ids = torch.randint(0, 2048, (4, 257), generator=torch.Generator().manual_seed(seed)).cuda()
    return Batch(ids[:, :-1], ids[:, 1:], 1000 + seed)


@needs_cuda
def test_on_a_card_gradients_are_those_of_the_plain_pass_wherever_kernels_repeat() -> None:
    plain, graphs = on_card("off"), on_card("on")
    for found in (plain, graphs):  # kernels are built, and what they are built with is no part of the test
        step(found, card_batch(0), 2)
    graphs.decide(next(card_batch(0).micro_batches(2)))
    assert graphs.picked == "on"
    for seed in (1, 2):
        first, again, found = (step(each, card_batch(seed), 2) for each in (plain, plain, graphs))
        assert torch.equal(first[0].cpu(), found[0].cpu()) or not torch.equal(first[0].cpu(), again[0].cpu())
        for one, two, mine in zip(first[1], again[1], found[1], strict=True):
            if torch.equal(one, two):
                assert torch.equal(one, mine)
            else:
                assert float((mine - one).norm()) <= 1e-2 * float(one.norm())


@needs_cuda
def test_on_a_card_a_tiny_pass_is_faster_as_a_graph() -> None:
    found = on_card("on")
    piece = next(card_batch(0).micro_batches(2))
    step(found, card_batch(0), 2)
    card = Card(torch.device("cuda"))
    found.begin([piece])
    plain_s = min(card.timing(lambda: found.run(piece)).whole_s for _ in range(10))
    found.decide(piece)
    found.begin([piece])
    assert min(card.timing(lambda: found.run(piece)).whole_s for _ in range(10)) < plain_s
