"""Built-in models: folders that transformers loads, with reproducible content."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.files import sha256_file
from paceline.models.builtin import resolve_model

SIZES = {"qwen2-tiny": (8e6, 10e6), "qwen2-micro": (0.2e6, 1e6)}


@pytest.mark.parametrize("name", ["qwen2-tiny", "qwen2-micro"])
def test_transformers_loads_builtin_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch sets this variable on first use.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

    folder = resolve_model(f"builtin:{name}")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, Qwen2ForCausalLM)
    assert not any(report.values()), report
    low, high = SIZES[name]
    assert low <= sum(parameter.numel() for parameter in model.parameters()) <= high
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for weight in (model.lm_head.weight, model.model.layers[1].mlp.down_proj.weight):
        assert abs(float(weight.detach().mean())) < 1e-3
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 8192
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss
    assert float(loss) == pytest.approx(9.0, abs=0.5)  # ln 8192 = 9.01: untrained
    assert tokenizer.decode(tokenizer("süß 漢🙂\n\n  x")["input_ids"]) == "süß 漢🙂\n\n  x"


@pytest.mark.soak
def test_builtin_model_is_reproducible_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from paceline.models.builtin import resolve_model;"
        " print(resolve_model('builtin:qwen2-tiny')); assert not {'torch', 'transformers'} &"
        " set(sys.modules)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    folder, other_folder = Path(resolve_model("builtin:qwen2-tiny")), Path(process.stdout.strip())
    assert tmp_path in other_folder.parents
    names = sorted(file.name for file in folder.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [sha256_file(other_folder / name) for name in names] == [
        sha256_file(folder / name) for name in names
    ]


def test_hub_ids_are_unchanged_and_unknown_builtin_is_rejected() -> None:
    assert resolve_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(
        ConfigError,
        match=r"`builtin:qwen2-tiny`, `builtin:qwen2-micro`.*did you mean `builtin:qwen2-tiny`",
    ):
        resolve_model("builtin:qwen-tiny")
