"""Conversion of first-generation Qwen checkpoints to Qwen2, against an independent reference."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from merged_models import write_merged
from original_qwen import SEQ_LENGTH, reference_logits, reference_tokens, write_checkpoint
from raised import raises_error
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.text.tokenizer import find_tokenizer, load_tokenizer
from paceline.inference.generate import generate
from paceline.inference.loading import load_model
from paceline.models.builtin import config_numbers
from paceline.models.language import load_language_model, save_language_model
from paceline.models.qwen import converted_folder, module_notice
from paceline.tasks import load_task

TEXT = (
    "The quick brown fox can't jump over 1234 lazy dogs; they've all been trained. Training a model"
    " on every device is what it is for.\n\nМодель учится. 模型训练 über alles: naïve café,"
    " \u0065\u0301 and 🙂!  \r\n\tdef f(x): return x"
)
SAMPLES = (
    TEXT,
    "I'll train\n\n\nthe  model   today… 训练模型 50%",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><|extra_7|> x",
    "",
    "e\u0301 = \u00e9",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen") / "Qwen-Tiny", TEXT * 3)


def config(folder: Path, **keys: Any) -> Config:
    train_args = {"max_length": 128, **keys.pop("train_args", {})}
    return Config(
        **{
            "model": str(folder),
            "dataset": "builtin:python-docs#20",
            "train_args": train_args,
            **keys,
        }
    )


def test_logits_match_original(checkpoint: Path) -> None:
    model: Any = load_language_model(config(checkpoint)).eval()
    for count in (1, 40, SEQ_LENGTH):
        ids = torch.randint(
            0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(count)
        )
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(logits, reference_logits(checkpoint, ids), rtol=1e-4, atol=1e-4)
    # Beyond this length, the original changes its rotary frequencies and scales its queries.
    ids = torch.arange(SEQ_LENGTH + 40) % model.config.vocab_size
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    assert not torch.allclose(logits, reference_logits(checkpoint, ids), atol=1e-2)


def test_tokens_match_original(checkpoint: Path) -> None:
    folder = find_tokenizer(str(checkpoint))
    tokenizer, reference_tokenizer = (
        load_tokenizer(folder),
        AutoTokenizer.from_pretrained(str(folder)),
    )
    for text in SAMPLES:
        expected = reference_tokens(checkpoint, text)
        assert tokenizer.backend.encode(text, add_special_tokens=False).ids == expected
        assert reference_tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    assert tokenizer.eos_token_id == reference_tokens(checkpoint, "<|endoftext|>")[0]
    chat = reference_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert (
        chat == "<|im_start|>system\nYou are a helpful"
        " assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_converted_folder_is_standard_qwen2_model(checkpoint: Path) -> None:
    folder = converted_folder(checkpoint)
    assert converted_folder(checkpoint) == folder
    content = json.loads((folder / "config.json").read_text())
    assert (content["model_type"], content["max_position_embeddings"]) == ("qwen2", SEQ_LENGTH)
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    assert parameters["model.layers.1.self_attn.k_proj.bias"].shape == (64,)
    eos_token_ids = model.generation_config.eos_token_id
    assert eos_token_ids == [
        reference_tokens(checkpoint, "<|im_end|>")[0],
        reference_tokens(checkpoint, "<|endoftext|>")[0],
    ]
    assert config_numbers(str(checkpoint))["intermediate_size"] == 96


def test_plan_does_not_require_weights(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    result = paceline.plan(
        {"model": str(tmp_path), "dataset": "builtin:python-docs#20"}, world_size=2, device="A10"
    )
    model = load_language_model(config(checkpoint))
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def check_and_load(model_config: Config) -> None:
    load_task(model_config).check()
    load_language_model(model_config)


def expect_error(folder: Path, **keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_and_load(config(folder, **keys))
    return str(error.value)


def test_rejects_samples_longer_than_training_length(checkpoint: Path) -> None:
    text = expect_error(checkpoint, train_args={"max_length": SEQ_LENGTH + 1})
    assert f"`train_args.max_length: {SEQ_LENGTH + 1}` exceeds the {SEQ_LENGTH} tokens" in text
    assert f"set `train_args.max_length: {SEQ_LENGTH}`" in text
    assert "exceeds the 8192 tokens" in expect_error(
        Path("qwen/qwen-7b"), train_args={"max_length": 8193}
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no_bias": False}, "`no_bias: False`"),
        ({"rotary_pct": 0.5}, "`rotary_pct: 0.5`"),
        ({"kv_channels": 8}, "do not add up"),
        ({"visual": {"layers": 2}}, "it has images"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"seq_length": None}, "`seq_length` in its config.json is missing"),
        ({"num_hidden_layers": 3}, "no tensor for model.layers.2"),
    ],
)
def test_rejects_unsupported_checkpoints(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reason in expect_error(write_checkpoint(tmp_path / "model", "some text", **changes))


def test_rejects_damaged_and_pickled_checkpoints(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "some text")
    second_shard = folder / "model-00002-of-00002.safetensors"
    content = second_shard.read_bytes()
    second_shard.write_bytes(content[:-100])
    assert "Allowed: complete safetensors files" in expect_error(folder)
    second_shard.write_bytes(b"\xff" * 40)
    assert "Allowed: complete safetensors files" in expect_error(folder)
    second_shard.unlink()
    assert "no tensor for" in expect_error(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "only pickled weights (.bin)" in expect_error(folder)


def test_rejects_damaged_tokenizer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "some text")
    lines = (folder / "qwen.tiktoken").read_text().split("\n")
    (folder / "qwen.tiktoken").write_text("\n".join(lines[:100] + lines[101:]))
    with raises_error(ConfigError, code="tokenizer-unreadable", naming="qwen.tiktoken"):
        find_tokenizer(str(folder))


def test_adapters_save_generate_and_merge_as_qwen2(checkpoint: Path, tmp_path: Path) -> None:
    model_config = config(checkpoint, lora={"enable": True, "rank": 4})
    trained: Any = load_language_model(model_config).eval()
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(
                parameter, std=0.2, generator=torch.Generator().manual_seed(len(name))
            )
    run = tmp_path / "run"
    save_language_model(trained, str(find_tokenizer(str(checkpoint))), run / "model")
    ids = torch.tensor([reference_tokens(checkpoint, TEXT)[:50]])
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
        base = reference_logits(checkpoint, ids[0])
    assert not torch.allclose(expected[0], base, atol=1e-2)
    merged = write_merged(run, tmp_path / "merged")
    assert json.loads((merged / "config.json").read_text())["model_type"] == "qwen2"
    for folder in (run, merged):
        model, tokenizer = load_model(folder, "float32")
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert tokenizer(TEXT)["input_ids"] == reference_tokens(checkpoint, TEXT)
    original, _ = load_model(checkpoint, "float32")
    with torch.no_grad():
        torch.testing.assert_close(original(input_ids=ids).logits[0], base, rtol=1e-4, atol=1e-4)
    assert isinstance(generate(run, "Hello", max_new_tokens=3), str)
    with raises_error(ConfigError, code="answer-too-long"):
        generate(run, "Hello", max_new_tokens=SEQ_LENGTH)


def test_original_module_names_map_to_qwen2(checkpoint: Path) -> None:
    def adapted_modules(targets: Any) -> set[str]:
        model = load_language_model(
            config(checkpoint, lora={"enable": True, "rank": 2, "target_modules": targets})
        )
        return {
            name.split(".lora_A")[0].rpartition(".")[2]
            for name, _ in model.named_parameters()
            if ".lora_A" in name
        }

    assert (
        adapted_modules(["c_attn"]) == adapted_modules("c_attn") == {"q_proj", "k_proj", "v_proj"}
    )
    assert adapted_modules(["c_attn", "attn.c_proj", "w1", "w2"]) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "up_proj",
        "gate_proj",
    }
    assert adapted_modules(["q_proj", "mlp.c_proj"]) == {"q_proj", "down_proj"}
    text = module_notice(
        config(checkpoint, lora={"enable": True, "target_modules": ["c_attn", "w1"]})
    )
    assert text.endswith("c_attn is q_proj, k_proj, v_proj; w1 is up_proj")


@pytest.mark.parametrize(
    ("cached_id", "configured_id"),
    [("Qwen/Qwen-7B", "qwen/qwen-7b"), ("somebody/qwen-tuned", "somebody/qwen-tuned")],
)
def test_downloaded_checkpoint_is_converted_by_hub_id(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached_id: str,
    configured_id: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / f"models--{cached_id.replace('/', '--')}"
    shutil.copytree(checkpoint, repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    model_config = config(Path(configured_id))
    load_task(model_config).check()
    model: Any = load_language_model(model_config)
    ids = torch.arange(20)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(input_ids=ids[None]).logits[0],
            reference_logits(checkpoint, ids),
            rtol=1e-4,
            atol=1e-4,
        )
    assert (
        paceline.plan({"model": configured_id, "dataset": "none"}, world_size=1, device="A10")[
            "parameters"
        ]
        < 10**6
    )
    # The limit is that of the downloaded revision.
    assert f"exceeds the {SEQ_LENGTH} tokens" in expect_error(
        Path(configured_id), train_args={"max_length": SEQ_LENGTH + 1}
    )
