"""Samples with images that share a row: the start check, strategies of packing, and adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from raised import raises_error
from vision_checks import CHATS, TRAINS_ALL, compare_losses, prepare, write_chats
from vision_models import make_model

from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.data.order.build import build_order
from paceline.tasks.vision_language import VisionLanguageTask
from paceline.train.components import build_model

AUTO = {"train_args": {"packing": "auto"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models and data."""
    root = tmp_path_factory.mktemp("vision")
    for family in ("llava", "gemma3"):
        make_model(root / family, family)
    write_chats(root)
    return root


@pytest.fixture(autouse=True)
def no_stored_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of checks are stored by the model's files, which tests do not change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def set_up(task: VisionLanguageTask) -> tuple[Any, dict[str | None, str]]:
    """Return the model and the texts of the notices by their codes."""
    model = build_model(task, task.config)
    return model, {text.code: str(text) for _, text in task.setup(model)}


def make_task(folder: Path, family: str, **keys: Any) -> VisionLanguageTask:
    return prepare(folder / family, folder / "chats.jsonl", **keys)


def test_a_tower_that_mixes_images_is_found(folder: Path) -> None:
    task = make_task(folder, "llava", **AUTO)
    model = task.build_model()
    project = model.model.multi_modal_projector

    def mix(module: Any, args: Any, features: torch.Tensor) -> torch.Tensor:
        return features - features.mean(dim=0, keepdim=True) / 2

    project.register_forward_hook(mix)
    notices = {text.code for _, text in task.setup(model)}
    assert "packing-off" in notices
    assert not task.packed
    batch: Any = task.collate([task.build_datasets()[0][number] for number in range(3)])
    assert len(batch["input_ids"]) == 3


def test_a_layer_that_mixes_samples_is_named(folder: Path) -> None:
    task = make_task(folder, "llava", **AUTO)
    model = task.build_model()

    def mix(module: Any, args: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(1)

    model.model.language_model.layers[1].mlp.register_forward_hook(mix)
    notices = {text.code: str(text) for _, text in task.setup(model)}
    assert "LlamaMLP" in notices["packing-off"]


def test_packing_that_cannot_be_is_refused(folder: Path) -> None:
    task = make_task(folder, "gemma3", train_args={"packing": True})
    with raises_error(ConfigError, code="packing-mixes-samples", naming="in both directions"):
        task.setup(task.build_model())
    with raises_error(ConfigError, code="images-in-wrapped-rows", naming="wrapped"):
        make_task(folder, "llava", train_args={"packing": True, "packing_strategy": "wrapped"})


def test_rows_of_whole_samples(folder: Path) -> None:
    padded = make_task(folder, "llava", vision=TRAINS_ALL)
    lengths = padded.build_datasets()[0].lengths
    args = {"packing": True, "packing_strategy": "bfd"}
    args["max_length"] = int(lengths.sum() - lengths.min())
    task = make_task(folder, "llava", vision=TRAINS_ALL, train_args=args)
    models = [set_up(each)[0] for each in (task, padded)]
    train = task.build_datasets()[0]
    assert task.prepared is not None
    order = build_order(
        task.config, task.prepared.sources, 1, 1, train.lengths, len(train), is_packed=True
    )
    rows = [batch for step in range(2) for batch in order.micro_batches(step, 1)]
    counts = sorted(len(row) for row in rows)
    assert counts == [1, len(CHATS) - 1]
    for row in rows:
        samples = [train[key[1]] for key in row]
        batches: list[Any] = [each.collate(samples) for each in (task, padded)]
        assert batches[0]["input_ids"].shape[0] == 1
        compare_losses((task, padded), models, batches)


def test_pieces_of_texts_train_the_vision_tower(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "chats.jsonl").read_text().splitlines()
    (tmp_path / "texts.jsonl").write_text(f"{lines[1]}\n" * 3)
    args = {"packing": True, "packing_strategy": "wrapped"}
    task = prepare(folder / "llava", tmp_path / "texts.jsonl", vision=TRAINS_ALL, train_args=args)
    model, _ = set_up(task)
    train = task.build_datasets()[0]
    batch: Any = task.collate([train[0], train.piece(1, 0, 5)])
    assert len(batch["segment_lengths"]) == 3
    task.loss(model, batch).backward()
    tower = model.model.vision_tower
    assert any(value.grad is not None for value in tower.parameters())


def test_the_check_is_stored_for_its_samples(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "chats.jsonl").read_text().splitlines()
    (tmp_path / "texts.jsonl").write_text(f"{lines[1]}\n")
    make_model(tmp_path / "llava", "llava")

    def num_stored(data: Path) -> int:
        _, notices = set_up(prepare(tmp_path / "llava", data, **AUTO))
        assert "packing-checked" in notices
        return len(list((cache_dir() / "checks").glob("*.json")))

    texts = num_stored(tmp_path / "texts.jsonl")
    images = num_stored(folder / "chats.jsonl")
    assert images == texts + 1
    assert num_stored(folder / "chats.jsonl") == images


def test_adapters_and_checkpointed_layers(folder: Path) -> None:
    lora = {"lora": {"enable": True, "dropout": 0}, "vision": TRAINS_ALL}
    args = {"gradient_checkpointing": True}
    tasks = [
        make_task(folder, "llava", **lora, train_args={**args, **each})
        for each in (AUTO["train_args"], {})
    ]
    models = [set_up(task)[0] for task in tasks]
    with torch.no_grad():
        for value, other in zip(*(model.parameters() for model in models), strict=True):
            value.add_(torch.randn_like(value) * 0.05 * value.requires_grad)
            other.copy_(value)
    samples = [tasks[0].build_datasets()[0][number] for number in (0, 1, 2, 1)]
    batches: list[Any] = [task.collate(samples) for task in tasks]
    assert [len(batch["input_ids"]) for batch in batches] == [1, 4]
    compare_losses(tasks, models, batches)
