"""The memory plan of full, lora, qlora and rl against the bytes of real tensors, and against peaks on a card.

The peaks were measured on one H200 with torch 2.11 by benchmarks/gpu/lora.py and rl.py: `max_memory_allocated`, without
what CUDA takes for itself.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from homing.config.estimate.memory import (
    AT_A_TIME,
    HOST_SHARE,
    PROCESS_BYTES,
    SAMPLED_LOGIT_BYTES,
    Fit,
    fits,
    memory_of,
    training_memory,
)
from homing.config.estimate.params_and_flops import adapter_params, prompt_tokens, row_tokens, rows_at_a_time
from homing.config.load import load_run, preset_dir
from homing.gpus import GPUS
from homing.lm.model import Decoder, lora
from homing.lm.model.attention import RowCache
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.rl.named_random import draws
from homing.lm.rl.rollout import Sampler
from homing.lm.train.optim import offload
from homing.lm.train.optim.offload import HostPlace
from homing.lm.train.optim.param_groups import build_optimizer, state_bytes
from homing.wire.run_json import Base, Lora, Model, Optimizer, Rl, RlTask

QWEN_7B = Model("stock", "qwen2", 28, 3584, 28, 4, 128, 18944, 2048, 152064, False, rope_base=1e6)
SMALL = Model("stock", "qwen2", 4, 256, 8, 2, 32, 704, 64, 1024, False)
ADAM = Optimizer(kind="adamw", lr=1e-3, lr_embedding=1e-3, lr_head=1e-3, lr_norm=1e-3, weight_decay=0.0)
ALL = Lora(targets=["all"])
METHODS = [("full", None), ("lora", ALL), ("lora", Lora(targets=["q", "v"], rank=8)), ("qlora", ALL),
           ("qlora", Lora(targets=["all"], is_dora=True))]  # fmt: skip


@pytest.mark.acceptance(7)
def test_qwen_7b_fits_where_it_is_said_to() -> None:
    """Micro-batch 1 of 2,048 tokens, every block computed again, CUDA itself included."""
    assert memory_of(QWEN_7B, "adamw", precision="bf16", method="lora", lora=ALL, recompute="all").peak(1) < 20e9
    assert memory_of(QWEN_7B, "adamw", precision="bf16", method="qlora", lora=ALL, recompute="all").peak(1) < 9e9
    assert memory_of(QWEN_7B, "adamw", precision="bf16").peak(1) > 130e9, "full training needs another machine"


@pytest.mark.acceptance(7)
@pytest.mark.parametrize(
    ("method", "recompute", "rows", "measured"),
    [
        ("lora", "all", 1, 16.93e9),
        ("qlora", "all", 1, 7.22e9),
        ("lora", "none", 8, 93.91e9),
        ("qlora", "none", 8, 84.20e9),
    ],
)
def test_lora_on_seven_billion_parameters_needs_the_memory_measured_on_a_gpu(
    method: str, recompute: str, rows: int, measured: float
) -> None:
    memory = memory_of(QWEN_7B, "adamw", precision="bf16", method=method, lora=ALL, recompute=recompute)
    assert 0.95 <= (memory.peak(rows) - memory.cuda) / measured <= 1.1


@pytest.mark.acceptance(7)
def test_a_step_of_rl_takes_what_it_took_on_a_card() -> None:
    """16 prompts x 16 samples x 256 new tokens in rows of 640, 64 of them at a time in backward: 60.1 GiB."""
    d20 = Model("stock", "qwen3", 20, 1280, 10, 10, 128, 3456, 2048, 32768, False)
    rl = Rl([RlTask("gsm8k", file="train.jsonl")], max_new_tokens=256)
    known = memory_of(d20, "muon", precision="bf16", rl=rl, prompt=640 - 256)
    assert 0.95 <= (known.peak(64) - known.cuda) / (60.1 * 2**30) <= 1.1
    assert memory_of(d20, "muon", precision="bf16", rl=rl).peak(64) == pytest.approx(known.peak(64), rel=0.01)
    own = dataclasses.replace(rl, tasks=[RlTask("prompts", file="own.jsonl")])
    assert row_tokens(d20, own) == 2048, "one's own prompts may fill the context"
    assert memory_of(d20, "muon", precision="bf16", rl=own).rollout > 3 * known.rollout


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def built(method: str, settings: Lora | None) -> Decoder:
    model = Decoder(SMALL)
    model.init_weights(0)
    if settings:
        lora.freeze(model, lora.storage_for(method, "bf16"))
        lora.add_lora(model, settings, seed=0)
    return model.set_precision("bf16")


def trained(method: str, settings: Lora | None, states: str = "fp32") -> tuple[Decoder, dict[str, int]]:
    """One real step on the CPU, and what it left in memory."""
    model = built(method, settings)
    optimizer = build_optimizer(model, dataclasses.replace(ADAM, states=states))
    tokens = torch.randint(1024, (1, 65), generator=torch.Generator().manual_seed(0))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step(1.0)
    found = {
        "weights": bytes_of([*model.parameters(), *(b for n, b in model.named_buffers() if "rope" not in n)]),
        "gradients": bytes_of([p.grad for p in model.parameters() if p.grad is not None]),
        "optimizer": bytes_of([t for name, t in optimizer.state_tensors().items() if name != "num_steps"]),
    }
    return model, found


@pytest.mark.acceptance(7)
@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_weights_gradients_and_states_are_the_bytes_of_real_tensors(method: str, settings: Lora | None) -> None:
    model, found = trained(method, settings)
    planned = memory_of(SMALL, "adamw", precision="bf16", method=method, lora=settings)
    assert planned.weights == pytest.approx(found["weights"], rel=1e-4)
    assert planned.gradients == found["gradients"]
    assert planned.optimizer == found["optimizer"]
    if settings:
        assert adapter_params(SMALL, settings) == lora.num_adapter_params(model)
        assert planned.checkpoint == bytes_of(list(model.weights_for_disk().values())) + found["optimizer"]


def test_moments_in_eight_bits_are_counted() -> None:
    _, found = trained("lora", ALL, states="int8")
    planned = memory_of(SMALL, "adamw", precision="bf16", method="lora", lora=ALL, states="int8")
    assert planned.optimizer == pytest.approx(found["optimizer"], rel=0.15)  # small matrices stay in fp32


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "states"), [("muon", "fp32"), ("adamw", "fp32"), ("adamw", "int8")])
def test_offloaded_state_is_the_hosts_and_what_passes_is_counted(
    kind: str, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, alive, most = dataclasses.replace(ADAM, kind=kind, states=states), [0], [0]
    bring = HostPlace._bring

    def brought(self: HostPlace, load: offload.Load) -> offload._Visit:
        visit = bring(self, load)
        alive[0] += load.num_bytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(visit.tensors[0], lambda: alive.__setitem__(0, alive[0] - load.num_bytes))
        return visit

    monkeypatch.setattr(HostPlace, "_bring", brought)
    model = built("full", None)
    optimizer = build_optimizer(model, spec, place=HostPlace(torch.device("cpu")))
    tokens = torch.randint(1024, (1, 65), generator=torch.Generator().manual_seed(0))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step(1.0)
    planned = memory_of(SMALL, kind, precision="bf16", states=states, offload="optimizer")
    plain = memory_of(SMALL, kind, precision="bf16", states=states)
    assert planned.optimizer == 0
    assert planned.host == plain.optimizer == pytest.approx(state_bytes(model, spec), rel=0.01)
    assert planned.checkpoint == plain.checkpoint
    assert most[0] <= planned.scratch - plain.scratch <= plain.optimizer, "never more than what lived there before"
    assert planned.peak(1) <= plain.peak(1)
    assert planned.peak(64) == plain.peak(64) - plain.optimizer, "where it is the rows that take the most"
    assert offload.AT_A_TIME == AT_A_TIME, "the trainer's own"
    assert plain.host_needed(2) == 0
    for_two = (2 * (planned.host + PROCESS_BYTES) + planned.gradients) / HOST_SHARE
    assert planned.host_needed(2) == pytest.approx(for_two)


@pytest.mark.acceptance(96)
def test_offload_makes_a_run_fit_24_gb_and_is_suggested() -> None:
    base = load_run(str(preset_dir() / "1b.yaml")).run
    # Qwen2.5-1.5B, fine-tuned whole.
    model = Model("stock", "qwen2", 28, 1536, 12, 2, 128, 8960, 2048, 151936, True, rope_base=1e6)
    phase = dataclasses.replace(base.phases[0], optimizer=ADAM, micro_batch=0, batch_tokens=16 * 2048)
    train = dataclasses.replace(base.train, precision="auto")
    run = dataclasses.replace(base, model=model, phases=[phase], train=train)
    card = {"RTX4090": GPUS["RTX4090"]}
    (fit,) = fits(run, gpus=card)
    assert (fit.is_fitting, fit.lower) == (False, "phases.0.offload to optimizer")
    (fit,) = fits(dataclasses.replace(run, phases=[dataclasses.replace(phase, offload="optimizer")]), gpus=card)
    assert fit.is_fitting
    smaller = {"small": dataclasses.replace(GPUS["RTX4090"], memory_gib=20)}
    assert fits(run, gpus=smaller)[0].lower == "phases.0.recompute to all and phases.0.offload to optimizer"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_activations_are_those_that_a_forward_keeps(method: str, settings: Lora | None) -> None:
    """Counted on the CPU, whose attention keeps a little more than a card's and whose norms keep what a kernel does
    not: the plan is within a third, and computing again saves what it says."""
    kept_by = {}
    for recompute in ("none", "half", "all"):
        model = built(method, settings).set_recompute(recompute)
        own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = torch.randint(1024, (4, 65), generator=torch.Generator().manual_seed(0))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model._hidden(tokens[:, :-1], None, None, None)
        del hidden
        planned = memory_of(SMALL, "adamw", precision="bf16", method=method, lora=settings, recompute=recompute)
        kept_by[recompute] = (sum(kept.values()), 4 * planned.activations_per_row + planned.copies)
    for recompute in ("none", "half"):
        found, planned_bytes = kept_by[recompute]
        assert 0.8 < found / planned_bytes < 1.3
    assert kept_by["all"][0] < kept_by["all"][1], "one block more is planned for than what a forward leaves"
    assert kept_by["all"][0] < kept_by["half"][0] < kept_by["none"][0]


@pytest.mark.acceptance(7)
def test_recompute_is_suggested_first_and_four_bits_second() -> None:
    base = load_run(str(preset_dir() / "4b.yaml")).run
    phase = dataclasses.replace(
        base.phases[0], method="lora", lora=ALL, micro_batch=0, batch_tokens=8 * 2048, recompute="none"
    )
    run = dataclasses.replace(
        base, model=QWEN_7B, phases=[phase], train=dataclasses.replace(base.train, precision="auto")
    )
    by_name = {fit.gpu.name: fit for fit in fits(run)}
    assert by_name["H200"].is_fitting
    assert by_name["RTX4090"].lower == "phases.0.recompute to all"
    small = dataclasses.replace(GPUS["RTX4090"], memory_gib=12)
    assert fits(run, gpus={"small": small})[0].lower == "phases.0.method to qlora"


def sampled(rl: Rl, precision: str, prompts: list[list[int]]) -> Sampler:
    """A real sampler on the CPU, after one set of samples."""
    model = Decoder(SMALL)
    model.init_weights(0)
    model.set_precision(precision)
    sampler = Sampler(
        model, stop_ids=[0], calculator=None, max_new_tokens=rl.max_new_tokens, temperature=1.0, top_k=0
    )  # fmt: skip
    rows = len(prompts) * rl.samples_per_prompt
    sampler.sample(prompts, np.stack([draws(rl.max_new_tokens, "x", n) for n in range(rows)]))
    return sampler


@pytest.mark.acceptance(7)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_caches_of_rollouts_are_the_bytes_of_real_tensors(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RowCache] = []
    monkeypatch.setattr("homing.lm.rl.rollout.RowCache", lambda *a, **k: made.append(RowCache(*a, **k)) or made[-1])
    rl = Rl([RlTask("arithmetic")], prompts_per_step=3, samples_per_prompt=2, max_new_tokens=5)
    sampler = sampled(rl, precision, [[7] * 20, [8] * 3, [9] * 11])
    planned = memory_of(SMALL, "adamw", precision=precision, rl=rl, prompt=20)
    (cache,) = made
    assert planned.rollout - SAMPLED_LOGIT_BYTES * 6 * 1024 == bytes_of([cache.keys_LBGSK, cache.values_LBGSK])
    copied = [] if sampler._reader is sampler.model else list(sampler._reader.parameters())
    assert planned.lean == bytes_of(copied)
    pulled = memory_of(SMALL, "adamw", precision=precision, rl=dataclasses.replace(rl, kl=0.1), prompt=20)
    assert pulled.lean - planned.lean == bytes_of(list(sampler._reader.parameters())), "the weights at the start too"


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_rl_with_adapters_copies_no_weights_and_syncs_only_the_adapters(method: str) -> None:
    rl = Rl([RlTask("arithmetic")], prompts_per_step=4, samples_per_prompt=4, max_new_tokens=40)
    ways = {"precision": "bf16", "method": method, "lora": ALL}
    free, full = memory_of(SMALL, "adamw", **ways, rl=rl), memory_of(SMALL, "adamw", precision="bf16", rl=rl)
    pulled = memory_of(SMALL, "adamw", **ways, rl=dataclasses.replace(rl, kl=0.1))
    assert (free.lean, full.lean > 0) == (0, True)
    model = built(method, ALL)
    with torch.no_grad():
        for tensor in lora_tensors(model).values():
            tensor += 1.0
    copies = [t for adapter in lora.adapters_now(model).values() if adapter for t in adapter.parameters()]
    assert pulled.lean == bytes_of(copies) > 0
    assert free.rollout == full.rollout + free.copies, "and what a product makes for itself"
    assert free.weights == memory_of(SMALL, "adamw", **ways).weights


def test_rl_with_lora_on_seven_billion_fits_where_full_rl_is_refused() -> None:
    base = load_run(str(preset_dir() / "1b.yaml")).run
    rl = Rl([RlTask("gsm8k", file="q.jsonl")], prompts_per_step=8, samples_per_prompt=8, max_new_tokens=256, kl=0.01)
    phase = dataclasses.replace(base.phases[0], kind="rl", rl=rl, micro_batch=0, recompute="all")
    run = dataclasses.replace(base, model=QWEN_7B, train=dataclasses.replace(base.train, precision="auto"))

    def fit(card: str, **changes: Any) -> Fit:
        changed = dataclasses.replace(phase, optimizer=dataclasses.replace(phase.optimizer, kind="adamw"), **changes)
        (found,) = fits(dataclasses.replace(run, phases=[changed]), gpus={card: GPUS[card]})
        return found

    adapters = {"method": "lora", "lora": ALL}
    assert not fit("A100").is_fitting, "all weights, their gradients and moments"
    assert fit("A100", **adapters).is_fitting
    assert fit("RTX4090", **{**adapters, "method": "qlora"}).is_fitting
    small = fit("T4", **{**adapters, "method": "qlora"})
    assert not small.is_fitting
    assert small.lower, "and it names what to lower"


def test_buffers_that_no_graph_keeps_are_not_there_in_backward_and_fewer_rows_need_less() -> None:
    rl = Rl([RlTask("arithmetic")], prompts_per_step=16, samples_per_prompt=16, max_new_tokens=40)
    kept = memory_of(SMALL, "adamw", precision="bf16", rl=rl)
    passing = memory_of(SMALL, "adamw", precision="bf16", rl=dataclasses.replace(rl, graphs="off"))
    assert kept.always - passing.always == kept.rollout
    assert passing.peak(1) == passing.always + passing.rollout + passing.passing
    few = dataclasses.replace(rl, rollout_rows=70)
    assert rows_at_a_time(few) == 64, "whole groups"
    assert memory_of(SMALL, "adamw", precision="bf16", rl=few).rollout == kept.rollout / 4


def test_a_gpu_too_small_for_all_samples_gets_the_number_that_fits() -> None:
    base = load_run(str(preset_dir() / "1b.yaml")).run
    rl = Rl([RlTask("prompts", file="own.jsonl")], prompts_per_step=32, samples_per_prompt=16, max_new_tokens=256)
    phase = dataclasses.replace(base.phases[0], kind="rl", rl=rl, micro_batch=0)
    run = dataclasses.replace(base, phases=[phase], train=dataclasses.replace(base.train, precision="auto"))
    by_name = {fit.gpu.name: fit for fit in fits(run)}
    lower = by_name["A100"].lower
    assert lower.startswith("phases.0.rl.rollout_rows to ")
    fewer = dataclasses.replace(phase, rl=dataclasses.replace(rl, rollout_rows=int(lower.split()[-1])))
    (again,) = fits(dataclasses.replace(run, phases=[fewer]), gpus={"A100": GPUS["A100"]})
    assert again.is_fitting
    assert prompt_tokens(run.model, rl) == run.model.context - 256
    assert (rl.prompts_per_step * rl.samples_per_prompt) % again.most_rows == 0
    assert training_memory(run, fewer).peak(again.most_rows) <= again.usable_bytes


def test_questions_in_the_template_of_open_weights_are_counted_with_what_it_puts_before_them() -> None:
    rl = Rl([RlTask("arithmetic")], max_new_tokens=80)
    assert prompt_tokens(QWEN_7B, rl, is_open=True) == prompt_tokens(QWEN_7B, rl) + 32
    base = load_run(str(preset_dir() / "1b.yaml")).run
    phase = dataclasses.replace(base.phases[0], kind="rl", rl=rl)
    ours = dataclasses.replace(base, model=QWEN_7B, phases=[phase])
    reference = dataclasses.replace(ours, base=Base("hf:Qwen/Qwen2.5-7B-Instruct", "base"))
    assert training_memory(reference).rollout > training_memory(ours).rollout
