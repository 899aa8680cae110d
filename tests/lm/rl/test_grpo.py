from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_rl_run, small_model

from homing.lm.model import Decoder
from homing.lm.model.loss import IGNORED
from homing.lm.rl.grpo import Experience, Policy, advantages, log_probs, rows_of, token_weights
from homing.lm.rl.rl_metrics import Collapse, Graded, pass_at_k, summary
from homing.lm.rl.rollout import Sample
from homing.lm.train.compute.batch import Batch

POLICY = Policy(clip_low=0.2, clip_high=0.3, kl=0.1)

ON_A_CARD = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_an_advantage_is_what_a_sample_has_over_its_own_group() -> None:
    by_mean = advantages([1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0], 4, is_divided=False)
    assert by_mean == [0.75, -0.25, -0.25, -0.25, 0.0, 0.0, 0.0, 0.0]
    by_deviation = advantages([1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0], 4, is_divided=True)
    assert by_deviation[:4] == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=1e-5)
    assert by_deviation[4:] == [0.0] * 4


def test_a_sample_without_a_reward_has_no_part_in_its_group() -> None:
    assert advantages([1.0, None, 0.0, None], 4, is_divided=False) == [0.5, 0.0, -0.5, 0.0]
    assert advantages([None, None], 2, is_divided=True) == [0.0, 0.0]


def _setting(tmp_path: Path) -> tuple[Decoder, Experience]:
    model = small_model(make_rl_run(tmp_path / "data"))
    samples = [Sample([50, 60, 70], [True, False, True], True, 1.0), Sample([80], [True], True, 1.0)]
    made = rows_of(0, [[0, 1, 30], [0, 31]], samples, [1.5, -0.5], context=48, device=torch.device("cpu"))
    return model, made


def test_only_what_the_model_chose_itself_is_a_target(tmp_path: Path) -> None:
    _, made = _setting(tmp_path)
    assert made.ids_RT.tolist() == [[0, 1, 30, 50, 60], [0, 31, 0, 0, 0]]
    x = IGNORED
    assert made.targets_RT.tolist() == [[x, x, 50, x, 70], [x, 80, x, x, x]]
    assert made.num_targets == 3


def test_the_weighted_loss_has_the_gradient_of_the_clipped_objective_with_its_pull(tmp_path: Path) -> None:
    """Against the textbook: -min(r A, clip(r) A) + kl k3, differentiated by autograd."""
    model, made = _setting(tmp_path)
    now_RT = log_probs(model, made)
    sampled_RT = now_RT - torch.tensor([[0, 0, 0.5, 0, 0.1], [0, -0.4, 0, 0, 0]])  # one clipped above, one below
    start_RT = now_RT + torch.tensor([[0, 0, 0.3, 0, -0.2], [0, 0.1, 0, 0, 0]])
    advantage_RT = made.advantage_R.unsqueeze(1).expand_as(made.targets_RT)
    weights_RT, figures = token_weights(
        advantage_RT, made.is_learned_RT, POLICY, now_RT=now_RT, sampled_RT=sampled_RT, start_RT=start_RT
    )
    Batch(made.ids_RT, made.targets_RT, made.num_targets, weights_RT=weights_RT).loss(model).backward()
    got = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()

    logits = model(made.ids_RT).log_softmax(dim=-1)
    log_p = logits.gather(2, made.targets_RT.clamp(min=0).unsqueeze(2)).squeeze(2)
    ratio = torch.exp(log_p - sampled_RT)
    clipped = ratio.clamp(1 - POLICY.clip_low, 1 + POLICY.clip_high)
    surrogate = torch.minimum(ratio * advantage_RT, clipped * advantage_RT)
    log_ratio = start_RT - log_p
    k3 = log_ratio.exp() - log_ratio - 1
    objective = ((-surrogate + POLICY.kl * k3) * made.is_learned_RT).sum() / made.num_targets
    objective.backward()
    wanted = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for mine, reference in zip(got, wanted, strict=True):
        assert torch.allclose(mine, reference, atol=1e-6)
    assert figures["clipped"] == pytest.approx(2 / 3)
    assert figures["kl"] == pytest.approx(float((k3 * made.is_learned_RT).sum().detach()) / 3, rel=1e-4)


def test_the_first_update_on_fresh_samples_needs_no_probabilities(tmp_path: Path) -> None:
    model, made = _setting(tmp_path)
    advantage_RT = made.advantage_R.unsqueeze(1).expand_as(made.targets_RT)
    plain, figures = token_weights(advantage_RT, made.is_learned_RT, POLICY)
    now_RT = log_probs(model, made)
    by_ratio, _ = token_weights(advantage_RT, made.is_learned_RT, POLICY, now_RT=now_RT, sampled_RT=now_RT)
    assert torch.equal(plain, by_ratio)
    assert plain.tolist() == [[0, 0, 1.5, 0, 1.5], [0, -0.5, 0, 0, 0]]
    assert figures == {}


def test_samples_come_back_from_a_checkpoint_as_they_were(tmp_path: Path) -> None:
    model, made = _setting(tmp_path)
    kept = dataclasses.replace(made, number=5, sampled_RT=log_probs(model, made))
    back = Experience.from_bytes(kept.to_bytes())
    assert (back.number, back.num_targets, back.start_RT) == (5, 3, None)
    for name in ("ids_RT", "targets_RT", "advantage_R", "sampled_RT"):
        assert torch.equal(getattr(back, name), getattr(kept, name))


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it looks at while it compiles
@pytest.mark.regression("rl-row-lengths")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_CARD)])
def test_rows_on_a_card_come_in_few_lengths_and_every_one_of_them_is_compiled(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its limit on shapes torch computes uncompiled, without a word. Compiled here by a compiler that only counts,
    with rows as a card would get them."""
    model = small_model(make_rl_run(tmp_path / "data"), context=2048)
    plain, compiled, seen = torch.compile, set(), set()

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.update(side for part in inputs for side in part.shape)
        return graph

    monkeypatch.setattr(torch, "compile", lambda part, **settings: plain(part, backend=count, **settings))
    if device == "cpu":
        monkeypatch.setattr(Experience, "to", lambda rows, device: rows)
    else:
        model = model.to("cuda").set_precision("bf16")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):  # as they are in torch
        model.compile_blocks()
        for length in range(40, 2040, 125):
            sample = Sample([50] * length, [True] * length, True, 1.0)
            made = rows_of(0, [[0, 1]], [sample], [1.0], context=2048, device=torch.device("cuda"))
            rows = made.ids_RT.shape[1]
            assert rows >= length + 1
            compiled.clear()
            model.loss(made.ids_RT, made.targets_RT).backward()
            assert rows in seen or rows in compiled, f"rows of {rows} were computed uncompiled"
            seen.add(rows)
    assert len(seen) <= 8


def test_padded_rows_are_at_most_half_as_long_again() -> None:
    from homing.lm.rl.grpo import _padded_length

    for longest in range(1, 5000):
        length = _padded_length(longest, 128)
        assert length % 128 == 0
        assert longest <= length <= max(256, 1.5 * longest)
    assert _padded_length(77, 0) == 77


def test_pass_at_k_is_the_chance_that_one_of_k_is_right() -> None:
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)


def graded(
    reward: float | None, *, task: str = "a", length: int = 3, ended: bool = True, entropy: float = 1.0
) -> Graded:
    return Graded(task, length, ended, ended and length == 1, entropy, reward)


def test_the_figures_of_a_step() -> None:
    step = [graded(1.0), graded(0.0), graded(0.0, task="b"), graded(0.0, task="b", length=1)]
    step += [graded(None, ended=False, length=7), graded(1.0)]
    figures = summary(step, 2, pass_reward=1.0)
    assert figures["reward"] == pytest.approx(2 / 5)
    assert figures["pass_at_1"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert figures["pass_at_2"] == pytest.approx(2 / 3)
    assert figures["equal_groups"] == pytest.approx(2 / 3)
    assert figures["truncated"] == pytest.approx(1 / 6)
    assert figures["empty"] == pytest.approx(1 / 6)
    assert figures["rewards_failed"] == pytest.approx(1 / 6)
    assert (figures["reward_a"], figures["reward_b"]) == (pytest.approx(2 / 3), 0.0)


@pytest.mark.acceptance(91)
@pytest.mark.parametrize(
    ("step", "words"),
    [
        ([graded(1.0)] * 4, "equal"),
        ([graded(1.0, length=1), graded(0.0, length=1)] * 2, "empty"),
        ([graded(1.0, ended=False), graded(0.0, ended=False)] * 2, "cut off"),
        ([graded(1.0, entropy=0.001), graded(0.0, entropy=0.001)] * 2, "entropy"),
    ],
)
def test_a_collapse_is_said_once_and_only_when_it_lasts(step: list[Graded], words: str) -> None:
    messages: list[str] = []
    collapse = Collapse(3, lambda kind, text: messages.append(f"{kind}: {text}"))
    bad, good = (summary(samples, 2, pass_reward=1.0) for samples in (step, [graded(1.0), graded(0.0)] * 2))
    for figures in (bad, bad, good, bad, bad):
        collapse.look(figures)
    assert messages == []
    for _ in range(5):
        collapse.look(bad)
    assert len(messages) == 1
    assert messages[0].startswith("collapsed: warning")
    assert words in messages[0]


def test_a_phase_without_one_step_to_learn_from_says_so_at_its_end() -> None:
    messages: list[str] = []
    bad, good = (
        summary(samples, 2, pass_reward=1.0) for samples in ([graded(0.0)] * 4, [graded(1.0), graded(0.0)] * 2)
    )
    for figures in ([bad, bad], [bad, good]):
        collapse = Collapse(20, lambda kind, text: messages.append(f"{kind}: {text}"))
        for each in figures:
            collapse.look(each)
        collapse.look_back()
    (text,) = messages
    assert text.startswith("learned_nothing: warning: rl has learned nothing: in all 2 steps")
    assert "(0.000 on average)" in text
