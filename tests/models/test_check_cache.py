"""A check that a model passed is not repeated by later runs, unless something changed that its
result depends on."""

import json
import os

import pytest
import torch
import transformers
from families import build_model

from paceline.config.schema import Config
from paceline.core.files import cache_dir
from paceline.data.collate import segment_inputs
from paceline.models import attention
from paceline.models.checks import cache as check_cache
from paceline.models.checks.cache import check_of_model
from paceline.models.checks.packing import choose_packing
from paceline.models.head.softmax import LogitTransform
from paceline.models.head.transform import choose_transform

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(
        transformers.CohereConfig(**SIZES, num_key_value_heads=2, logit_scale=0.25)
    )
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def check(folder, config=None, **options):
    """Run both checks on a model that is loaded anew. Return the number of its forward passes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    config = config or Config(model=str(folder), dataset="d")
    assert choose_transform(model, config) == LogitTransform(scale=0.25)
    assert choose_packing(model, CPU, config).rows == "segments"
    assert attention.attention_of(model) == attention.NAME
    assert model.training is False
    return len(passes)


def stored_files():
    return sorted((cache_dir() / "checks").glob("*.json"))


def test_passed_checks_are_not_repeated(folder):
    assert check(folder) > 0
    assert len(stored_files()) == 2
    assert check(folder) == 0


@pytest.mark.parametrize("changed", ["weights", "config", "dtype", "setting", "versions"])
def test_checks_are_repeated_after_change(folder, changed, monkeypatch):
    first = check(folder)
    config, options = Config(model=str(folder), dataset="d"), {}
    if changed == "weights":
        os.utime(folder / "model.safetensors", ns=(1, 1))
    elif changed == "config":
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "rope_theta": 5000.0}))
    elif changed == "dtype":
        options["dtype"] = torch.bfloat16
    elif changed == "setting":
        args = {"attn_implementation": "sdpa"}
        config = Config(model=str(folder), dataset="d", train_args=args)
    else:
        monkeypatch.setattr(check_cache, "_PACKAGES", ("paceline", "numpy"))
    assert check(folder, config, **options) == first
    assert len(stored_files()) == 4


def test_damaged_file_is_ignored(folder):
    first = check(folder)
    for file in stored_files():
        file.write_text("{")
    assert check(folder) == first
    assert check(folder) == 0


def test_failed_check_is_repeated(tmp_path):
    """It may have failed for lack of memory."""
    folder = tmp_path / "rwkv"
    build_model("rwkv").save_pretrained(folder)
    config = Config(model=str(folder), dataset="d")
    for _ in range(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert choose_packing(model, CPU, config).rows == "none"
    assert not stored_files()


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_stored_check_installs_recurrent_layers(family, tmp_path):
    folder = tmp_path / family
    build_model(family).save_pretrained(folder)
    config = Config(model=str(folder), dataset="d")
    choices, logits = [], []
    lengths = (3, 5)
    ids = torch.arange(3, 3 + sum(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    for number in range(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        passes: list[int] = []
        model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        choices.append(choose_packing(model, CPU, config))
        assert bool(passes) is (number == 0)
        row = {"input_ids": ids, "position_ids": positions, **segment_inputs(lengths)}
        logits.append(model(**row, use_cache=False).logits)
    assert choices[0] == choices[1]
    assert torch.equal(*logits)
    with torch.no_grad(), attention.without_packing(model):
        alone = model(input_ids=ids[:, 3:], use_cache=False).logits
    torch.testing.assert_close(logits[1][:, 3:], alone, rtol=1e-4, atol=1e-5)


def test_models_with_own_code_and_without_values_are_checked_each_time(folder):
    config = Config(model=str(folder), dataset="d", trust_remote_code=True)
    first = check(folder, config)
    assert check(folder, config) == first
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    config = Config(model=str(folder), dataset="d")
    assert check_of_model("packing", empty, config).file is None
    assert not stored_files()


def test_full_cache_is_a_warning(folder, caplog):
    cache_dir().mkdir(parents=True)
    (cache_dir() / "checks").write_text("not a folder")
    first = check(folder)
    assert "cannot be stored in the cache" in caplog.text
    assert check(folder) == first
