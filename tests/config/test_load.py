from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.config.conftest import BASE, put_data

from homing.config.home_and_run_files import preset_dir
from homing.config.load import Loaded, load_run
from homing.config.resolve.smoke_profile import has_smoke_failed, has_smoke_passed, mark_smoke, needs_smoke_first
from homing.errors import Mistake, RunFileError
from homing.wire.codec import dump, dumps, loads
from homing.wire.run_json import Run

Load = Callable[..., Loaded]
PRESETS = sorted(path.stem for path in preset_dir().glob("*.yaml"))


@pytest.mark.acceptance(29, 75, 125)
def test_human_units_become_base_units(load: Load) -> None:
    run = load(
        BASE.replace("steps: 100", "tokens: 2.5k") + "limits: {spend: $12.50, idle: 45m, rate: $2.49/h, time: 1h30m}\n"
        "data: {val_fraction: 5%, shard_tokens: 10M}\ntokenizer: {sample: 1.5MB}\ncheckpoint: {every_time: 10m}\n"
    )
    assert run.run.limits.spend_usd == "12.50"
    assert run.run.limits.rate_usd_per_hour == "2.49"
    assert (run.run.limits.idle_s, run.run.limits.time_s) == (2700.0, 5400.0)
    assert run.run.train.time_limit_s == 5400.0
    assert run.run.phases[0].num_steps == 9
    assert run.run.phases[0].save_every_s == 600.0
    assert (run.prep.val_fraction, run.prep.shard_tokens, run.prep.sample_bytes) == (0.05, 10_000_000, 1_500_000)
    assert load(BASE).run.limits.idle_s == 1800.0, "half an hour where nothing is said"


@pytest.mark.acceptance("X8")
def test_every_value_says_where_it_came_from(load: Load) -> None:
    run = load(BASE, "phases[0].lr=0.01", "limits.spend=$3").run
    origin = run.origin
    assert origin["model.width"] == "run file, line 4"
    assert origin["phases.0.optimizer.lr"] == "--set"
    assert origin["limits.spend_usd"] == "--set"
    assert origin["seed"] == "default"
    assert origin["model.ffn_width"] == "derived from model.width"
    leaves = {path for path in _leaves(dump(run)) if not path.startswith("origin")}
    assert leaves <= set(origin)
    assert load_run(str(preset_dir() / "tiny.yaml")).run.origin["model.width"].startswith("preset tiny, line")


def _leaves(value: object, path: str = "") -> list[str]:
    if isinstance(value, dict):
        inside = [(f"{path}.{name}".strip("."), inner) for name, inner in value.items() if name != "schema"]
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        inside = [(f"{path}.{number}", inner) for number, inner in enumerate(value)]
    else:
        return [path]
    return [leaf for name, inner in inside for leaf in _leaves(inner, name)]


def test_the_dial_derives_the_rest_and_the_file_overrides_it(load: Load) -> None:
    run = load("name: base\nmodel:\n  depth: 12\n").run
    assert (run.model.arch, run.model.width, run.model.num_heads, run.model.head_size) == ("qwen3", 768, 6, 128)
    assert (run.model.context, run.model.is_tied, run.model.ffn_width) == (2048, False, 2048)
    assert run.phases[0].batch_tokens == 2**19
    assert run.phases[0].num_steps == 12 * run.sizes.num_matmul_params // 2**19
    assert run.phases[0].optimizer.lr == pytest.approx(0.02)
    assert run.phases[0].schedule.kind == "wsd"
    assert run.origin["model.width"] == "derived from model.depth"
    wider = load("name: base\nmodel: {depth: 12, width: 1024, context: 512}\nphases: [{tokens: 1B}]\n").run
    assert (wider.model.num_layers, wider.model.width, wider.model.num_heads, wider.model.context) == (12, 1024, 8, 512)
    assert wider.phases[0].num_steps == 10**9 // wider.phases[0].batch_tokens


def test_a_deeper_dial_means_more_tokens_a_larger_batch_and_lower_head_rates(load: Load) -> None:
    runs = [load(f"name: base\nmodel: {{depth: {depth}}}\n").run for depth in (4, 12, 24, 32)]
    assert [r.model.width for r in runs] == [256, 768, 1536, 2048]
    assert sorted(r.phases[0].batch_tokens for r in runs) == [r.phases[0].batch_tokens for r in runs]
    batches = {r.phases[0].batch_tokens for r in runs}
    assert all(batch & (batch - 1) == 0 for batch in batches)
    assert len(batches) > 2


@pytest.mark.acceptance(5)
def test_a_length_on_the_command_line_replaces_the_files(load: Load) -> None:
    loaded = load(BASE, "phases.0.tokens=5120")
    assert loaded.run.phases[0].num_steps == 20
    assert "replaces phases.0.steps" in loaded.warnings[0]


def test_the_dial_on_the_command_line_replaces_the_files_shape(load: Load) -> None:
    loaded = load(BASE, "model.depth=2", "phases.0.batch_tokens=2048")
    assert (loaded.run.model.width, loaded.run.model.num_layers, loaded.run.model.context) == (128, 2, 32)
    assert "model.width" in loaded.warnings[0]


def test_a_phases_own_keys_win_over_the_runs(load: Load) -> None:
    text = (
        BASE
        + "    eval: {every: 7}\n    checkpoint: {keep_last: 9}\neval: {every: 3, tokens: 64}\ncheckpoint: {every: 5}\n"
    )
    phase = load(text).run.phases[0]
    assert (phase.eval_every, phase.eval_tokens, phase.save_every, phase.keep_last) == (7, 64, 5, 9)


def test_prepared_data_gives_counts_hashes_and_vocabulary(load: Load, folder: Path) -> None:
    put_data(folder, vocab_size=512, num_tokens=10_000)
    loaded = load(BASE.replace("steps: 100", "epochs: 4"))
    assert loaded.is_prepared
    assert loaded.run.model.vocab_size == 512
    assert loaded.run.data.num_train_tokens == 10_000
    assert loaded.run.data.num_val_tokens == 1_000
    assert len(loaded.run.data.manifest_sha256) == 64
    assert loaded.run.data.dir == str(folder / "data" / "base")
    assert loaded.run.phases[0].num_steps == 40_000 // 256
    assert not loaded.warnings


def test_more_than_four_passes_over_the_text_are_pointed_out(load: Load, folder: Path) -> None:
    put_data(folder)
    assert any("20.0 times" in warning for warning in load(BASE.replace("steps: 100", "epochs: 20")).warnings)


def test_a_vocabulary_mismatch_names_both_numbers_and_both_files(
    load: Load, mistakes: Callable[..., list[Mistake]], folder: Path
) -> None:
    put_data(folder, vocab_size=512)
    text = BASE + "tokenizer: {vocab_size: 600}\n"
    (found,) = mistakes(text)
    for part in ("600", "512", "runs/base.yaml", "data/base/tokenizer.json"):
        assert part in str(found)
    assert found.line == 10
    assert load(text, is_for_prep=True).prep.vocab_size == 600


def test_by_default_every_second_evaluation_is_a_checkpoints(load: Load) -> None:
    for steps in (1, 19, 100, 1050, 7751):
        phase = load(BASE.replace("steps: 100", f"steps: {steps}")).run.phases[0]
        assert phase.save_every == 2 * phase.eval_every


@pytest.mark.parametrize("steps", [1, 7, 33, 99, 150, 199, 200, 333, 499])
def test_a_short_phase_is_evaluated_and_saved_a_few_times_only(load: Load, steps: int) -> None:
    phase = load(BASE.replace("steps: 100", f"steps: {steps}")).run.phases[0]
    assert phase.eval_every >= 10
    assert steps // phase.eval_every <= 21
    assert steps // phase.save_every <= 5
    assert phase.save_every % phase.eval_every == 0, "each checkpoint falls on an evaluation"
    asked = load(BASE.replace("steps: 100", f"steps: {steps}") + "eval: {every: 1}\ncheckpoint: {every: 2}\n")
    assert (asked.run.phases[0].eval_every, asked.run.phases[0].save_every) == (1, 2)


def test_the_tokenizer_learns_from_100_mb_and_a_home_in_its_path_is_spelled_out(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(BASE).prep.sample_bytes == 100_000_000
    place = put_data(folder, name="other", vocab_size=777)
    monkeypatch.setenv("HOME", str(place))
    assert load(BASE + "tokenizer: {file: ~/tokenizer.json}\n").prep.tokenizer == str(place / "tokenizer.json")


@pytest.mark.parametrize(
    "key", ["data: {dir: X}", "data: {text: [X]}", "sample: {prompts: [X]}", "tokenizer: {file: X}"]
)
def test_a_null_character_in_a_text_is_a_mistake_with_its_line(
    mistakes: Callable[..., list[Mistake]], key: str
) -> None:
    found = mistakes(BASE + key.replace("X", '"a\\0b"') + "\n")
    assert "null character" in found[0].problem
    assert found[0].line == 10


def test_a_phase_of_only_a_dash_can_be_smoked(load: Load) -> None:
    run = load("name: base\nmodel: {depth: 2}\nphases:\n  -\n", is_smoke=True).run
    assert run.phases[0].num_steps == 200


def test_a_manifest_that_cannot_be_read_is_not_the_same_as_none(
    mistakes: Callable[..., list[Mistake]], folder: Path
) -> None:
    place = put_data(folder)
    (place / "manifest.json").write_text("{")
    assert "not a valid manifest" in mistakes(BASE)[0].problem


def test_an_existing_tokenizer_decides_the_vocabulary(
    load: Load, mistakes: Callable[..., list[Mistake]], folder: Path
) -> None:
    place = put_data(folder, name="other", vocab_size=777)
    text = BASE + f"tokenizer: {{file: {place / 'tokenizer.json'}}}\n"
    assert load(text).run.model.vocab_size == 777
    assert "777" in mistakes(text.replace("{file", "{vocab_size: 700, file"))[0].problem


def test_before_prep_the_tokens_are_estimated_and_said_to_be(load: Load) -> None:
    Path("a.txt").write_text("word " * 20_000)
    loaded = load(BASE.replace("steps: 100", "epochs: 2") + "data: {text: a.txt}\n")
    assert not loaded.is_prepared
    assert loaded.run.data.num_train_tokens == 0
    assert 50 < loaded.run.phases[0].num_steps < 400
    assert "estimated" in loaded.warnings[0]


@pytest.mark.acceptance(22)
def test_goethes_four_epochs_are_7751_steps(load: Load, folder: Path) -> None:
    manifest = put_data(folder, name="goethe-75m", vocab_size=32_768) / "manifest.json"
    messages = json.loads(manifest.read_text())
    messages["splits"]["train"]["num_tokens"] = 254_000_000
    manifest.write_text(json.dumps(messages))
    preset = (preset_dir() / "goethe-75m.yaml").read_text()
    whole = load(preset, name="goethe-75m.yaml")
    assert (whole.run.phases[0].num_steps, whole.warnings) == (7751, []), "as 254M x 4 / 131,072, about 1B tokens"
    more = load(preset, "phases.0.steps=8000", name="goethe-75m.yaml")
    assert more.run.phases[0].num_steps == 8000
    assert not any("4 passes" in each for each in more.warnings), "4.1 are about 4"
    far = load(preset, "phases.0.steps=16000", name="goethe-75m.yaml")
    assert any("8.3 times. After about 4 passes" in each for each in far.warnings)
    absurd = load(preset, "phases.0.steps=1000000000", "phases.0.batch_tokens=131072", name="goethe-75m.yaml")
    assert any(" 516,031 times. After about 4 passes" in each for each in absurd.warnings), absurd.warnings


@pytest.mark.acceptance("X9")
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_resolves_smokes_and_survives_the_wire(preset: str) -> None:
    loaded = load_run(str(preset_dir() / f"{preset}.yaml"))
    assert loads(Run, dumps(loaded.run)) == loaded.run
    assert loaded.run.name == preset
    small = load_run(str(preset_dir() / f"{preset}.yaml"), is_smoke=True).run
    assert small.name == f"{preset}-smoke"
    assert small.data.dir.endswith(f"data/{preset}-smoke")
    assert small.sizes.num_params < 2_000_000
    assert small.phases[0].num_steps <= 200
    assert small.phases[0].optimizer.kind == loaded.run.phases[0].optimizer.kind
    assert small.origin["model.width"] == "smoke profile"


@pytest.mark.acceptance(83)
@pytest.mark.parametrize(
    ("preset", "num_params"),
    [("goethe-75m", 75e6), ("gpt-124m", 124e6), ("medium-22m", 22e6), ("1b", 1e9), ("2b", 1.97e9), ("4b", 4e9)],
)
def test_each_preset_is_within_two_percent_of_the_size_in_its_name(preset: str, num_params: float) -> None:
    found = load_run(str(preset_dir() / f"{preset}.yaml")).run.sizes.num_params
    assert found == pytest.approx(num_params, rel=0.02)


@pytest.mark.acceptance(83, 86)
@pytest.mark.parametrize(
    ("preset", "shape"),
    [
        ("goethe-75m", (640, 12, 10, 5, 1728, 512, 32768, True)),
        ("cs336", (512, 6, 8, 8, 1344, 1024, 10000, False)),
        ("medium-22m", (384, 6, 6, 6, 896, 512, 32000, True)),
        ("1b", (2048, 20, 32, 32, 4864, 2048, 32768, True)),
        ("2b", (2560, 24, 40, 40, 6848, 2048, 32768, True)),
        ("4b", (3072, 32, 48, 48, 9152, 2048, 32768, True)),
    ],
)
def test_presets_keep_the_shapes_people_know(preset: str, shape: tuple[object, ...]) -> None:
    m = load_run(str(preset_dir() / f"{preset}.yaml")).run.model
    heads = (m.num_heads, m.num_kv_heads)
    assert (m.width, m.num_layers, *heads, m.ffn_width, m.context, m.vocab_size, m.is_tied) == shape


@pytest.mark.acceptance(83)
@pytest.mark.parametrize(
    ("preset", "micro_batch", "times", "num_steps"),
    [("1b", 4, 32, 400_000), ("2b", 2, 64, 400_000), ("4b", 1, 256, 400_000), ("cs336", 32, 1, 100_000)],
)
def test_presets_keep_the_batches_people_know(preset: str, micro_batch: int, times: int, num_steps: int) -> None:
    run = load_run(str(preset_dir() / f"{preset}.yaml")).run
    phase, context = run.phases[0], run.model.context
    assert phase.num_steps == num_steps
    assert phase.batch_tokens == micro_batch * times * context
    assert (phase.micro_batch or micro_batch) == micro_batch


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_comments_of_a_preset_advise_works(preset: str) -> None:
    path = preset_dir() / f"{preset}.yaml"
    for advised in re.findall(r"--set (\S+)", path.read_text()):
        load_run(str(path), [advised])


def test_fewer_steps_than_the_warmup_drop_the_warmup_with_a_notice(load: Load) -> None:
    text = BASE + "    warmup_steps: 20\n"
    loaded = load(text, "phases.0.steps=20")
    assert loaded.run.phases[0].schedule.warmup_steps == 1
    assert any("replaces phases.0.warmup_steps" in warning for warning in loaded.warnings)
    assert load(text, "phases.0.steps=21").run.phases[0].schedule.warmup_steps == 20


@pytest.mark.acceptance("X9")
def test_a_smoke_takes_little_of_the_text_and_plan_counts_with_that(load: Load, folder: Path) -> None:
    (folder / "much.txt").write_bytes(b"a " * 15_000_000)
    text = BASE + "data: {text: [much.txt]}\n"
    assert load(text).prep.take_bytes == 0
    small = load(text, is_smoke=True)
    assert small.prep.take_bytes == 20_000_000
    assert any("estimated from 20.00 MB of text" in warning for warning in small.warnings)
    own = load(text, "data.take=2MB")
    assert any("estimated from 2.00 MB of text" in warning for warning in own.warnings)
    assert load(text, "data.take=2MB", is_smoke=True).prep.take_bytes == 2_000_000, "less stays less"


def test_a_smoke_of_the_dial_and_of_an_existing_tokenizer_works_too(load: Load, folder: Path) -> None:
    place = put_data(folder, name="other", vocab_size=777)
    text = f"name: base\nmodel: {{depth: 20}}\ntokenizer: {{file: {place / 'tokenizer.json'}}}\n"
    small = load(text, is_smoke=True).run
    assert small.model.vocab_size == 777
    assert small.model.width == 128


@pytest.mark.acceptance(5)
def test_big_runs_ask_for_a_smoke_first_and_remember_that_it_passed(load: Load, folder: Path) -> None:
    assert not needs_smoke_first(load(BASE).run)
    assert needs_smoke_first(load(BASE, "phases.0.tokens=3B").run)
    assert needs_smoke_first(load_run(str(preset_dir() / "1b.yaml")).run)
    file = folder / "runs" / "base.yaml"
    assert not has_smoke_passed(file)
    assert not has_smoke_failed(file)
    mark_smoke(file, is_passed=False)
    assert (has_smoke_passed(file), has_smoke_failed(file)) == (False, True)
    mark_smoke(file, is_passed=True, figures={"loss": 1.0})
    assert (has_smoke_passed(file), has_smoke_failed(file)) == (True, False), "the last one counts"
    file.write_text(BASE + "# changed\n")
    assert (has_smoke_passed(file), has_smoke_failed(file)) == (False, False)


@pytest.mark.acceptance("X12")
def test_stores_and_cards_are_spelled_out(load: Load, folder: Path, homing_home: Path) -> None:
    assert load(BASE).run.store == f"file:{homing_home / 'store'}"
    run = load(BASE + "store: file:there\ncloud: {gpu: a100-80gb}\n").run
    assert run.store == f"file:{folder / 'there'}"
    assert run.cloud.gpu == "A100"


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/homing", "s3:bucket", "s3://b-1?endpoint=https://x.org:9000&region=auto", "hf:me/runs",
     "hf:datasets/me/runs/deep", "file:/x", "file:///x"],
)  # fmt: skip
def test_every_kind_of_store_is_taken_as_written(load: Load, url: str) -> None:
    assert load(BASE + f"store: {url}\n").run.store == url


@pytest.mark.acceptance("X8")
def test_toml_and_json_say_the_same_as_yaml(load: Load) -> None:
    yaml = load(BASE).run
    toml = load(
        'name = "base"\n[model]\nlayers = 2\nwidth = 64\nheads = 2\ncontext = 32\n'
        "[[phases]]\nsteps = 100\nbatch_tokens = 256\n",
        name="base.toml",
    ).run
    json = load(
        '{"name": "base", "model": {"layers": 2, "width": 64, "heads": 2, "context": 32},'
        ' "phases": [{"steps": 100, "batch_tokens": 256}]}',
        name="base.json",
    ).run
    assert yaml.model == toml.model == json.model
    assert yaml.phases == toml.phases == json.phases


DIAL = (
    "name: base\nmodel: {depth: 2}\ntokenizer: {vocab_size: 2048}\ndata: {text: [a.txt]}\nphases:\n  - {steps: 300}\n"
)


def test_a_derived_batch_does_not_read_a_small_text_over_and_over(load: Load, folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"moss " * 160_000)
    loaded = load(DIAL)
    phase = loaded.run.phases[0]
    guess = 800_000 / 2.35
    assert 300 * phase.batch_tokens <= 4 * guess
    assert phase.batch_tokens % loaded.run.model.context == 0
    assert "4 passes" in loaded.run.origin["phases.0.batch_tokens"]
    [messages] = [warning for warning in loaded.warnings if f"{phase.batch_tokens:,} tokens per step" in warning]
    assert "batch_tokens" in messages
    (folder / "a.txt").write_bytes(b"moss " * 16_000_000)
    assert load(DIAL).run.phases[0].batch_tokens > phase.batch_tokens


def test_a_given_batch_size_is_kept_and_its_passes_are_shown(load: Load, folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"moss " * 16_000)
    loaded = load(DIAL.replace("steps: 300", "steps: 30, batch_tokens: 32768"))
    assert loaded.run.phases[0].batch_tokens == 32768
    assert any(" 39.9 times" in warning for warning in loaded.warnings), loaded.warnings


def test_an_implied_length_replaces_every_other_length_without_a_notice(load: Load) -> None:
    from homing.config.load import Implied

    text = BASE.replace("steps: 100", "epochs: 3")
    assert (
        load(text, "phases.0.steps=4").warnings[0] == "--set phases.0.steps replaces phases.0.epochs from the run file."
    )
    for typed in ((), ("phases.0.epochs=1",)):
        loaded = load(text, *typed, Implied("phases.0.steps=4"))
        assert loaded.run.phases[0].num_steps == 4
        assert not any("replaces" in warning for warning in loaded.warnings)


def test_a_number_is_accepted_as_a_string_and_an_unknown_gpu_is_answered_with_its_name(load: Load) -> None:
    assert load(BASE, "name=12").run.name == "12"
    for text, sets in ((BASE, ("cloud.gpu=4090",)), (BASE + "cloud: {gpu: 4090}\n", ())):
        with pytest.raises(RunFileError) as raised:
            load(text, *sets)
        assert "'4090' is not a known GPU. Did you mean RTX4090?" in str(raised.value.why)


def test_a_plan_with_too_few_steps_to_learn_is_warned_of_with_a_batch_that_makes_enough(
    load: Load, folder: Path
) -> None:
    put_data(folder, num_tokens=32_768)
    text = (
        BASE.replace("steps: 100\n    batch_tokens: 256", "epochs: 2\n    batch_tokens: 8192")
        + "tokenizer: {vocab_size: 512}\n"
    )
    (warning,) = [each for each in load(text).warnings if "too few" in each]
    assert warning.startswith("phases.0 has only 8 steps of 8,192 tokens, too few for a model of ")
    batch = int(warning.split("batch_tokens=")[1].split()[0])
    assert f"({8 * 8192 // batch:,} steps)" in warning
    assert not [each for each in load(text, f"phases.0.batch_tokens={batch}").warnings if "too few" in each]
    assert not [each for each in load(text, "phases.0.steps=8").warnings if "too few" in each], "chosen by the user"


def test_held_out_text_shorter_than_one_row_is_warned_of(load: Load, folder: Path) -> None:
    put_data(folder, num_tokens=200)
    (warning,) = [
        each for each in load(BASE + "tokenizer: {vocab_size: 512}\n").warnings if "held-out text has 20 tokens" in each
    ]
    assert "less than one row of" in warning
    assert "raise data.val_fraction" in warning


def test_one_mistake_in_an_option_is_not_repeated_on_each_line(load: Load) -> None:
    with pytest.raises(RunFileError) as raised:
        load(BASE, "phases.0.steps=0")
    assert raised.value.what == "--set phases.0.steps=0 is not valid."
    assert raised.value.why == "phases.0.steps: 0 is out of range. Allowed: at least 1, at most 1,000,000,000."
    assert raised.value.fix.startswith("Change the option.")


def test_too_many_passes_are_answered_with_the_number_of_steps_that_makes_four(load: Load, folder: Path) -> None:
    put_data(folder, num_tokens=10_000)
    text = BASE.replace("steps: 100", "steps: 1000") + "tokenizer: {vocab_size: 512}\n"
    (warning,) = [each for each in load(text).warnings if "After about 4 passes" in each]
    assert warning.endswith("Use more text, or fewer steps: --set phases.0.steps=156")
    assert not [each for each in load(text, "phases.0.steps=156").warnings if "After about 4 passes" in each]


def test_a_phase_that_the_run_lacks_is_answered_with_how_to_add_it(load: Load) -> None:
    with pytest.raises(RunFileError) as raised:
        load(BASE, "train.only=sft")
    assert raised.value.what == "--phase sft is not valid."
    assert "To add it, put `- kind: sft` under phases." in raised.value.why
    with pytest.raises(RunFileError) as raised:
        load(BASE, "train.only=poetry")
    assert "To add it" not in raised.value.why
