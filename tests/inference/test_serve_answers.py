"""`paceline serve` answers as `paceline generate` does, through the client of OpenAI."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from api_servers import ServedApi, serve_api
from openai import BadRequestError, NotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.inference.chat_encoder import PromptTurn
from paceline.inference.generate import generate
from paceline.inference.loading import load_generator

QUESTION = "What is a tuple? 你好"
ARGUMENTS: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"style": "brief"}]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[ServedApi]:
    with serve_api(runs / "one", "--adapter", f"two={runs / 'two'}") as server:
        yield server


def ask(served: ServedApi, model: str, stream: bool = True, **settings: Any) -> str:
    """Return the text of an answer."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        **settings,
    }
    completions = served.client().chat.completions
    if not stream:
        return completions.create(**fields).choices[0].message.content
    deltas = [chunk.choices[0].delta for chunk in completions.create(stream=True, **fields)]
    return "".join(delta.content or "" for delta in deltas)


def test_start_has_what_a_client_needs(served: ServedApi) -> None:
    assert served.start["models"] == ["one", "base", "two"]
    assert served.start["engine"] == "transformers"
    assert served.start["pid"] == served.process.pid
    assert [model.id for model in served.client().models.list()] == served.start["models"]
    assert served.client().models.retrieve("two").id == "two"


@pytest.mark.soak
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("name", ["one", "two", "base"])
def test_text_is_that_of_generate(
    served: ServedApi, runs: Path, name: str, arguments: dict[str, Any]
) -> None:
    run = runs / ("initial" if name == "base" else name)
    expected = generate(run, QUESTION, max_new_tokens=NUM_TOKENS, template_arguments=arguments)
    body = {"chat_template_kwargs": arguments}
    assert expected
    assert ask(served, name, extra_body=body) == expected
    assert ask(served, name, stream=False, extra_body=body) == expected


def test_eight_clients_at_once_get_their_own_answers(served: ServedApi) -> None:
    names = ["one", "two", "base", "two"]
    expected = {name: ask(served, name) for name in names}
    assert len({*expected.values()}) == 3
    answers: dict[int, str] = {}

    def ask_as(number: int) -> None:
        answers[number] = ask(served, names[number % 4])

    threads = [threading.Thread(target=ask_as, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: expected[names[number % 4]] for number in range(8)}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["one", "base"])
def test_logprobs_are_those_of_the_unprocessed_logits(
    served: ServedApi, runs: Path, name: str
) -> None:
    if name == "base":
        model: Any = AutoModelForCausalLM.from_pretrained(runs / "initial").eval()
        tokenizer = AutoTokenizer.from_pretrained(runs / "initial")
    else:
        model, encoder = load_generator(runs / name)
        tokenizer = encoder.tokenizer
    from paceline.inference.chat_encoder import ChatEncoder

    prompt = ChatEncoder(tokenizer).encode([PromptTurn(role="user", content=QUESTION)])
    answer = served.client().chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=1.5,  # which the log-probabilities must not contain
        top_p=0.9,
        seed=3,
        max_tokens=8,
        logprobs=True,
        top_logprobs=20,
    )
    entries = answer.choices[0].logprobs.content
    ids = [tokenizer.get_vocab()[_as_letters(entry.bytes)] for entry in entries]
    tokens = torch.cat([prompt["input_ids"], torch.tensor([ids])], dim=1)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, prompt["input_ids"].shape[1] - 1 : -1]
    expected = logits.float().log_softmax(-1)
    for row, id, entry in zip(expected, ids, entries, strict=True):
        assert abs(entry.logprob - float(row[id])) < 1e-4
        assert len(entry.top_logprobs) == 20
        likeliest = [each.logprob for each in entry.top_logprobs]
        torch.testing.assert_close(torch.tensor(likeliest), row.topk(20).values, atol=1e-4, rtol=0)


def _as_letters(content: list[int]) -> str:
    """Return the token of a byte-level tokenizer that stands for these bytes."""
    from paceline.inference.engine.answer_text import letters_of_bytes

    letters = dict(letters_of_bytes())
    return "".join(letters[byte] for byte in content)


def test_stream_ends_with_usage(served: ServedApi) -> None:
    chunks = [
        *served.client().chat.completions.create(
            model="one",
            messages=[{"role": "user", "content": QUESTION}],
            max_completion_tokens=5,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_seed_determines_sampled_answers(served: ServedApi) -> None:
    first, second, third = (ask(served, "one", temperature=1.5, seed=seed) for seed in (1, 1, 2))
    assert first == second != third


@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_across_tokens_is_not_sent(served: ServedApi, stream: bool) -> None:
    whole = ask(served, "one")
    stop = whole[7:12]
    text = ask(served, "one", stream=stream, stop=[stop, "never"])
    assert text == whole[: whole.index(stop)].strip()


def test_completions_continue_a_text_or_its_tokens(served: ServedApi, runs: Path) -> None:
    settings: dict[str, Any] = {"model": "one", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    completions = served.client().completions
    answer = completions.create(prompt="import os", **settings)
    tokens = AutoTokenizer.from_pretrained(runs / "one" / "model")("import os")["input_ids"]
    assert completions.create(prompt=tokens, **settings).choices[0].text == answer.choices[0].text
    parts = [*completions.create(prompt="import os", stream=True, **settings)]
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 6
    assert all(len(likeliest) == 2 for likeliest in logprobs.top_logprobs)
    streamed = [each for part in parts if part.choices[0].logprobs
                for each in part.choices[0].logprobs.token_logprobs]  # fmt: skip
    assert streamed == logprobs.token_logprobs


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"extra_body": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"extra_body": {"chat_template_kwargs": {"stile": 1}}}, "chat_template_kwargs.stile"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
         "chat_template_kwargs.chat_template"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop.0"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_field_is_named(served: ServedApi, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(served, "one", stream=False, **fields)
    assert caught.value.param == named
    assert caught.value.code


@pytest.mark.parametrize("name", ["three", "../one", "/etc/passwd", "Qwen/Qwen2-0.5B", ""])
def test_unknown_model_is_not_found(served: ServedApi, name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        ask(served, name)
    assert caught.value.param == "model"


def test_neutral_values_are_accepted(served: ServedApi) -> None:
    extra = {"n": 1, "logit_bias": {}, "frequency_penalty": 0, "seed": None, "tools": None,
             "metadata": {}, "service_tier": "auto", "reasoning_effort": None}  # fmt: skip
    assert ask(served, "one", extra_body=extra) == ask(served, "one")
