"""Text, conversations, choices and answers: each figure against its definition, computed independently."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.trained import make_checkpoint
from tests.lm.tiny import make_data

from homing.api.models.eval_sets import open_sets
from homing.errors import DataError, UsageError
from homing.lm.data.chat.chat_settings import ChatOrder, ChatSource
from homing.lm.data.chat.messages import Conversation
from homing.lm.data.chat.prepare import prepare_chat
from homing.lm.data.chat.render import ChatTokens, Renderer
from homing.lm.data.chat.template import find_template
from homing.lm.data.shards.read_shards import file_sha256
from homing.lm.evals.chat_loss import measure_conversations, measure_held_out
from homing.lm.evals.compare_and_report import compare
from homing.lm.evals.eval_result import Measured, Score, share
from homing.lm.evals.generated_answers import Asking, made_up, measure_answers
from homing.lm.evals.multiple_choice import measure_choices, pair_row
from homing.lm.evals.run_evals import Chats, How, Subject, What, load_subject, measure
from homing.lm.evals.task_file import Choice, Open, TaskFile, read_task
from homing.lm.evals.text_loss import STRETCH_BYTES, Text, held_out_text, measure_text, text_in_files
from homing.lm.generate import Card, generate
from homing.lm.model import Decoder
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE, SPECIALS
from homing.sampling_settings import SamplingSettings
from homing.wire.run_json import PhaseData

WORDS = "the cat sat on a mat and the dog ran home to eat red fish at night. "


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    make_data(tmp_path / "data", num_documents=20, specials=SPECIALS["standard"])
    folder = make_checkpoint(tmp_path / "models" / "tiny", tmp_path / "data")
    config = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    opened = load_subject(folder, "cpu")
    # A longer context than the runs of the tests have: questions in turns need it.
    model = Decoder(dataclasses.replace(opened.model.shape, context=96))
    model.init_weights(3)
    return dataclasses.replace(opened, model=model.eval())


@torch.no_grad()
def nats_of(subject: Subject, ids: list[int]) -> list[float]:
    """Of ids[1:], all in one row, by the definition."""
    logs = torch.log_softmax(subject.model(torch.tensor([ids[:-1]]))[0].double(), dim=-1)
    return [-float(logs[place, i]) for place, i in enumerate(ids[1:])]


def score(measured: Measured, name: str) -> Score:
    return next(one for one in measured.scores if one.name == name)


# -- text ------------------------------------------------------------------------------------------------------------


def as_text(*documents: str) -> Text:
    return Text("text", "0" * 64, lambda: iter(documents))


def test_a_short_text_has_the_nats_of_the_definition_over_its_bytes(subject: Subject) -> None:
    text = "the cät sat."
    measured = measure_text(subject.model, subject.tokenizer, as_text(text, "a mat."))
    nats = [
        sum(nats_of(subject, [subject.tokenizer.end_of_text_id, *subject.tokenizer.encode(each)]))
        for each in (text, "a mat.")
    ]
    num_bytes = len(text.encode()) + len("a mat.")
    assert score(measured, "bits_per_byte").value == pytest.approx(sum(nats) / math.log(2) / num_bytes, rel=1e-5)
    assert score(measured, "perplexity").value == pytest.approx(math.exp(sum(nats) / num_bytes), rel=1e-5)
    assert measured.counts == {"documents": 2, "tokens": num_bytes, "bytes": num_bytes}


def test_a_long_text_is_read_in_windows_that_overlap_and_counted_once(subject: Subject) -> None:
    text = WORDS * 100
    measured = measure_text(subject.model, subject.tokenizer, as_text(text))
    ids = [subject.tokenizer.end_of_text_id, *subject.tokenizer.encode(text)]
    context, stride = 96, 48
    expected = nats_of(subject, ids[: context + 1])
    for start in range(context + 1, len(ids), stride):
        end = min(len(ids), start + stride)
        expected += nats_of(subject, ids[end - context - 1 : end])[-(end - start) :]
    assert score(measured, "nats_per_token").value == pytest.approx(np.mean(expected), rel=1e-5)
    assert measured.counts["bytes"] == len(text)
    assert len(score(measured, "bits_per_byte").above) == math.ceil(len(text) / STRETCH_BYTES)
    assert measured.settings == {"window": 96, "stride": 48, "at_most": 0}


def test_a_smaller_window_is_reported_and_used(subject: Subject) -> None:
    whole, cut = (measure_text(subject.model, subject.tokenizer, as_text(WORDS * 9), window=w) for w in (0, 8))
    assert cut.settings["window"] == 8
    assert score(cut, "bits_per_byte").value != score(whole, "bits_per_byte").value


def test_held_out_text_comes_back_from_the_shards_as_it_was(subject: Subject, tmp_path: Path) -> None:
    text = held_out_text(tmp_path / "data", "tiny")
    documents = list(text.documents())
    assert len(documents) == 4
    assert all(document.endswith(".\n") for document in documents)
    assert list(text.documents()) == documents
    measured = measure_text(subject.model, subject.tokenizer, text, at_most=3)
    assert measured.counts["documents"] == 3


def test_files_are_documents_and_a_marker_ends_one(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    (tmp_path / "b.txt").write_text("three")
    text = text_in_files([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert list(text.documents()) == ["one", "two", "three"]
    assert text.name == "a.txt, b.txt"
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"body": "four"}\n')
    assert list(text_in_files([str(lines)], text_field="body").documents()) == ["four"]


# -- conversations ---------------------------------------------------------------------------------------------------


def chat_file(path: Path, *answers: str) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_only_what_the_assistant_says_counts(subject: Subject, tmp_path: Path) -> None:
    path = chat_file(tmp_path / "chat.jsonl", "cat", "red fish")
    measured = measure_conversations(subject.model, subject.tokenizer, [path], subject.card.folder)
    template = find_template(subject.card.folder)
    assert template is not None
    renderer, nats, num_bytes = Renderer(template, ChatTokens(subject.card.folder)), [], 0
    for number, answer in enumerate(("cat", "red fish")):
        user = {"role": "user", "content": f"Say {number}."}
        (example,) = renderer.render(Conversation([user, {"role": "assistant", "content": answer}]))
        ids = example.ids.tolist()
        nats += [one for one, is_own in zip(nats_of(subject, ids), example.mask[1:], strict=True) if is_own]
        num_bytes += len(answer)
    assert len(nats) == num_bytes + 2  # the words, and the marker that ends each turn
    assert score(measured, "nats_per_token").value == pytest.approx(np.mean(nats), rel=1e-5)
    assert measured.counts["conversations"] == 2
    assert score(measured, "bits_per_byte").below.sum() == num_bytes


def test_a_faulty_conversation_stops_it_with_its_line(subject: Subject, tmp_path: Path) -> None:
    path = Path(chat_file(tmp_path / "chat.jsonl", "cat", "dog"))
    path.write_text(path.read_text() + '\n{"messages": [{"role": "wizard", "content": "x"}]}\n')
    with pytest.raises(DataError) as refused:
        measure_conversations(subject.model, subject.tokenizer, [str(path)], subject.card.folder)
    assert f"{path}:3:" in refused.value.why


def test_what_prep_held_out_of_conversations_has_the_same_figures_as_the_file_itself(
    subject: Subject, tmp_path: Path
) -> None:
    learned = chat_file(tmp_path / "learned.jsonl", *(f"dog {n}" for n in range(20)))
    path = chat_file(tmp_path / "chat.jsonl", "cat", "red fish", "a mat")
    order = ChatOrder(
        dir=tmp_path / "sft", chat=[ChatSource(learned)], validation=[path], tokenizer=subject.card.folder, context=96
    )
    prepare_chat(order)
    folder = subject.card.folder
    asked = measure_conversations(subject.model, subject.tokenizer, [path], folder)
    held_out = measure_held_out(subject.model, subject.tokenizer, tmp_path / "sft", "tiny", folder)
    for name in ("nats_per_token", "bits_per_byte"):
        assert score(held_out, name).value == pytest.approx(score(asked, name).value, rel=1e-6)
    assert held_out.counts["conversations"] == 3
    chosen, _ = open_sets(with_chats(subject, tmp_path / "sft"), [], [], [], text_field="text", at_most=0)
    assert chosen == Chats(["tiny"], tmp_path / "sft")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(DataError, match="were not encoded with the tokenizer in"):
        measure_held_out(subject.model, subject.tokenizer, tmp_path / "sft", "tiny", folder)


def test_held_out_conversations_of_a_launched_run_are_found_where_prep_left_them_and_never_replaced_by_text(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    here = Path("data", "tiny", "sft")
    here.mkdir(parents=True)
    (here / "manifest.json").write_text("{}")
    # `dir` as it is on the instance
    card = with_chats(subject, here, dir="../elsewhere/sft")
    chats, text = open_sets(card, [], [], [], text_field="text", at_most=0)
    assert chats == Chats(["tiny"], here)
    assert text.name == "text held out for tiny", "in addition to the data of the phase"
    card = with_chats(subject, here, manifest_sha256="0" * 64)
    with pytest.raises(DataError, match="The held-out conversations of tiny were not found") as refused:
        open_sets(card, [], [], [], text_field="text", at_most=0)
    assert "--chat FILE.jsonl" in refused.value.fix
    card = with_chats(subject, here, num_val_tokens=0)
    (text,) = open_sets(card, [], [], [], text_field="text", at_most=0)
    assert text.name == "text held out for tiny"
    assert "The sft phase held out no conversations" in capsys.readouterr().err


def with_chats(subject: Subject, data_dir: Path, **changes: Any) -> Card:
    """The same checkpoint as one of a phase on conversations."""
    run = subject.card.run
    assert run is not None
    data = PhaseData("chat", str(data_dir), file_sha256(data_dir / "manifest.json"), 1, 1)
    data = dataclasses.replace(data, **changes)
    phases = [dataclasses.replace(run.phases[0], kind="sft", data=data)]
    return dataclasses.replace(subject.card, phase="sft", run=dataclasses.replace(run, phases=phases))


# -- choices ---------------------------------------------------------------------------------------------------------


def test_the_choice_with_the_most_probability_is_taken_also_per_character(subject: Subject) -> None:
    ends = ["mat", "fish at night", "a"]
    tokenizer = subject.tokenizer
    nats = []
    for end in ends:
        begin = tokenizer.encode("the cat sat on")
        ids = [tokenizer.end_of_text_id, *begin, *tokenizer.encode(f" {end}")]
        nats.append(sum(nats_of(subject, ids)[len(begin) :]))
    by_length = [one / len(end) for one, end in zip(nats, ends, strict=True)]
    for gold in range(3):
        task = TaskFile("t", "choices", [Choice(1, [("the cat sat on", end) for end in ends], gold)], "")
        measured = measure_choices(subject.model, tokenizer, task)
        assert score(measured, "acc").value == float(nats.index(min(nats)) == gold)
        assert score(measured, "acc_norm").value == float(by_length.index(min(by_length)) == gold)


@pytest.mark.parametrize(("begin", "end"), [("The sky is ", "blue"), ("The sky is", " blue"), ("The sky is", "blue")])
def test_there_is_one_space_at_the_seam_and_it_belongs_to_the_end(subject: Subject, begin: str, end: str) -> None:
    pair = pair_row(subject.tokenizer, begin, end, context=96)
    targets = [i for i, is_target in zip(pair.row.ids, pair.row.is_target, strict=True) if is_target]
    assert subject.tokenizer.decode(targets) == " blue"
    assert subject.tokenizer.decode(pair.row.ids[1:]) == "The sky is blue"
    cloze = TaskFile("t", "cloze", [Choice(1, [(begin, end)], 0)], "")
    measured = measure_choices(subject.model, subject.tokenizer, cloze)
    assert score(measured, "bits_per_byte").below.tolist() == [len(" blue")], "the bytes of what was predicted"


def test_a_long_beginning_loses_its_first_words_and_a_long_end_is_refused(subject: Subject) -> None:
    pair = pair_row(subject.tokenizer, "x" * 200, "end", context=20)
    assert len(pair.row.ids) == 21
    assert pair.row.is_target.sum() == len(" end")
    task = TaskFile("t.jsonl", "cloze", [Choice(7, [("a", "b" * 200)], 0)], "")
    with pytest.raises(DataError, match=r"t\.jsonl:7"):
        measure_choices(subject.model, subject.tokenizer, task)


def test_a_cloze_is_right_where_the_model_would_have_written_it(subject: Subject) -> None:
    tokenizer = subject.tokenizer
    for seed in range(100):  # until what it writes is text that is cut into the same tokens again
        subject.model.init_weights(seed)
        ids = list(
            generate(
                subject.model, [tokenizer.end_of_text_id], num_tokens=3, sampling=SamplingSettings(temperature=0.0)
            )
        )
        written = tokenizer.decode(ids)
        if tokenizer.encode(written) == ids and written.isprintable():
            break
    else:
        pytest.fail("none of a hundred models writes text")
    items = [Choice(1, [("", written)], 0), Choice(2, [("", f"{written[:-1]}{'q' if written[-1] != 'q' else 'z'}")], 0)]
    measured = measure_choices(subject.model, tokenizer, TaskFile("t", "cloze", list(items), ""))
    assert score(measured, "acc").above.tolist() == [1.0, 0.0]
    start = [tokenizer.end_of_text_id, *ids]
    assert score(measured, "bits_per_byte").above[0] == pytest.approx(
        sum(nats_of(subject, start)) / math.log(2), rel=1e-5
    )


# -- answers ---------------------------------------------------------------------------------------------------------


def test_one_answer_is_the_likeliest_text_and_is_judged_as_in_rl(subject: Subject, tmp_path: Path) -> None:
    template = find_template(subject.card.folder)
    assert template is not None
    renderer = Renderer(template, ChatTokens(subject.card.folder))
    ids = renderer.prompt([{"role": "user", "content": "2+2?"}])
    stops = [subject.tokenizer.end_of_text_id, subject.tokenizer.specials["<|im_end|>"]]
    for seed in range(100):  # until it says something that can be judged
        subject.model.init_weights(seed)
        said = subject.tokenizer.decode(
            generate(subject.model, ids, num_tokens=6, sampling=SamplingSettings(temperature=0.0), stop_ids=stops)
        )
        if any(letter.isalpha() for letter in said):
            break
    else:
        pytest.fail("none of a hundred models says a word")
    items = [Open(1, "2+2?", said, False), Open(2, "2+2?", "surely not this", False)]
    asking = Asking(max_new_tokens=6)
    measured = measure_answers(
        subject.model, subject.tokenizer, TaskFile("t", "answers", items, ""), subject.card.folder, asking
    )
    (acc,) = measured.scores
    assert acc.above.tolist() == [1.0, 0.0]
    assert measured.settings["temperature"] == 0.0


def test_pass_at_k_uses_samples_that_do_not_depend_on_the_other_questions(subject: Subject) -> None:
    task = made_up("spelling", 1, 6)
    asking = Asking(pass_at=(2, 4), num_samples=5, max_new_tokens=4, seed=3)
    whole = measure_answers(subject.model, subject.tokenizer, task, subject.card.folder, asking)
    assert [one.name for one in whole.scores] == ["pass@1", "pass@2", "pass@4"]
    assert whole.counts["samples"] == 30
    part = dataclasses.replace(task, items=task.items[:2])
    alone = measure_answers(subject.model, subject.tokenizer, part, subject.card.folder, asking)
    for name in ("pass@1", "pass@4"):
        assert score(alone, name).above.tolist() == score(whole, name).above[:2].tolist()


def test_a_question_that_does_not_fit_counts_as_wrong_and_is_reported(subject: Subject) -> None:
    items = [Open(1, "2+2?", "4", True), Open(2, "long " * 100, "4", True)]
    task = TaskFile("t", "answers", items, "")
    measured = measure_answers(subject.model, subject.tokenizer, task, subject.card.folder, Asking(max_new_tokens=4))
    assert measured.counts["too_long"] == 1
    assert measured.scores[0].above[1] == 0
    assert any("do not fit" in note for note in measured.notes)
    only = dataclasses.replace(task, items=list(items[1:]))
    with pytest.raises(DataError, match="No question"):
        measure_answers(subject.model, subject.tokenizer, only, subject.card.folder, Asking(max_new_tokens=4))


def test_orders_that_cannot_be_are_refused(subject: Subject) -> None:
    with pytest.raises(UsageError, match="cannot be computed from 2 samples"):
        Asking(pass_at=(4,), num_samples=2).check()
    with pytest.raises(UsageError, match="would all be the same"):
        Asking(pass_at=(4,), temperature=0).check()
    with pytest.raises(UsageError, match="no room"):
        measure_answers(
            subject.model, subject.tokenizer, made_up("arithmetic", 1, 3), subject.card.folder,
            Asking(max_new_tokens=500),
        )  # fmt: skip


def test_made_up_questions_are_the_same_every_time_and_none_is_asked_twice() -> None:
    first, again = (made_up("arithmetic", 2, 30) for _ in range(2))
    assert first == again
    assert len({item.question for item in first.items if isinstance(item, Open)}) == 30


def test_every_kind_of_set_is_evaluated_by_one_function(subject: Subject, tmp_path: Path) -> None:
    chats = Chats([chat_file(tmp_path / "chat.jsonl", "cat")])
    (tmp_path / "c.jsonl").write_text(json.dumps({"context": "the", "continuation": "cat"}))
    sets: list[What] = [as_text("the cat"), chats, read_task(str(tmp_path / "c.jsonl")), made_up("arithmetic", 1, 2)]
    how = How(asking=Asking(max_new_tokens=2))
    kinds = [measure(subject, what, how).kind for what in sets]
    assert kinds == ["text", "conversations", "cloze", "answers"]


# -- two models --------------------------------------------------------------------------------------------------------


def shares(*is_right: bool) -> Measured:
    return Measured("set", "choices", [share("acc", is_right, f"{len(is_right)} questions")], {}, "x")


def bits(above: list[float], below: float = 10.0) -> Measured:
    one = Score("bits_per_byte", np.array(above), np.full(len(above), below), f"{len(above)} stretches")
    return Measured("set", "text", [one], {}, "x")


def test_a_difference_is_said_only_where_it_is_more_than_noise() -> None:
    (better,) = compare(shares(*[False] * 12), shares(*[True] * 12), ("a", "b"), seed=0)
    assert better.is_more_than_noise
    assert "b is better than a" in better.sentence
    (chance,) = compare(shares(*[False] * 12), shares(*[True] * 3, *[False] * 9), ("a", "b"), seed=0)
    assert not chance.is_more_than_noise
    assert "within noise" in chance.sentence
    (equal,) = compare(shares(True, False), shares(True, False), ("a", "b"), seed=0)
    assert "equal" in equal.sentence


def test_less_is_better_for_bits_and_pairs_see_what_single_figures_cannot() -> None:
    hard = np.random.default_rng(0).uniform(5, 50, size=40)
    first, second = bits(hard.tolist()), bits((hard - 0.5).tolist())
    (difference,) = compare(first, second, ("a", "b"), seed=0)
    assert difference.is_more_than_noise
    assert "b is better than a" in difference.sentence
    a, b = (one.scores[0].interval(0) for one in (first, second))
    assert b.high > a.low, "each figure alone is too uncertain"
    (turned,) = compare(second, first, ("b", "a"), seed=0)
    assert "b is better than a" in turned.sentence
    (few,) = compare(bits([1.0] * 5), bits([2.0] * 5), ("a", "b"), seed=0)
    assert not few.is_more_than_noise
    assert "too few" in few.sentence


def test_equal_models_are_rarely_called_different() -> None:
    source = np.random.default_rng(7)
    wrong = 0
    for seed in range(100):
        hard = source.uniform(5, 50, size=40)
        a, b = (bits((hard + source.normal(0, 1, size=40)).tolist()) for _ in range(2))
        (difference,) = compare(a, b, ("a", "b"), seed=seed)
        wrong += difference.is_more_than_noise
    assert wrong <= 12
