"""ModelScope ids: parsing, download, and the error if the `modelscope` package is missing."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from raised import raises_error

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.hub import is_hub_id
from paceline.data.sources.resolve import open_source
from paceline.models.builtin import resolve_model


@pytest.mark.parametrize(
    "name", ["modelscope:", "modelscope:owner", "modelscope:a/b/c", "modelscope:a b/c"]
)
def test_rejects_malformed_id(name: str) -> None:
    with raises_error(ConfigError, code="invalid-modelscope-name"):
        resolve_model(name)


def test_missing_package_error_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert not is_hub_id("modelscope:a/b")
    for resolve in (resolve_model, lambda name: open_source(DatasetSource(path=name))):
        with raises_error(ConfigError, code="missing-modelscope", naming="modelscope"):
            resolve("modelscope:a/b")


def test_downloaded_folder_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake module replaces the package, which is not a test dependency."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    package, hub, module = (
        ModuleType(name)
        for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download")
    )
    calls: list[str] = []
    for name in ("snapshot_download", "dataset_snapshot_download"):
        setattr(
            module, name, lambda repo, name=name: calls.append(f"{name} {repo}") or str(tmp_path)
        )
    hub.snapshot_download = module  # type: ignore[attr-defined]
    for fake_module in (package, hub, module):
        monkeypatch.setitem(sys.modules, fake_module.__name__, fake_module)
    assert resolve_model("modelscope:a/b") == str(tmp_path)
    assert [row for _, row in open_source(DatasetSource(path="modelscope:c/d#1")).rows(0)] == [
        {"prompt": "a", "completion": "b"}
    ]
    assert calls == ["snapshot_download a/b", "dataset_snapshot_download c/d"]


def test_use_modelscope_applies_to_every_hub_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").mkdir()
    dataset = [
        "owner/rows",
        "owner/rows#10",
        "data/rows",
        "data/missing.jsonl",
        "alpaca-en",
        {"path": "owner/other", "split": "test"},
    ]
    values = {
        "model": "owner/model",
        "tokenizer": "./folder/tokenizer",
        "dataset": dataset,
        "use_modelscope": True,
    }
    config = Config.model_validate(values)
    assert (config.model, config.tokenizer) == ("modelscope:owner/model", "./folder/tokenizer")
    assert [source.path for source in config.sources()] == [
        "modelscope:owner/rows", "modelscope:owner/rows#10", "data/rows", "data/missing.jsonl",
        "alpaca-en", "modelscope:owner/other",
    ]  # fmt: skip
    # The config that a run writes can be loaded again.
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("use_hf", "model"), [("false", "modelscope:owner/model"), ("true", "owner/model")]
)
def test_use_hf_setting_of_ms_swift(use_hf: str, model: str) -> None:
    assert (
        load_config(
            None, {"model": "owner/model", "dataset": "rows.jsonl", "use_hf": use_hf}
        ).config.model
        == model
    )
