"""The saved model ends its answers with the token that it was trained to end them with."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_families import make_family
from raised import raises_error
from tokenizers import Tokenizer, processors

import paceline
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.text.new_tokens import config_tokenizer
from paceline.data.text.tokenizer import load_tokenizer
from paceline.inference.engine.transformers_engine import generate_tokens
from paceline.inference.loading import load_model
from paceline.models.builtin import builtin_tokenizer, resolve_model

END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
#: A template that ends the last answer in another way than those before, as Olmo 3.
TWO_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_base_model(folder: Path, eos_token_id: object = END_OF_TEXT) -> Path:
    """Write a model as base models are: its tokenizer has the tokens of chats, and it ends texts
    only with the end-of-text token."""
    make_family("qwen2", folder)
    settings = json.loads((builtin_tokenizer() / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<|endoftext|>"
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((builtin_tokenizer() / "tokenizer.json").read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    return folder


def train(folder: Path, **settings: Any) -> Path:
    args = {"max_steps": 1, "max_length": 64, "per_device_train_batch_size": 1}
    fixed = {"dataset": "builtin:python-docs#4", "train_args": args}
    parallel = {"device": "cpu", "num_gpus": 1}
    run = folder / "run"
    config = {**fixed, "parallel": parallel, "output_dir": str(run), **settings}
    paceline.train({"model": str(folder / "base"), **config})
    return run


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"chat_template": "chatml"}, [END_OF_TEXT, TURN_END]),
        ({"chat_template": "alpaca"}, END_OF_TEXT),
        ({"chat_template": "alpaca", "eos_token": "<|im_end|>"}, [END_OF_TEXT, TURN_END]),
        ({"chat_template": TWO_ENDS}, [END_OF_TEXT, TURN_END]),
        ({"task": "pretrain"}, END_OF_TEXT),
    ],
)
def test_model_stops_at_the_token_that_ends_its_answers(
    settings: dict[str, Any], expected: object, lora: bool, tmp_path: Path
) -> None:
    write_base_model(tmp_path / "base")
    run = train(tmp_path, lora={"enable": lora}, **settings)
    saved = json.loads((run / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == expected
    assert load_model(run)[0].generation_config.eos_token_id == expected


def test_stop_tokens_of_the_model_are_kept(tmp_path: Path) -> None:
    write_base_model(tmp_path / "base", [7, END_OF_TEXT])
    run = train(tmp_path, chat_template="chatml")
    saved = json.loads((run / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [7, END_OF_TEXT, TURN_END]


@pytest.mark.parametrize("lora", [False, True])
def test_texts_end_with_the_eos_token_of_the_config(lora: bool, tmp_path: Path) -> None:
    write_base_model(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Say {n}.", "completion": " yes"} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"num_train_epochs": 20, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    settings = {"dataset": str(data), "eos_token": "<|im_end|>", "lora": {"enable": lora}}
    run = train(tmp_path, train_args={**args, "per_device_train_batch_size": 8}, **settings)
    model, tokenizer = load_model(run)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", TURN_END)
    assert model.generation_config.eos_token_id == [END_OF_TEXT, TURN_END]
    if lora:  # the tokenizer had the token, so no embeddings are trained
        assert not any("embed" in name for name, _ in model.named_parameters() if "lora" in name)
        return
    inputs = tokenizer("Say 3.", return_tensors="pt")
    tokens = generate_tokens(model, tokenizer, inputs, max_new_tokens=16, temperature=0, seed=0)
    assert tokenizer.decode(tokens) == " yes<|im_end|>"


def test_eos_token_that_the_tokenizer_does_not_have(tmp_path: Path) -> None:
    write_base_model(tmp_path / "base")
    with raises_error(ConfigError, code="unknown-token", naming="eos_token") as caught:
        train(tmp_path, eos_token="<|im_ned|>")
    assert caught.value.fix == "did you mean `<|im_end|>`?"
    with raises_error(ConfigError, code="unknown-token", naming="bos_token") as caught:
        train(tmp_path, bos_token="[BEGIN]")
    assert "new_special_tokens" in str(caught.value.fix)


@pytest.mark.parametrize("lora", [False, True])
def test_special_tokens_of_axolotl_are_added_if_they_are_new(lora: bool, tmp_path: Path) -> None:
    write_base_model(tmp_path / "base")
    config = tmp_path / "axolotl.yaml"
    config.write_text(
        f"base_model: {tmp_path / 'base'}\ndatasets: [{{path: 'builtin:python-docs#4'}}]\n"
        f"output_dir: {tmp_path / 'run'}\nchat_template: alpaca\nsequence_len: 64\n"
        "special_tokens:\n  eos_token: <|end|>\n  bos_token: <|im_start|>\nmax_steps: 1\n"
        f"adapter: {'lora' if lora else ''}\n"
    )
    paceline.train(config, **{"parallel.device": "cpu", "parallel.num_gpus": 1})
    model, tokenizer = load_model(tmp_path / "run")
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token == "<|im_start|>"
    assert model.generation_config.eos_token_id == [END_OF_TEXT, tokenizer.eos_token_id]
    assert model.get_input_embeddings().weight.shape[0] > tokenizer.eos_token_id


@pytest.mark.parametrize("has_bytes", [False, True])
def test_tokenizer_adds_the_eos_token_of_the_config_alone(has_bytes: bool, tmp_path: Path) -> None:
    """As tokenizers of Llama with `add_eos_token`, which add both tokens to a text."""
    folder = write_base_model(tmp_path / "base")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>",
        pair="<|im_start|> $A <|endoftext|> $B",
        special_tokens=[("<|im_start|>", TURN_START), ("<|endoftext|>", END_OF_TEXT)],
    )
    parts = [processors.ByteLevel(trim_offsets=True), template]
    backend.post_processor = processors.Sequence(parts) if has_bytes else template
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = Config(model=str(folder), dataset="d", eos_token="<|im_end|>")
    changed = load_tokenizer(config_tokenizer(config, resolve_model))
    assert (changed.start_ids, changed.end_ids) == ((TURN_START,), (TURN_END,))
    text = changed.encode_batch(["hello there"], add_special_tokens=True)[0]
    assert changed.missing_end(text) == changed.missing_start(text) == []
    assert text == [
        TURN_START,
        *backend.encode("hello there", add_special_tokens=False).ids,
        TURN_END,
    ]
    offsets = changed.backend.encode("hello there", add_special_tokens=True).offsets
    assert offsets[1:-1] == backend.encode("hello there", add_special_tokens=True).offsets[1:-1]
