"""The whole decoder against transformers, and its promises about padding, names and precision."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from homing.errors import DataError
from homing.lm.model import Decoder, config_json, count_params, fused_ops, shape_from_config
from homing.lm.model import loss as loss_module
from homing.wire.run_json import Model

TINY = Model(
    family="stock",
    arch="llama",
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_width=48,
    context=32,
    vocab_size=100,  # not a multiple of 64, so padding rows exist
    is_tied=False,
    rope_base=500.0,
    norm_eps=1e-5,
)


def shaped(**changes: Any) -> Model:
    return dataclasses.replace(TINY, **changes)


def built(shape: Model, seed: int = 0) -> Decoder:
    model = Decoder(shape)
    model.init_weights(seed)
    # Norms of 1 and biases of 0 would hide a forgotten one.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(shape: Model, rows: int = 2, length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(shape.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def opened_in_transformers(model: Decoder, folder: Path) -> torch.nn.Module:
    """Through the disk, as a person would: config.json + model.safetensors."""
    from transformers import AutoModelForCausalLM

    save_file(model.weights_for_disk(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(model.shape)))
    opened, messages = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not messages["missing_keys"]
    assert not messages["unexpected_keys"]
    return opened


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_kv_heads", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize(("arch", "head_size"), [("llama", 8), ("qwen2", 8), ("qwen3", 16)])
def test_logits_and_gradients_equal_transformers(
    arch: str, head_size: int, num_kv_heads: int, is_tied: bool, tmp_path: Path
) -> None:
    shape = shaped(arch=arch, head_size=head_size, num_kv_heads=num_kv_heads, is_tied=is_tied)
    model = built(shape)
    reference = opened_in_transformers(model, tmp_path)
    assert type(reference).__name__.lower().startswith(arch)
    ids, targets = batch(shape)

    their_logits = reference(ids).logits
    torch.testing.assert_close(model(ids), their_logits, atol=1e-4, rtol=1e-4)

    loss = model.loss(ids, targets)
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, their_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    their_loss.backward()
    their_gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert their_gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        found = model.cut_padding(name, parameter.grad)
        assert found.abs().max() > 0, name
        torch.testing.assert_close(
            found, their_gradients[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_model_opened_in_transformers_has_the_shape_that_was_written(tmp_path: Path) -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        shape = shaped(arch=arch)
        reference = opened_in_transformers(built(shape), tmp_path)
        assert sum(p.numel() for p in reference.parameters()) == sum(count_params(shape).values())
        assert shape_from_config(json.loads(reference.config.to_json_string(use_diff=False))) == shape


def test_config_json_reads_back_as_the_same_shape() -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        assert shape_from_config(config_json(shaped(arch=arch))) == shaped(arch=arch)


def test_foreign_features_in_a_config_are_refused_and_all_named() -> None:
    config = config_json(TINY) | {"hidden_act": "gelu", "mlp_bias": True}
    config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 500.0}
    with pytest.raises(DataError) as caught:
        shape_from_config(config)
    assert all(word in caught.value.why for word in ("gelu", "mlp_bias", "llama3"))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_table_of_parameters_agrees_with_the_built_model(arch: str, is_tied: bool) -> None:
    shape = shaped(arch=arch, is_tied=is_tied)
    assert sum(count_params(shape).values()) == Decoder(shape).num_params()


def test_padding_rows_are_in_memory_but_neither_in_logits_nor_on_disk() -> None:
    model = built(TINY)
    assert model.model.embed_tokens.weight.shape[0] == 128
    assert model(batch(TINY)[0]).shape[-1] == 100
    on_disk = model.weights_for_disk()
    assert on_disk["model.embed_tokens.weight"].shape == (100, 32)
    assert on_disk["lm_head.weight"].shape == (100, 32)
    assert model.num_params() == sum(t.numel() for t in on_disk.values())


def test_values_of_padding_rows_have_no_effect_and_no_gradient() -> None:
    model = built(TINY)
    ids, targets = batch(TINY)
    before = model.loss(ids, targets)
    with torch.no_grad():
        model.model.embed_tokens.weight[100:] = 7.0
        model.lm_head.weight[100:] = 7.0
    after = model.loss(ids, targets)
    assert torch.equal(before, after)
    after.backward()
    assert model.lm_head.weight.grad[100:].abs().max() == 0


def test_weights_go_to_disk_and_come_back_the_same() -> None:
    for is_tied in (True, False):
        model = built(shaped(is_tied=is_tied))
        other = built(shaped(is_tied=is_tied), seed=5)
        other.load_weights(model.weights_for_disk())
        for (name, mine), (_, reference) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(model.cut_padding(name, mine), model.cut_padding(name, reference)), name
    assert "lm_head.weight" not in built(shaped(is_tied=True)).weights_for_disk()


def test_weights_that_do_not_fit_are_refused_and_each_one_is_named() -> None:
    model = built(TINY)
    weights = model.weights_for_disk()
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)
    weights["model.layers.9.extra"] = torch.zeros(1)
    with pytest.raises(DataError) as caught:
        model.load_weights(weights)
    why = caught.value.why
    assert "model.norm.weight is missing" in why
    assert "model.layers.1.mlp.up_proj.weight has shape (47, 32) in the file but (48, 32) in the model" in why
    assert "model.layers.9.extra" in why


def test_refused_weights_leave_the_model_as_it_was() -> None:
    model = built(TINY)
    before = {name: t.clone() for name, t in model.weights_for_disk().items()}
    with pytest.raises(DataError):
        model.load_weights({**before, "model.norm.weight": torch.zeros(3)})
    assert all(torch.equal(before[name], t) for name, t in model.weights_for_disk().items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_size": 7}, "head_size"),
        ({"arch": "gpt2"}, "arch"),
        ({"family": "quick"}, "family"),
        ({"width": 0}, "width"),
        ({"arch": "qwen2", "head_size": 16}, "4 x 16 = 64, not 32"),
    ],
)
def test_a_shape_that_cannot_work_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(DataError, match="cannot be built") as caught:
        Decoder(shaped(**changes))
    assert named in caught.value.why


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_piecewise_loss_equals_the_whole_one_with_its_gradients(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shaped(is_tied=is_tied)
    ids, targets = batch(shape, rows=4)
    targets = targets.clone()
    targets[0, :5] = -100
    targets[2] = -100
    gradients, losses = [], []
    for piece_logits in (2**26, 128 * 12):  # one piece, then 8
        monkeypatch.setattr(loss_module, "PIECE_LOGITS", piece_logits)
        model = built(shape)
        loss = model.loss(ids, targets)
        (loss * 3.0).backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-6, rtol=1e-5, msg=name)


def test_chunked_loss_computes_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "PIECE_LOGITS", 128 * 12)
    sizes: list[int] = []

    def watched(real: Any) -> Any:
        def counted(piece: torch.Tensor, *rest: Any) -> Any:
            sizes.append(len(piece))
            return real(piece, *rest)

        return counted

    for name in ("_differentiate", "_logits"):
        monkeypatch.setattr(loss_module, name, watched(getattr(loss_module, name)))
    model = built(TINY)
    ids, targets = batch(TINY, rows=4)
    model.loss(ids, targets).backward()
    assert sizes == [12] * 8
    with torch.no_grad():
        model.loss(ids, targets)
    assert sizes == [12] * 16


def test_ignored_targets_do_not_count_and_a_batch_of_them_teaches_nothing() -> None:
    model = built(TINY)
    ids, targets = batch(TINY)
    half = targets.clone()
    half[1] = -100
    torch.testing.assert_close(model.loss(ids, half), model.loss(ids[:1], targets[:1]))
    nothing = model.loss(ids, torch.full_like(targets, -100))
    nothing.backward()
    assert nothing == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


def test_token_losses_are_the_terms_of_the_mean_loss() -> None:
    model = built(TINY)
    ids, targets = batch(TINY)
    targets = targets.clone()
    targets[0, 3] = -100
    losses = model.token_losses(ids, targets)
    assert losses.shape == targets.shape
    assert losses[0, 3] == 0
    torch.testing.assert_close(losses.sum() / (targets.numel() - 1), model.loss(ids, targets))


# -- precision, positions, initialisation ------------------------------------------------------------------------------


@pytest.mark.acceptance(81, 97)
def test_bf16_compute_keeps_fp32_masters_and_gradients_and_stays_near() -> None:
    model = built(TINY)
    ids, targets = batch(TINY)
    exact = model.loss(ids, targets)
    model.set_precision("bf16")
    loss = model.loss(ids, targets)
    assert loss.dtype == torch.float32
    assert model(ids).dtype == torch.float32
    assert loss != exact
    torch.testing.assert_close(loss, exact, atol=0.02, rtol=0)
    loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_given_positions_are_the_ones_used() -> None:
    model = built(TINY)
    ids, _ = batch(TINY, rows=2, length=8)
    torch.testing.assert_close(model(ids, positions=torch.arange(8)), model(ids))
    per_row = torch.stack([torch.arange(8), torch.arange(4, 12)])
    shifted = model(ids, positions=per_row)
    # Rotary positions are relative: a shift of all of them leaves the logits, a stretch does not.
    torch.testing.assert_close(shifted, model(ids), atol=1e-5, rtol=1e-4)
    assert (model(ids, positions=torch.arange(8) * 2) - model(ids)).abs().max() > 1e-3


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, same, other = (built(TINY, seed).weights_for_disk() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])


def test_weights_do_not_depend_on_the_global_random_state_nor_disturb_it() -> None:
    torch.manual_seed(1)
    one = Decoder(TINY)
    one.init_weights(0)
    after_one = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after_one, torch.rand(3))
    torch.manual_seed(2)
    other = Decoder(TINY)
    other.init_weights(0)
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("width", [64, 512])
def test_fresh_weights_lose_about_the_logarithm_of_the_vocabulary(width: int, is_tied: bool) -> None:
    shape = shaped(width=width, head_size=width // 4, ffn_width=2 * width, vocab_size=1000, is_tied=is_tied)
    model = Decoder(shape)
    model.init_weights(0)
    ids, targets = batch(shape, rows=4, length=32)
    assert abs(model.loss(ids, targets).item() - math.log(1000)) < 0.4


def test_for_muon_a_head_of_its_own_begins_at_nearly_nothing_and_a_tied_one_as_ever() -> None:
    plain, own, tied, own_tied = (Decoder(shaped(is_tied=is_tied)) for is_tied in (False, False, True, True))
    plain.init_weights(0)
    tied.init_weights(0)
    own.init_weights(0, "muon")
    own_tied.init_weights(0, "muon")
    ratios = {
        name: (own.get_parameter(name).std() / p.std()).item() for name, p in plain.named_parameters() if p.dim() == 2
    }
    changed = {name.split(".")[-2]: round(ratio, 2) for name, ratio in ratios.items() if abs(ratio - 1) > 1e-6}
    assert changed == {"lm_head": 0.04, "gate_proj": 0.7, "up_proj": 0.7}
    assert torch.equal(tied.model.embed_tokens.weight, own_tied.model.embed_tokens.weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while tracing
def test_the_decoder_traces_into_one_graph() -> None:
    """A graph break would show as an error here; on CUDA it would only show as a slow run."""
    import torch._dynamo

    for piece_logits in (2**26, 128 * 12):
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_module, "PIECE_LOGITS", piece_logits)
            model = built(TINY)
            compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
            ids, targets = batch(TINY, rows=4)
            eager = model.loss(ids, targets)
            loss = compiled(ids, targets)
            loss.backward()
            torch.testing.assert_close(loss, eager)


# -- swift -------------------------------------------------------------------------------------------------------------

SWIFT = Model("swift", "swift", 4, 64, 4, 2, 16, 256, 32, 300, False, rope_base=1e5)


def shaken(shape: Model) -> Decoder:
    """Fresh weights, moved a little: zeros would hide what they multiply."""
    model = built(shape)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.cut_padding(name, parameter).add_(0.05 * torch.randn_like(model.cut_padding(name, parameter)))
    return model


def test_swift_counts_what_it_has_and_every_part_of_it_learns() -> None:
    model = shaken(SWIFT)
    assert model.num_params() == sum(count_params(SWIFT).values())
    ids, targets = batch(SWIFT)
    model.loss(ids, targets).backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert still == []


def test_swift_begins_at_a_guess_that_all_tokens_are_equally_likely() -> None:
    ids, targets = batch(SWIFT)
    assert built(SWIFT).loss(ids, targets).item() == pytest.approx(math.log(SWIFT.vocab_size), abs=0.1)


def test_swift_read_token_by_token_says_what_it_says_at_once() -> None:
    model = shaken(SWIFT)
    ids, _ = batch(SWIFT)
    with torch.no_grad():
        whole = model(ids)
        cache = model.new_cache(batch=len(ids))
        parts = [model(ids[:, :5], cache=cache), model(ids[:, 5:9], cache=cache)]
        parts += [model(ids[:, at : at + 1], cache=cache) for at in range(9, ids.shape[1])]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_swift_never_looks_ahead_and_its_logits_stay_inside_the_cap() -> None:
    model = shaken(SWIFT)
    ids, _ = batch(SWIFT)
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % SWIFT.vocab_size
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])
    assert float(before.abs().max()) < 15.0


def test_swift_comes_back_from_its_own_weights_without_padding() -> None:
    model, other = shaken(SWIFT), Decoder(SWIFT)
    on_disk = model.weights_for_disk()
    assert {len(t) for name, t in on_disk.items() if "embed" in name or "head" in name} == {300}
    other.load_weights(on_disk)
    ids, targets = batch(SWIFT)
    with torch.no_grad():
        assert torch.equal(model.loss(ids, targets), other.loss(ids, targets))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_piecewise_loss_holds_logits_inside_a_cap_with_the_right_gradient(
    softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(24, 16), torch.randn(64, 16)
    targets = torch.randint(0, 60, (24,))
    found = []
    for piece_logits in (2**26, 64 * 5):
        monkeypatch.setattr(loss_module, "PIECE_LOGITS", piece_logits)
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = loss_module.mean_loss(h, w, targets, 60, softcap)
        loss.backward()
        found.append((loss.detach(), h.grad, w.grad))
    for whole, chunks in zip(*found, strict=True):
        torch.testing.assert_close(chunks, whole, atol=1e-6, rtol=1e-5)


# -- on a card ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", [SWIFT, dataclasses.replace(TINY, arch="qwen3"), TINY], ids=lambda s: s.arch)
def test_kernels_compute_what_plain_torch_does(shape: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for has_triton in (True, False):
        monkeypatch.setattr(fused_ops, "HAS_TRITON", has_triton)
        model = shaken(shape).to("cuda").set_precision("bf16")
        ids, targets = (part.to("cuda") for part in batch(shape))
        model.loss(ids, targets).backward()
        found.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    floor = 1e-3 * max(float(g.norm()) for g in found[1])
    for mine, plain in zip(*found, strict=True):
        assert float((mine - plain).norm()) < 0.05 * (float(plain.norm()) + floor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", [SWIFT, dataclasses.replace(TINY, arch="qwen3"), TINY], ids=lambda s: s.arch)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=lambda b: b.name)
def test_kernels_have_the_right_gradients_of_one_row_whatever_attention_leaves(
    shape: Model, backend: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain attention in bf16 leaves them head by head: q, k and v were off by more than their size."""
    is_efficient = backend == SDPBackend.EFFICIENT_ATTENTION
    shape = dataclasses.replace(shape, num_kv_heads=shape.num_heads) if is_efficient else shape
    found = []
    for has_triton in (True, False):
        monkeypatch.setattr(fused_ops, "HAS_TRITON", has_triton)
        model = shaken(shape).to("cuda").set_precision("bf16")
        ids, targets = (part[:1].to("cuda") for part in batch(shape))
        with sdpa_kernel([backend]):
            model.loss(ids, targets).backward()
        found.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    floor = 1e-3 * max(float(g.norm()) for g in found[1].values())
    errors = {name: float((found[0][name] - g).norm()) / (float(g.norm()) + floor) for name, g in found[1].items()}
    print(f"{shape.arch}, {backend.name}: largest error {max(errors.values()):.3f}")
    assert max(errors.values()) < 0.05, errors


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("family", ["stock", "swift"])
def test_every_block_and_embedding_runs_its_hooks_once_per_forward_pass(family: str, recompute: str) -> None:
    """FSDP gathers a block's weights in such a hook. Without it, the block would compute with a part of them."""
    shape = SWIFT if family == "swift" else TINY
    model = shaken(SWIFT) if family == "swift" else built(TINY)
    model.set_recompute(recompute)
    called: list[str] = []
    hooked = [(name, m) for name, m in model.named_modules() if name.endswith("_embed") or "embed_tokens" in name]
    hooked += [(f"layers.{number}", block) for number, block in enumerate(model.model.layers)]
    for name, module in hooked:
        module.register_forward_pre_hook(lambda module, given, name=name: called.append(name))
    ids, targets = batch(shape)
    model.loss(ids, targets).backward()
    assert sorted(called) == sorted(name for name, _ in hooked)
    with torch.no_grad():
        model.token_losses(ids, targets)
    assert sorted(called) == sorted(2 * [name for name, _ in hooked])


def test_weights_can_be_loaded_one_tensor_at_a_time() -> None:
    source, other = built(TINY), built(TINY, seed=1)
    other.load_each(source.weights_for_disk().items())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.parameters(), source.parameters(), strict=True))
    tied, own_tied = built(shaped(is_tied=True)), built(shaped(is_tied=True), seed=1)
    copied = {**tied.weights_for_disk(), "lm_head.weight": torch.zeros(3)}
    own_tied.load_each(copied.items())
    assert torch.equal(tied.model.embed_tokens.weight, own_tied.model.embed_tokens.weight)
    with pytest.raises(DataError, match=r"model\.norm\.weight"):
        other.load_each((name, t) for name, t in source.weights_for_disk().items() if name != "model.norm.weight")
