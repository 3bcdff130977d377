"""Models, tokenizers and adapters that are named by paths of Windows."""

import json
import shutil
from pathlib import Path

import pytest
from raised import raises_error

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.hub import is_hub_id
from paceline.data.text.tokenizer import find_tokenizer
from paceline.models.adapters.check import fit_adapter
from paceline.models.builtin import builtin_tokenizer, resolve_model
from paceline.models.files import check_files, check_hub

MICRO = "builtin:qwen2-micro"


def test_paths_with_backslashes_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_model(MICRO), tmp_path / "models" / "micro")
    shutil.copytree(builtin_tokenizer(), tmp_path / "models" / "tokens")
    for name in (r"models\micro", r".\models\micro"):
        assert Path(resolve_model(name)) == Path("models/micro")
        check_files(Config(model=name, dataset="a.jsonl"))
    assert find_tokenizer(resolve_model(r"models\tokens")) == Path("models/tokens")
    adapter = tmp_path / "models" / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3}))
    lora = {"enable": True, "adapter": r"models\lora"}
    config = Config(model=r"models\micro", dataset="a.jsonl", lora=lora)
    check_files(config)
    assert fit_adapter(Loaded(config)).config.lora.rank == 3


@pytest.mark.parametrize("name", [r"C:\models\qwen", "C:/models/qwen", "C:/qwen", r"C:\qwen"])
def test_drives_of_windows_are_refused(name: str) -> None:
    assert not is_hub_id(name)
    rest = name[3:].replace("\\", "/")
    expected = f"this is a path of Windows.*/mnt/c/{rest}`"
    adapter = {"model": MICRO, "lora": {"enable": True, "adapter": name}}
    for settings, code in (({"model": name}, "missing-model"), (adapter, "missing-adapter")):
        with raises_error(ConfigError, code=code) as caught:
            check_files(Config(dataset="a.jsonl", **settings))
        caught.match(expected)
    with pytest.raises(ConfigError, match=expected):
        find_tokenizer(resolve_model(name))


def test_paths_with_backslashes_that_do_not_exist() -> None:
    config = Config(model=r"models\absent", dataset="a.jsonl")
    with raises_error(ConfigError, code="missing-model"):
        check_files(config)
    with raises_error(ConfigError, code="missing-model"):
        check_files(Config(model="models\new", dataset="a.jsonl"))
    check_hub(Config(model=MICRO, tokenizer=r"D:\tokens", dataset="a.jsonl"))  # no hub id
    with raises_error(ConfigError, code="missing-tokenizer-folder"):
        find_tokenizer(r"models\absent")
