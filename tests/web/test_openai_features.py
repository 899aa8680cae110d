"""What programs ask of an OpenAI-compatible server, by OpenAI's own client, with a real model behind it.

The model is tiny and untrained, so the tests compare its answers with the model itself, not with sense.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from tests.web.rig import CONTEXT, TOKEN, Script, make_model, served
from tests.web.test_openai_client import HELLO, client_of

from homing.lm.generate import generate, json_constraint, load_for_use
from homing.sampling_settings import SamplingSettings
from homing.web import model_session

TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Look at a thing.", "parameters": {"type": "object"}},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for phase in ("pretrain", "sft"):
        make_model(folder, phase)
    return folder / "models"


@pytest.fixture(scope="module")
def servers(folders: Path) -> Iterator[dict[str, httpx.Client]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NO_PROXY", "127.0.0.1")
    with served(folders / "pretrain", patch, num_waiting=256) as base, served(folders / "sft", patch) as chat:
        yield {"base": base, "chat": chat}
    patch.undo()


@pytest.fixture
def base(servers: dict[str, httpx.Client]) -> Iterator[OpenAI]:
    with client_of(servers["base"]) as client:
        yield client


@pytest.fixture
def chat(servers: dict[str, httpx.Client]) -> Iterator[OpenAI]:
    with client_of(servers["chat"]) as client:
        yield client


@pytest.fixture(scope="module")
def model(folders: Path) -> Any:
    return load_for_use(folders / "pretrain", "cpu")


def complete(client: OpenAI, **settings: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "the cat", "max_tokens": 12, "seed": 5, **settings})


def ask(client: OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 5, **settings}
    )


def alone(model: Any, prompt: str, num_tokens: int = 12, **settings: Any) -> str:
    decoder, tokenizer = model
    ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
    sampling = SamplingSettings(**{"seed": 5, **settings})
    made = generate(decoder, ids, num_tokens=num_tokens, sampling=sampling, stop_ids=tokenizer.stop_ids)
    return str(tokenizer.decode(list(made)))


# --- sampling ---


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 1.7},
        {"top_p": 0.5},
        {"top_p": 1},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -2},
        {"logit_bias": {"40": 90, "41": -100}},
        {"seed": 77},
        {"extra_body": {"top_k": 3}},
        {"extra_body": {"top_k": -1, "min_p": 0.2}},
        {"extra_body": {"repetition_penalty": 1.5}},
    ],
    ids=str,
)
def test_each_setting_gives_the_text_that_generate_gives(base: OpenAI, model: Any, settings: dict[str, Any]) -> None:
    body = {name: value for name, value in settings.items() if name != "extra_body"} | settings.get("extra_body", {})
    body["logit_bias"] = {int(i): bias for i, bias in body.get("logit_bias", {}).items()}
    body["top_k"] = max(0, body.get("top_k", 50))
    assert complete(base, **settings).choices[0].text == alone(model, "the cat", **body)


def test_a_biased_token_is_all_that_is_said(chat: OpenAI) -> None:
    answer = ask(chat, logit_bias={"82": 100}, max_tokens=4).choices[0].message.content
    assert len(set(answer)) == 1
    assert len(answer) == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_n_texts_have_seeds_of_their_own(base: OpenAI, model: Any, is_stream: bool) -> None:
    expected = [alone(model, "the cat", seed=5 + number) for number in range(4)]
    found = complete(base, n=4, stream=is_stream)
    texts = [""] * 4
    if is_stream:
        for chunk in found:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
        assert found.usage.completion_tokens <= 4 * 12
        texts = [choice.text for choice in found.choices]
    assert texts == expected


def test_best_of_as_many_as_n_is_the_same_and_more_is_refused(base: OpenAI) -> None:
    texts = [choice.text for choice in complete(base, n=2, best_of=2).choices]
    assert texts == [choice.text for choice in complete(base, n=2).choices]
    with pytest.raises(openai.BadRequestError, match="best_of"):
        complete(base, n=2, best_of=3)


def test_lists_of_prompts_are_answered_in_order(base: OpenAI, model: Any) -> None:
    prompts = ["the cat", "a dog ran", ""]
    found = complete(base, prompt=prompts)
    assert [choice.text for choice in found.choices] == [alone(model, prompt) for prompt in prompts]
    tokenizer = model[1]
    assert found.usage.prompt_tokens == sum(1 + len(tokenizer.encode(prompt)) for prompt in prompts)


def test_prompts_of_ids_are_used_as_they_are(base: OpenAI, model: Any) -> None:
    tokenizer = model[1]
    ids = [[tokenizer.end_of_text_id, *tokenizer.encode(prompt)] for prompt in ("the cat", "a dog")]
    found = complete(base, prompt=ids)
    assert [choice.text for choice in found.choices] == [alone(model, "the cat"), alone(model, "a dog")]
    assert complete(base, prompt=ids[0]).choices[0].text == alone(model, "the cat")


def test_settings_that_change_nothing_are_accepted(chat: OpenAI) -> None:
    plain = ask(chat).choices[0].message.content
    neutral: dict[str, Any] = {
        "top_p": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
        "user": "me", "metadata": {"a": "b"}, "store": False, "modalities": ["text"], "service_tier": "auto",
    }  # fmt: skip
    assert ask(chat, **neutral).choices[0].message.content == plain


# --- log-probabilities ---


def test_completion_logprobs_are_those_of_the_model(base: OpenAI, model: Any) -> None:
    decoder, tokenizer = model
    choice = complete(base, logprobs=3, temperature=0).choices[0]
    ids = [tokenizer.end_of_text_id, *tokenizer.encode("the cat" + choice.text)]
    with torch.no_grad():
        logs = torch.log_softmax(decoder(torch.tensor([ids]))[0], dim=-1)
    start = len(ids) - 12
    expected = [float(logs[start + n - 1, ids[start + n]]) for n in range(12)]
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
    assert all(len(each) == 3 for each in choice.logprobs.top_logprobs)
    assert all(max(top.values()) == pytest.approx(own) for top, own in zip(
        choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True
    ))  # fmt: skip


def test_logprobs_of_zero_alternatives(base: OpenAI) -> None:
    logprobs = complete(base, logprobs=0).choices[0].logprobs
    assert len(logprobs.token_logprobs) == 12
    assert logprobs.top_logprobs == [{}] * 12


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_logprobs_name_each_token_and_its_alternatives(chat: OpenAI, is_stream: bool) -> None:
    found = ask(chat, logprobs=True, top_logprobs=2, stream=is_stream)
    if is_stream:
        choices = [choice for chunk in found for choice in chunk.choices]
        tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        tokens, text = found.choices[0].logprobs.content, found.choices[0].message.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace") == text
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_returns_the_prompt_with_its_logprobs(base: OpenAI, model: Any, is_stream: bool) -> None:
    decoder, tokenizer = model
    found = complete(base, echo=True, logprobs=1, stream=is_stream, temperature=0)
    if is_stream:
        choices = [chunk.choices[0] for chunk in found]
        text = "".join(choice.text for choice in choices)
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        values = [value for part in parts for value in part.token_logprobs]
        starts = [start for part in parts for start in part.text_offset]
    else:
        text, logprobs = found.choices[0].text, found.choices[0].logprobs
        values, starts = logprobs.token_logprobs, logprobs.text_offset
    assert text == "the cat" + alone(model, "the cat", temperature=0.0)
    ids = [tokenizer.end_of_text_id, *tokenizer.encode("the cat")]
    with torch.no_grad():
        logs = torch.log_softmax(decoder(torch.tensor([ids]))[0], dim=-1)
    expected = [float(logs[place, i]) for place, i in enumerate(ids[1:])]
    assert values[:7] == pytest.approx(expected, abs=1e-3)
    assert starts == list(range(len(starts))), "one byte, one token, one character"


def test_a_prompt_alone_can_be_scored_and_the_first_of_given_ids_has_no_score(base: OpenAI, model: Any) -> None:
    choice = complete(base, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert (choice.text, len(choice.logprobs.tokens)) == ("the cat", 7)
    ids = model[1].encode("the cat")
    given = complete(base, prompt=ids, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert given.logprobs.token_logprobs[0] is None
    assert given.logprobs.token_logprobs[1:] != choice.logprobs.token_logprobs[1:], "it does not begin a document"


def test_echo_without_logprobs(base: OpenAI, model: Any) -> None:
    assert complete(base, echo=True).choices[0].text == "the cat" + alone(model, "the cat")
    choice = complete(base, echo=True, max_tokens=0).choices[0]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("the cat", None, "length")


def test_logprobs_end_with_the_text_before_a_stop_string(base: OpenAI, model: Any) -> None:
    text = alone(model, "the cat", 40)
    stop = text[5:8]
    choice = complete(base, max_tokens=40, stop=[stop], logprobs=0).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert len(choice.logprobs.tokens) == len(choice.text.encode())


# --- structured answers, tools, embeddings ---


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_follows_a_json_schema(chat: OpenAI, is_stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        found = ask(chat, response_format=form, max_tokens=220, seed=seed, stream=is_stream, temperature=0.6)
        choices = [choice for chunk in found for choice in chunk.choices] if is_stream else found.choices
        text = "".join((getattr(choice, "delta", None) or choice.message).content or "" for choice in choices)
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 99
        assert choices[-1].finish_reason == "stop"


def test_the_helper_of_the_client_parses_a_model_of_pydantic(chat: OpenAI) -> None:
    from pydantic import BaseModel

    class Place(BaseModel):
        is_warm: bool
        side: Literal["left", "right"]

    parsed = chat.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Place, max_tokens=200, seed=1, temperature=0.1
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)


def test_any_json_object(chat: OpenAI) -> None:
    text = (
        ask(chat, response_format={"type": "json_object"}, max_tokens=200, temperature=0.5).choices[0].message.content
    )
    if text.rstrip().endswith("}"):
        assert isinstance(json.loads(text), dict)
    assert text.lstrip().startswith("{")


def test_a_schema_that_makes_no_sense_is_refused(chat: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="The JSON schema cannot be used") as refused:
        ask(chat, response_format=form)
    assert refused.value.param == "response_format"


def test_tools_need_a_template_that_knows_them(chat: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template does not support tools"):
        ask(chat, tools=[TOOL])
    assert ask(chat, tools=[TOOL], tool_choice="none").choices[0].message.content is not None


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_are_the_mean_of_the_last_hidden_states(base: OpenAI, model: Any, encoding: Any) -> None:
    decoder, tokenizer = model
    raw = base.embeddings.with_raw_response.create(model="tiny", input=["the cat", "dog"], encoding_format=encoding)
    body = json.loads(raw.text)
    assert body["pooling"] == "mean of the last hidden states"
    for found, text in zip(body["data"], ["the cat", "dog"], strict=True):
        vector = found["embedding"]
        if encoding == "base64":
            packed = base64.b64decode(vector)
            vector = list(struct.unpack(f"<{len(packed) // 4}f", packed))
        ids = torch.tensor([[tokenizer.end_of_text_id, *tokenizer.encode(text)]])
        with torch.no_grad():
            expected = decoder.hidden(ids)[0].mean(dim=0).tolist()
        assert vector == pytest.approx(expected, abs=1e-5)
    assert body["usage"] == {"prompt_tokens": 8 + 4, "total_tokens": 12}


def test_the_clients_own_embeddings_call(base: OpenAI) -> None:
    found = base.embeddings.create(model="tiny", input="the cat")
    assert len(found.data[0].embedding) == 32
    with pytest.raises(openai.BadRequestError, match="does not support dimensions"):
        base.embeddings.create(model="tiny", input="the cat", dimensions=8)
    with pytest.raises(openai.BadRequestError, match="must fit in the context"):
        base.embeddings.create(model="tiny", input="word " * CONTEXT)
    with pytest.raises(openai.BadRequestError, match="unknown token ids"):
        base.embeddings.create(model="tiny", input=[[1, 99_999]])


# --- lm-eval ---
#
# The bodies are those that lm-eval 0.4.13 sends, and the replies are read with the rules of its `parse_logprobs` and
# `parse_generations`. benchmarks/lm_eval_serve.py compares with lm-eval itself.

SCORED = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
WRITTEN = {"model": "tiny", "max_tokens": 12, "temperature": 0.0, "seed": 1234, "num_beams": 1}


def post(server: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = server.post(path, json=body).raise_for_status().json()
    return found


def scores_in(document: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Return what lm-eval reads: the log-likelihood of what follows each context, and whether it is the likeliest."""
    found = []
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]
        own, top = logprobs["token_logprobs"][length:-1], logprobs["top_logprobs"][length:-1]
        found.append((sum(own), all(each == max(likeliest.values()) for each, likeliest in zip(own, top, strict=True))))
    return found


def texts_in(document: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in sorted(document["choices"], key=lambda choice: choice["index"])]


def score_alone(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    decoder, _ = model
    with torch.no_grad():
        logs = torch.log_softmax(decoder(torch.tensor([context + continuation]))[0], dim=-1)
    logs = logs[len(context) - 1 : -1]
    is_likeliest = logs.argmax(dim=-1).tolist() == continuation
    return float(logs.gather(1, torch.tensor(continuation).unsqueeze(1)).sum()), is_likeliest


def pairs_to_score(model: Any) -> list[tuple[list[int], list[int]]]:
    """Return contexts with continuations: some likeliest, some not, and some after which the text would end."""
    decoder, tokenizer = model
    end = tokenizer.end_of_text_id
    pairs = [([end], tokenizer.encode("the cat")), (tokenizer.encode("a dog"), tokenizer.encode(" ran home"))]
    context = [end, *tokenizer.encode("red fish")]
    likeliest = list(generate(decoder, context, num_tokens=6, sampling=SamplingSettings(temperature=0.0)))
    pairs += [(context, likeliest), (context, [end])]
    with torch.no_grad():  # a token after which the likeliest one is the end of the text, if the model has any
        ids = torch.arange(len(decoder(torch.tensor([[end]]))[0, 0])).unsqueeze(1)
        ends = (decoder(ids)[:, -1].argmax(dim=-1) == end).nonzero().flatten().tolist()
    return pairs + [([i], [i]) for i in ends[:2]]


@pytest.mark.parametrize("batch_size", [1, 32])
def test_lm_eval_reads_the_log_likelihoods_of_the_model(
    servers: dict[str, httpx.Client], model: Any, batch_size: int
) -> None:
    pairs = pairs_to_score(model)
    found: list[tuple[float, bool]] = []
    for start in range(0, len(pairs), batch_size):
        part = pairs[start : start + batch_size]
        prompts = [context + continuation for context, continuation in part]
        document = post(servers["base"], "/v1/completions", {**SCORED, "prompt": prompts})
        for choice, prompt in zip(document["choices"], prompts, strict=True):
            assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        found += scores_in(document, [len(context) for context, _ in part])
    for (score, is_likeliest), pair in zip(found, pairs, strict=True):
        expected, was_likeliest = score_alone(model, *pair)
        assert score == pytest.approx(expected, abs=1e-3)
        assert is_likeliest == was_likeliest
    assert {True, False} == {is_likeliest for _, is_likeliest in found}


def test_lm_eval_scores_prompts_as_text_and_the_server_begins_the_document(
    servers: dict[str, httpx.Client], model: Any
) -> None:
    tokenizer = model[1]
    document = post(servers["base"], "/v1/completions", {**SCORED, "prompt": "the cat sat"})
    context, continuation = tokenizer.encode("the cat"), tokenizer.encode(" sat")
    ((score, _),) = scores_in(document, [len(context)])
    assert score == pytest.approx(score_alone(model, [tokenizer.end_of_text_id, *context], continuation)[0], abs=1e-3)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_is_scored_whole_if_the_text_ends_right_after_it(
    servers: dict[str, httpx.Client], base: OpenAI, model: Any, is_stream: bool
) -> None:
    """lm-eval takes the last log-probability for that of a generated token, even if that one ends the text."""
    tokenizer = model[1]
    end = tokenizer.end_of_text_id
    ids = [end, *tokenizer.encode("the cat")]
    body = {**SCORED, "prompt": [ids], "logit_bias": {str(end): 100}}
    if is_stream:
        choices = [chunk.choices[0] for chunk in complete(base, **body, stream=True)]
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        text, ending = "".join(choice.text for choice in choices), choices[-1].finish_reason
        tokens = [token for part in parts for token in part.tokens]
        scores = [score for part in parts for score in part.token_logprobs]
    else:
        (choice,) = post(servers["base"], "/v1/completions", body)["choices"]
        text, ending = choice["text"], choice["finish_reason"]
        tokens, scores = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
    assert (text, ending) == (tokenizer.decode(ids), "stop")
    assert tokens == [*(tokenizer.decode([i]) for i in ids), "<|endoftext|>"]
    assert sum(scores[1:-1]) == pytest.approx(score_alone(model, ids[:1], ids[1:])[0], abs=1e-3)


def test_the_end_of_a_turn_also_ends_a_text_completion_of_a_chat_model(
    servers: dict[str, httpx.Client], model: Any
) -> None:
    """As in transformers with the export. lm-eval sends no end-of-turn string with several requests at once."""
    im_end = model[1].specials["<|im_end|>"]
    body = {**WRITTEN, "prompt": [[0, 20]], "logit_bias": {str(im_end): 100}, "logprobs": 0}
    (choice,) = post(servers["chat"], "/v1/completions", body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == ["<|im_end|>"]
    (choice,) = post(servers["base"], "/v1/completions", body)["choices"]
    assert choice["text"] == "<|im_end|>" * 12, "a base model has no turns"


@pytest.mark.parametrize("is_stream", [False, True])
def test_special_tokens_can_be_left_out_but_remain_stop_strings(chat: OpenAI, model: Any, is_stream: bool) -> None:
    def answer(*, is_skipping: bool = True, **settings: Any) -> tuple[str, str]:
        settings["extra_body"] = {"skip_special_tokens": is_skipping}
        bias = {str(model[1].specials["<|im_start|>"]): 60, "82": 60}
        found = ask(chat, logit_bias=bias, stream=is_stream, max_tokens=40, temperature=2, **settings)
        choices = [choice for chunk in found for choice in chunk.choices] if is_stream else found.choices
        text = "".join((getattr(choice, "delta", None) or choice.message).content or "" for choice in choices)
        return text, choices[-1].finish_reason

    text, ending = answer()
    assert ending == "length"
    assert 0 < len(text) < 40, "both tokens occurred"
    assert answer(is_skipping=False)[0].replace("<|im_start|>", "") == text
    assert set(text) == {model[1].decode([82])}
    assert answer(stop=["<|im_start|>"])[1] == "stop"


@pytest.mark.parametrize("stop", [["zzz", "<|endoftext|>"], ["zzz"], ["<|endoftext|>"]], ids=str)
def test_lm_eval_reads_the_texts_of_prompts_as_ids_and_as_text(
    servers: dict[str, httpx.Client], model: Any, stop: list[str]
) -> None:
    tokenizer = model[1]
    expected = [alone(model, prompt, temperature=0.0) for prompt in ("the cat", "a dog")]
    ids = [[tokenizer.end_of_text_id, *tokenizer.encode(prompt)] for prompt in ("the cat", "a dog")]
    assert texts_in(post(servers["base"], "/v1/completions", {**WRITTEN, "prompt": ids, "stop": stop})) == expected
    one = post(servers["base"], "/v1/completions", {**WRITTEN, "prompt": "the cat", "stop": stop})
    assert texts_in(one) == expected[:1]


def test_lm_eval_reads_an_answer_of_the_chat_route(servers: dict[str, httpx.Client]) -> None:
    for stop in ([], ["\n\n"], ["a", "b", "c", "d"]):
        document = post(servers["chat"], "/v1/chat/completions", {**WRITTEN, "messages": HELLO, "stop": stop})
        (choice,) = document["choices"]
        assert choice["index"] == 0
        assert isinstance(choice["message"]["content"], str)
        assert not any(each in choice["message"]["content"] for each in stop)


def test_lm_eval_finds_no_tokenizer_here_and_uses_its_own(servers: dict[str, httpx.Client]) -> None:
    assert servers["base"].get("/tokenizer_info").status_code == 404


def test_beam_search_is_refused(servers: dict[str, httpx.Client]) -> None:
    refused = servers["base"].post("/v1/completions", json={**WRITTEN, "prompt": "the cat", "num_beams": 4})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "num_beams"


def test_a_body_may_hold_many_long_prompts(servers: dict[str, httpx.Client]) -> None:
    prompts = [[271] * (CONTEXT - 1)] * 128
    body = {**SCORED, "model": "tiny", "prompt": prompts, "max_tokens": 0, "logprobs": None, "user": "x" * 200_000}
    assert len(post(servers["base"], "/v1/completions", body)["choices"]) == 128


# --- many at once ---


def test_many_clients_at_once_get_the_texts_they_would_get_alone(servers: dict[str, httpx.Client], model: Any) -> None:
    prompts = [f"{word} {number}" for number, word in enumerate(["the cat", "a dog", "red fish", "home"] * 16)]

    async def ask_all() -> list[Any]:
        url = f"{servers['base'].base_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            return [*await asyncio.gather(*[
                client.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0)
                for prompt in prompts
            ])]  # fmt: skip

    found = [answer.choices[0].text for answer in asyncio.run(ask_all())]
    assert found == [alone(model, prompt, 10, temperature=0.0) for prompt in prompts]


def test_an_async_stream(servers: dict[str, httpx.Client], model: Any) -> None:
    async def stream() -> str:
        url = f"{servers['base'].base_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            chunks = await client.completions.create(model="tiny", prompt="the cat", max_tokens=12, seed=5, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

    assert asyncio.run(stream()) == alone(model, "the cat")


def test_prometheus_reads_what_was_done(servers: dict[str, httpx.Client]) -> None:
    server = servers["base"]

    def values() -> dict[str, float]:
        text = server.get("/metrics").raise_for_status().text
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}

    before = values()
    with client_of(server) as client:
        complete(client, max_tokens=7, n=2)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="tiny", input="x")
    after = values()
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert new['homing_generated_tokens_total{model="tiny"}'] == 14
    assert new['homing_prompt_tokens_total{model="tiny"}'] == 8
    assert new['homing_requests_total{route="/v1/completions",status="200"}'] == 1
    assert new['homing_requests_total{route="other",status="404"}'] == 1
    assert new['homing_request_seconds_count{model="tiny"}'] == 1
    assert new['homing_first_token_seconds_count{model="tiny"}'] == 1
    assert after['homing_active_texts{model="tiny"}'] == after['homing_waiting_texts{model="tiny"}'] == 0
    assert server.get("/metrics", headers={"Authorization": ""}).status_code == 401


# --- tool calls ---


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Script]]:
    """A chat model whose template shows tools, as homing's own does."""
    from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE

    patch = pytest.MonkeyPatch()
    patch.setenv("NO_PROXY", "127.0.0.1")
    folder = make_model(tmp_path_factory.mktemp("tools"), "sft", context=1024)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    script = Script(patch)
    with served(folder, patch, script) as server:
        patch.undo()  # later servers generate for themselves
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server, script
    patch.undo()


CALL = '{"name": "look", "arguments": {"at": "the moss, €"}}'


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "says", [f"I look. <tool_call>\n{CALL}\n</tool_call>", f"I look. <|tool_call|>{CALL}<|tool_call_end|>"]
)
def test_a_tool_call_is_returned_in_openais_form(
    tools_server: tuple[httpx.Client, Script], says: str, is_stream: bool
) -> None:
    server, script = tools_server
    script.says = says
    with client_of(server) as client:
        found = ask(client, tools=[TOOL], max_tokens=150, stream=is_stream)
        if is_stream:
            choices = [choice for chunk in found for choice in chunk.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            (call,) = [call for choice in choices for call in choice.delta.tool_calls or []]
            ending = choices[-1].finish_reason
        else:
            (choice,) = found.choices
            text, (call,), ending = choice.message.content, choice.message.tool_calls, choice.finish_reason
    assert text.strip() == "I look."
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"at": "the moss, €"}
    assert ending == "tool_calls"
    assert '"name": "look"' in script.prompt(), "the model is shown its tools"


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_only_looks_like_a_tool_call_stays_text(
    tools_server: tuple[httpx.Client, Script], is_stream: bool
) -> None:
    server, script = tools_server
    for says in ("a <tool_ box", "<tool_call>{not json}</tool_call> and more", "<tool_call>[1]</tool_call>", "<"):
        script.says = says
        with client_of(server) as client:
            found = ask(client, tools=[TOOL], max_tokens=150, stream=is_stream)
            choices = [choice for chunk in found for choice in chunk.choices] if is_stream else found.choices
        text = "".join((getattr(choice, "delta", None) or choice.message).content or "" for choice in choices)
        assert text == says
        assert choices[-1].finish_reason == "stop"


def test_the_result_of_a_tool_goes_back_to_the_model(tools_server: tuple[httpx.Client, Script]) -> None:
    server, script = tools_server
    script.says = f"<tool_call>{CALL}</tool_call>"
    with client_of(server) as client:
        first = ask(client, tools=[TOOL], max_tokens=100).choices[0].message
        script.says = "It is green."
        result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "green"}
        second = ask(client, tools=[TOOL], messages=[*HELLO, first, result], max_tokens=50)
    assert second.choices[0].message.content == "It is green."
    assert "<|tool_result|>green<|tool_result_end|>" in script.prompt()
    assert '<|tool_call|>{"name": "look", "arguments": {"at": "the moss, €"}}<|tool_call_end|>' in script.prompt()


# --- what one client can do to the others ---


def test_failed_streams_leave_no_texts_behind(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    script = Script(monkeypatch)
    script.says = RuntimeError("out of memory")
    with served(folders / "sft", monkeypatch, script, num_waiting=8) as server, client_of(server) as client:
        for _ in range(6):  # three texts each: twice as many as may wait
            with pytest.raises(openai.APIError, match="out of memory"):
                list(ask(client, n=3, stream=True))
        script.says = "fine"
        assert ask(client).choices[0].message.content == "fine"
        waiting = server.get("/metrics").text
    assert 'homing_active_texts{model="tiny"} 0' in waiting
    assert 'homing_waiting_texts{model="tiny"} 0' in waiting


def test_a_schema_that_needs_too_much_computation_fails_and_others_do_not(
    chat: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    large: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 20_000]}}}
    with pytest.raises(openai.BadRequestError, match="more than 16,384 characters"):
        ask(chat, response_format=large)
    monkeypatch.setattr(json_constraint, "_STEP_ITEMS", 1)
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    with pytest.raises(openai.BadRequestError, match=r"needs too much computation|cannot be used") as caught:
        ask(chat, response_format=form, max_tokens=100)
    assert "<state>" not in str(caught.value), "only the reason, not the state of the parser"
    many = {f"a{number}": {"type": "string"} for number in range(300)}
    monkeypatch.undo()
    wide: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": many}}}
    with pytest.raises(openai.BadRequestError, match="Current row has") as caught:
        ask(chat, response_format=wide, max_tokens=100)
    assert (caught.value.code, caught.value.param) == ("schema_too_complex", "response_format")
    assert ask(chat).choices[0].message.content is not None


def test_thousands_of_messages_delay_nobody(servers: dict[str, httpx.Client]) -> None:
    server = servers["chat"]
    began = time.monotonic()
    found = server.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}] * 8000})
    assert found.status_code in (400, 413)
    assert time.monotonic() - began < 3


def test_requests_for_too_much_are_refused(base: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 2,048"):
        base.embeddings.create(model="tiny", input=["a"] * 2049)
    with pytest.raises(openai.BadRequestError, match="at most 1,024"):
        complete(base, logit_bias={str(number): 1 for number in range(1025)})
    monkeypatch.setattr(model_session, "MOST_SCORES", 1000)
    with pytest.raises(openai.BadRequestError, match="too many log-probabilities"):
        complete(base, prompt=["a"] * 10, logprobs=20)


def test_offsets_of_echoed_tokens_count_characters(base: OpenAI) -> None:
    choice = complete(base, prompt="aé€b", echo=True, logprobs=0, max_tokens=1).choices[0]
    starts = choice.logprobs.text_offset
    assert starts[0] == 0
    assert starts[1] == starts[2] == 1, "two bytes of é"
    assert starts[3] == starts[4] == starts[5] == 2, "three bytes of €"
    assert starts[6] == 3
    assert starts[7] == 4


def test_a_generating_thread_that_died_is_reported(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from homing.lm.generate.batching import BatchGenerator

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(folders / "pretrain", monkeypatch) as server, client_of(server) as client:
        assert server.get("/health").status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr(BatchGenerator, "step", lambda batch: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="cannot generate any more"):
                complete(client)
        with pytest.raises(openai.InternalServerError, match="queued"):
            complete(client)
        assert server.get("/health").status_code == 503
