"""Claims of README and docs against what they are about: result files, the code, and what was never tried."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from homing.cloud.home import Home
from homing.cloud.plan import measured_speeds
from homing.cloud.plan.speed import estimate
from homing.cloud.providers.base import Offer
from homing.cloud.providers.local.provider import DEFAULT_RATE_USD_PER_HOUR
from homing.config.estimate.memory import fits
from homing.config.home_and_run_files import preset_dir
from homing.config.load import load_run
from homing.gpus import GPUS
from homing.world import World

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    """Lines joined, so that a sentence is found wherever it is broken."""
    path = ROOT / name
    return " ".join(path.read_text(encoding="utf-8").split())


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def figures(name: str) -> dict[str, Any]:
    found: dict[str, Any] = document(name)["figures"]
    return found


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def item(number: str) -> str:
    """What docs/acceptance.yaml says of an item."""
    sections = YAML(typ="safe", pure=True).load((ROOT / "docs/acceptance.yaml").read_text(encoding="utf-8"))
    (found,) = [each for section in sections for each in section["items"] if str(each["number"]) == number]
    return f"{found['does']} {found.get('missing', '')}"


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_log_tells_the_landings_and_preemptions_of_their_files() -> None:
    log, landing, preempt = page("docs/development/log.md"), figures("proofs/landing"), figures("proofs/preempt")
    _, middle, _ = landing["share_of_limit_used"]
    assert f"{landing['num_good']} of {landing['num_runs']} runs delivered a finished model within their limits" in log
    assert f"The median run used {middle:.0%} of its limit" in log
    assert f"better by {landing['decay_gain_nats']:.3f} nats" in log
    assert f"{preempt['preemptions']['notice']} with notice and {preempt['preemptions']['none']} without" in log
    assert f"{preempt['steps_done_twice']} steps had to be repeated" in log


def test_the_readme_shows_the_proofs_as_recorded() -> None:
    readme = page("README.md")
    landing, simulated, preempt = (figures(f"proofs/{name}") for name in ("landing", "simulate", "preempt"))
    assert f"{landing['num_good']} of {landing['num_runs']} runs" in readme
    assert (f"{simulated['schedules']:,} simulated fault schedules" in readme, simulated["broken"]) == (True, 0)
    num_preempted = sum(preempt["preemptions"].values())
    assert f"{num_preempted} preemptions: same final weights" in readme
    assert f"{preempt['steps_done_twice']} steps were computed twice" in readme
    assert f"{preempt['steps_done_twice']} steps were computed twice" in page("docs/guides/resume.md")
    corruptions = figures("proofs/store_faults")["corruptions"]
    assert (f"{corruptions['count']:,} corruptions: none was loaded" in readme, corruptions["loaded_damaged"]) == (
        True,
        0,
    )
    prep, lora = figures("results/prep"), figures("results/lora")
    assert f"{prep['ours_mb_per_s']:.0f} MB/s on 2 cores" in readme
    assert f"batch encoder: {prep['tiktoken_mb_per_s']:.1f} MB/s" in readme
    assert f"{lora['lora']['best']['tokens_per_s']:,} tok/s, {lora['ratio']:.2f} times transformers + peft" in readme
    models = [each for each in figures("proofs/gguf_in_llama_cpp").values() if "texts_with_other_ids" in each]
    assert {each["texts_with_other_ids"] for each in models} == {0}


def test_acceptance_says_how_many_steps_a_preemption_costs() -> None:
    preempt = figures("proofs/preempt")
    assert f"({preempt['steps_done_twice']} in twenty preemptions of a run of {preempt['steps']} steps" in item("106")
    assert preempt["preemptions"]["notice"] + preempt["preemptions"]["none"] == 20


def test_the_log_tells_the_five_minute_runs_of_their_file_with_the_batch_of_each() -> None:
    text, rows = (ROOT / "docs/development/log.md").read_text(encoding="utf-8"), figures("results/quality")["rows"]
    for recipe, shown in (("swift", "`swift`"), ("stock", "`stock`"), ("nanochat", "nanochat, its default batch")):
        seeds = sorted((each for each in rows if each["run"] == recipe), key=lambda each: int(each["seed"]))
        bits = " | ".join(f"{each['val_bits_per_byte']:.4f}" for each in seeds)
        assert f"| {shown} | {seeds[0]['batch_tokens']:,} | {bits} |" in text


def test_the_engine_page_has_the_measured_first_steps_and_model_errors() -> None:
    engine, first = page("docs/development/engine.md"), figures("results/engine")["speed"]["d12"]
    assert f"took {first['first_step_s']} s cold and {first['first_step_warm_s']} s warm" in engine
    table = measured_speeds.load_table()
    fit, errors = measured_speeds._fit(table), []
    for each in (each for each in table.steps if each.kind != "rl"):
        work, gpu = measured_speeds._work_of(each), GPUS[each.card]
        rate = measured_speeds._rate(fit, gpu, work, each.precision, is_packed=each.is_packed)
        errors.append(abs(rate / each.tokens_per_s - 1))
    *_, second, worst = sorted(errors)
    match = re.search(r"are within (\d+)% of all measured rows, and within (\d+)% of all but one", engine)
    assert match is not None
    assert int(match[1]) - 2 < 100 * worst <= int(match[1])
    assert int(match[2]) - 2 < 100 * second <= int(match[2])


def test_the_design_page_has_the_recorded_encoding_speed_and_proof_hours() -> None:
    design, prep = page("docs/development/design.md"), figures("results/prep")
    assert f"encoded {prep['ours_mb_per_s']:.0f} MB/s" in design
    assert f"tiktoken's batch encoder reached {prep['tiktoken_mb_per_s']:.1f} MB/s" in design
    seconds = sum(_seconds(figures(f"proofs/{path.stem}")) for path in (ROOT / "benchmarks/proofs").glob("*.json"))
    match = re.search(r"`make prove`, about (\d+) hours", design)
    assert match is not None
    assert int(match[1]) * 0.7 < seconds / 3600 < int(match[1]) * 1.3, seconds / 3600


def _seconds(value: Any) -> float:
    if not isinstance(value, dict):
        return 0.0
    own = value.get("seconds")
    return (own if isinstance(own, (int, float)) else 0.0) + sum(map(_seconds, value.values()))


def test_every_speed_on_a_page_is_in_a_result_file_or_says_that_it_is_not() -> None:
    measured_ones = {
        round(number)
        for folder in ("results", "proofs")
        for path in (ROOT / "benchmarks" / folder).glob("*.json")
        for number in numbers(document(f"{folder}/{path.stem}"))
    }
    found = []
    for path in PAGES:
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            if re.search(r"unverified|goals were|the speed model predicts", paragraph, re.IGNORECASE):
                continue
            for number in re.findall(r"(\d{1,3}(?:,\d{3})+) tok/s", paragraph):
                if int(number.replace(",", "")) not in measured_ones:
                    found.append(f"{path.name}: {number} tok/s")
    assert found == []


@pytest.mark.regression("goethe-hours")
def test_the_preset_that_names_hours_on_a_card_names_those_of_the_plan() -> None:
    head = (preset_dir() / "goethe-75m.yaml").read_text(encoding="utf-8").splitlines()[0]
    match = re.search(r"in about (\w+) hours of one RTX (\d+)", head)
    assert match is not None, head
    hours = {"one": 1, "two": 2, "three": 3, "four": 4}[match[1]]
    run, card = load_run(str(preset_dir() / "goethe-75m.yaml"), ["phases.0.steps=7751"]).run, f"RTX{match[2]}"
    with tempfile.TemporaryDirectory() as folder:
        offer = Offer("runpod", card, card, 1, 16, GPUS[card].memory_gib * 2**30, Decimal(1))
        rate = estimate(run, offer, Home(Path(folder), World())).tokens_per_s
    planned = run.phases[0].num_steps * run.phases[0].batch_tokens / rate / 3600
    assert planned == pytest.approx(hours, rel=0.2)


@pytest.mark.parametrize("preset", ["1b", "2b", "4b"])
def test_a_preset_that_names_the_memory_of_a_card_fits_every_such_card(preset: str) -> None:
    path = preset_dir() / f"{preset}.yaml"
    match = re.search(r"for one card of (\d+) GB( or more)?", path.read_text(encoding="utf-8").splitlines()[0])
    assert match is not None
    found = fits(load_run(str(path), ["phases.0.steps=10"]).run)
    assert {fit.is_fitting for fit in found if fit.gpu.memory_gib >= int(match[1])} == {True}
    if match[2]:  # the least that it needs, so that the sizes below do not fit
        assert {fit.is_fitting for fit in found if fit.gpu.memory_gib < int(match[1])} == {False}


# -- money -------------------------------------------------------------------------------------------------------------


def test_the_example_limit_lasts_as_long_as_the_page_says_and_ends_the_run() -> None:
    text = page("docs/guides/spend-limit.md")
    launch = re.search(r"homing launch poor --spend-limit ([\d.]+) --set phases\.0\.steps=(\d+) --yes", text)
    assert launch is not None
    seconds = Decimal(launch[1]) / DEFAULT_RATE_USD_PER_HOUR * 3600
    assert (
        f"a made-up rate of ${DEFAULT_RATE_USD_PER_HOUR} an hour, so the limit below lasts for {seconds:.0f} s" in text
    )
    # At the speed of the quickstart, which uses this preset. A run that ends before its limit would not show the limit.
    quickstart = figures("results/quickstart")
    steps_per_s = quickstart["tokens"] / 2048 / quickstart["seconds"]
    assert int(launch[2]) > 5 * steps_per_s * float(seconds)


def test_schedules_of_faults_are_as_many_and_as_long_as_is_said() -> None:
    simulated = figures("proofs/simulate")
    minutes = simulated["virtual_hours"] * 60 / simulated["schedules"]
    assert simulated["schedules"] == 10_000
    for text in (page("docs/guides/guards.md"), item("X26")):
        assert "ten thousand" in text
        assert re.search(rf"about {minutes:.0f} (simulated )?minutes", text)
    for path in PAGES:
        assert not re.search(r"thousand (simulated )?days", path.read_text(encoding="utf-8")), path.name


def test_what_the_limit_leaves_out_is_said_alike_on_every_page() -> None:
    text = page("docs/guides/spend-limit.md")
    assert "| a network volume of RunPod | no, at no time" in text
    assert "| `cloud.aws.volume` while none lives | no:" in text
    assert "| `cloud.aws.volume`, while an instance of the run lives: it is in the rate of the offer | yes |" in text
    assert "volumes included" not in text
    assert "**outside the run's limit**" in page("docs/clouds/runpod.md")
    assert "outside the limit, until it is destroyed" in page("docs/clouds/aws.md")


# -- what is promised --------------------------------------------------------------------------------------------------


def test_the_first_promise_names_its_condition_on_every_page() -> None:
    for name in ("README.md", "docs/development/design.md"):
        text = page(name)
        assert (
            "**The limit holds while one armed guard lives" in text
            or "**The limit holds** while one armed guard" in text
        )
        assert "money limit that holds" not in text


def test_the_same_bits_on_a_cpu_are_promised_for_the_same_number_of_threads() -> None:
    for name in ("README.md", "docs/development/design.md"):
        for sentence in re.findall(r"[^.]*(?:same bits|bit for bit)[^.]*\.", page(name)):
            if "CPU" in sentence:
                assert re.search(r"number of threads|thread count", sentence), sentence


def test_pages_call_programs_untested_that_never_ran_our_models() -> None:
    """vLLM, SGLang and LM Studio have neither a test nor a proof; llama.cpp and transformers have."""
    assert figures("proofs/gguf_in_llama_cpp")
    for path in [*PAGES, ROOT / "src/homing/cli/verb_list.py", ROOT / "src/homing/api/runs/plan_run.py"]:
        for paragraph in re.split(r"\n\n|\n(?=[|-])", path.read_text(encoding="utf-8")):
            if re.search(r"vLLM|SGLang|LM Studio", paragraph) and path.name != "acceptance.md":
                assert re.search(r"untested|ever\s+started", paragraph), f"{path.name}: {paragraph[:120]}"
    assert "vLLM and Ollama read these formats and are untested" in page("README.md")


def test_the_readme_says_that_no_published_model_has_been_loaded() -> None:
    for name in ("README.md", "docs/guides/open-weights.md"):
        assert "no published model has been loaded" in page(name)


def test_no_page_says_who_is_ahead_of_a_peer_that_was_not_at_its_best() -> None:
    has_sweep = (ROOT / "benchmarks/results/peer_sweep.json").exists()
    for path in PAGES:
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert not re.search(r"(ahead of|better than|beats|outperforms) nanochat|the most per dollar", text), path.name
        for sentence in re.findall(r"[^.|]*nanochat[^.|]*\.", text):
            assert has_sweep or "%" not in sentence, f"{path.name}: {sentence}"
    assert has_sweep or "a fair comparison is still to be measured" in page("README.md")


def test_states_on_the_pages_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src/homing/cloud").rglob("*.py")))
    listed = [
        re.search(r"a state \(`([a-z ]+)`", page("docs/guides/life-of-a-run.md")),
        re.search(r"States of a run: `([a-z ]+)`", page("docs/development/design.md")),
    ]
    first, second = (found[1].split() for found in listed if found is not None)
    assert first == second
    assert [state for state in first if f'"{state}"' not in source] == []


def test_no_page_names_a_program_for_files_that_the_code_does_not_call() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    for program in ("rsync", "scp", "runpodctl"):
        if program not in source:
            assert [path.name for path in PAGES if re.search(rf"\b{program}\b", path.read_text("utf-8"))] == []


def test_the_eta_is_said_to_be_of_all_phases_only_where_it_is() -> None:
    sentence = re.search(r"an eta over all phases[^;]*;", page("CHANGELOG.md"))
    assert sentence is not None
    assert "else of this phase" in sentence[0]


def test_no_result_or_page_has_a_model_that_names_its_maker() -> None:
    """A model repeats whom its conversations name; a person who did not build it must not be printed as its maker."""
    claim = re.compile(r"I was (built|made|created|trained|developed) by|my (maker|creator) is", re.IGNORECASE)
    files = [*PAGES, *sorted((ROOT / "benchmarks/results").glob("*.json"))]
    assert [path.name for path in files if claim.search(path.read_text(encoding="utf-8"))] == []
