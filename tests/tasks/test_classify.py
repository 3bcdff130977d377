"""`task: classify`: digits, folders, Hugging Face classifiers, and what is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.data.images import ImageDataset, ImageForm, open_images
from paceline.distributed.seeds import seed_everything
from paceline.models.vision import load_classifier
from paceline.tasks import load_task
from paceline.tasks.base import Task


def make_config(**keys: Any) -> Config:
    values = {"model": "builtin:small-cnn", "task": "classify", "dataset": "builtin:digits", **keys}
    return Config.model_validate(values)


def prepared_task(**keys: Any) -> Task:
    task = load_task(make_config(**keys))
    task.check()
    task.prepared = task.prepare()
    return task


def make_folder(root: Path, classes: dict[str, int], size: int = 12) -> Path:
    """Create images of noise with a brightness per class."""
    generator = np.random.default_rng(0)
    for label, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            noise = generator.integers(0, 60, (size, size + 4, 3), dtype=np.uint8)
            pixels = noise + np.uint8(90 * label)
            Image.fromarray(pixels).save(root / name / f"{number:02d}.png")
    return root


def batches(task: Task, dataset: Any, size: int) -> list[Any]:
    order = np.random.default_rng(0).permutation(len(dataset))
    return [
        task.collate([dataset[int(index)] for index in order[start : start + size]])
        for start in range(0, len(order), size)
    ]


def train(task: Task, epochs: int, size: int = 32) -> tuple[torch.nn.Module, list[float]]:
    """A plain loop: mean losses of the epochs."""
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = task.build_datasets()[0]
    losses = []
    for _ in range(epochs):
        total = count = 0.0
        for batch in batches(task, dataset, size):
            loss = task.loss(model, batch)
            (loss / task.count(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            total, count = total + float(loss.detach()), count + task.count(batch)
        losses.append(total / count)
    return model, losses


def accuracy(task: Task, model: torch.nn.Module) -> float:
    dataset = task.build_datasets()[1]
    sums = {"loss": 0.0, "accuracy": 0.0}
    with torch.no_grad():
        for batch in batches(task, dataset, 50):
            for name, value in task.evaluate(model.eval(), batch).items():
                sums[name] += float(value)
    return sums["accuracy"] / len(dataset)


def test_digits_are_learnt_and_the_model_loads_again(tmp_path: Path) -> None:
    task = prepared_task(split_dataset_ratio=0.1, classify={"hidden_size": 16})
    assert task.prepared is not None
    assert (task.prepared.num_train, task.prepared.num_eval) == (1617, 180)
    assert task.prepared.counts.as_dict() == {
        "read": 1797,
        "kept": 1797,
        "truncated": 0,
        "dropped": {},
    }
    model, losses = train(task, epochs=4)
    assert losses[-1] < 0.2 * losses[0]
    assert accuracy(task, model) > 0.9

    task.save_model(model, tmp_path)
    again, classes = load_classifier(tmp_path)
    images, _ = batches(task, task.build_datasets()[1], 50)[0]
    assert classes == [str(digit) for digit in range(10)]
    assert torch.equal(again(images), model.eval()(images))
    # The folder is a model to go on from.
    further = prepared_task(model=str(tmp_path))
    assert torch.equal(further.build_model().eval()(images), model(images))


def test_digits_have_the_declared_shape_and_scale() -> None:
    task = prepared_task()
    image, label = task.build_datasets()[0][0]
    assert (image.shape, image.dtype, label.shape, label.dtype) == (
        (1, 8, 8),
        torch.float32,
        (),
        torch.int64,
    )
    every = torch.stack([image for image, _ in task.build_datasets()[0]])
    assert (float(every.min()), float(every.max())) == (0.0, 1.0)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    dataset = prepared_task().build_datasets()[0]
    assert np.array_equal(dataset.index.labels, digits)
    assert np.allclose(dataset.pixels.reshape(-1, 64) * 16, pixels)


def test_the_split_follows_from_the_seed_alone_and_is_sent_to_ranks_whole() -> None:
    def rows(seed: int) -> set[int]:
        task = prepared_task(split_dataset_ratio=0.2, train_args={"seed": seed})
        task.prepared = pickle.loads(pickle.dumps(task.prepared))
        train_set, held_out = task.build_datasets()
        both = set(train_set.index.rows.tolist()), set(held_out.index.rows.tolist())
        assert not both[0] & both[1]
        assert len(both[0] | both[1]) == 1797
        return both[1]

    assert rows(1) == rows(1) != rows(2)


def test_the_fingerprint_changes_with_the_data() -> None:
    def fingerprint(**keys: Any) -> str | None:
        prepared = prepared_task(**keys).prepared
        return prepared and prepared.fingerprint

    assert fingerprint() == fingerprint()
    assert (
        len(
            {
                fingerprint(),
                fingerprint(dataset="builtin:digits#100"),
                fingerprint(split_dataset_ratio=0.5),
            }
        )
        == 3
    )


def test_the_loss_is_a_sum_so_that_parts_add_up() -> None:
    task = prepared_task(dataset="builtin:digits#40", model="builtin:mlp")
    torch.manual_seed(1)
    model = task.build_model()
    batch = batches(task, task.build_datasets()[0], 40)[0]
    parts = batches(task, task.build_datasets()[0], 13)
    assert task.count(batch) == sum(task.count(part) for part in parts) == 40
    torch.testing.assert_close(
        task.loss(model, batch), sum(task.loss(model, part) for part in parts)
    )


def test_number_of_images_after_the_hash(tmp_path: Path) -> None:
    assert len(open_images("builtin:digits#100", seed=3)) == 100
    first, second = (open_images("builtin:digits#100", seed=seed).rows for seed in (3, 4))
    assert first is not None
    assert second is not None
    assert not np.array_equal(first, second)
    folder = make_folder(tmp_path / "images", {"dark": 4, "light": 4})
    assert len(open_images(f"{folder}#5", seed=0)) == 5
    few = prepared_task(dataset=f"{folder}#50").prepared
    assert few is not None
    assert few.num_train == 8
    assert any(
        "8 images; using all of them" in text for level, text in few.notices if level == "warning"
    )


def test_a_folder_is_learnt_and_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", {"dark": 12, "grey": 12, "light": 12})
    (folder / "dark" / "empty.png").touch()
    (folder / "dark" / "notes.txt").write_text("no image")
    (folder / "light" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 20)
    (folder / "labels.csv").write_text("a,b\n")
    (folder / "unused").mkdir()
    task = prepared_task(
        dataset=str(folder), classify={"image_size": 8, "hidden_size": 8}, split_dataset_ratio=0.2
    )
    assert task.prepared is not None
    counts = task.prepared.counts.as_dict()
    assert (counts["read"], counts["kept"]) == (40, 36)
    assert sum(counts["dropped"].values()) == 4
    assert {"empty file", "in no class folder", "not an image"} <= set(counts["dropped"])
    warnings = " ".join(text for level, text in task.prepared.notices if level == "warning")
    assert "4 files dropped" in warnings
    assert "skipped `unused`, which has no readable images" in warnings
    image, label = task.build_datasets()[0][0]
    assert (image.shape, image.dtype) == ((3, 8, 8), torch.float32)
    assert 0 <= float(image.min()) <= float(image.max()) <= 1
    assert int(label) == 0
    model, losses = train(task, epochs=15, size=8)
    assert losses[-1] < 0.7 * losses[0]
    task.save_model(model, tmp_path)
    assert load_classifier(tmp_path)[1] == ["dark", "grey", "light"]


def test_an_image_that_does_not_decode_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", {"a": 1, "b": 1}, size=64)
    file = folder / "a" / "00.png"
    file.write_bytes(file.read_bytes()[:3000])  # complete header, pixels cut off
    task = prepared_task(dataset=str(folder))
    with pytest.raises(RunError, match=r"a/00\.png has a valid header"):
        task.build_datasets()[0][0]


def test_validation_folder_keeps_the_numbers_of_the_training_classes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", {"ant": 2, "bee": 2, "cat": 2})
    other = make_folder(tmp_path / "val", {"cat": 2, "bee": 1})
    task = prepared_task(dataset=str(folder), val_dataset=str(other))
    held_out = task.build_datasets()[1]
    assert held_out.index.labels.tolist() == [1, 2, 2]
    assert task.prepared is not None
    assert any("no images of 1 class" in text for _, text in task.prepared.notices)
    make_folder(tmp_path / "val2", {"cat": 1, "dog": 1})
    with pytest.raises(
        ConfigError, match=r"classes that training does not have: dog.*ant, bee, cat"
    ):
        prepared_task(dataset=str(folder), val_dataset=str(tmp_path / "val2"))


def test_augmentation_follows_from_the_seeded_generator() -> None:
    index = open_images("builtin:digits", seed=0)
    dataset = ImageDataset(index, ImageForm(1, 8, 8), augment=True)
    assert not dataset.deterministic

    def draw(epoch: int) -> torch.Tensor:
        images = []
        for number in range(8):
            seed_everything(7, "sample", epoch, number)
            images.append(dataset[number][0])
        return torch.stack(images)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert draw(0).shape == (8, 1, 8, 8)
    assert ImageDataset(index, ImageForm(1, 8, 8)).deterministic


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A Hugging Face classifier of 1,000 classes with random weights, as a folder."""
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=1000,
    )
    folder = tmp_path / "vit"
    ViTForImageClassification(settings).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3})
    )
    return folder


def test_a_hugging_face_classifier_gets_images_in_its_own_form(
    hub_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageClassification

    task = prepared_task(model=str(hub_folder), dataset="builtin:digits#64")
    assert task.default_learning_rate == 2e-5
    train_set = task.build_datasets()[0]
    assert train_set[0][0].shape == (3, 16, 16)
    assert float(train_set[0][0].min()) == -2.0
    model, losses = train(task, epochs=3)
    assert losses[-1] < losses[0]
    out = tmp_path / "out"
    out.mkdir()
    task.save_model(model, out)
    again = AutoModelForImageClassification.from_pretrained(out)
    images = batches(task, train_set, 8)[0][0]
    torch.testing.assert_close(again(images).logits, model.eval()(images).logits)
    assert load_classifier(out)[1] == [str(digit) for digit in range(10)]
    assert (out / "preprocessor_config.json").is_file()


def test_batch_normalization_gives_a_warning() -> None:
    task = prepared_task()
    assert task.setup(task.build_model()) == []
    noted = task.setup(torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)))
    assert noted[0][0] == "warning"
    assert "1 batch normalization" in noted[0][1]


def test_settings_of_language_models_are_named_as_without_effect() -> None:
    prepared = prepared_task(system="Be kind.", train_args={"max_length": 512}).prepared
    assert prepared is not None
    texts = [text for level, text in prepared.notices if level == "warning"]
    assert texts == [
        "`system` has no effect on `task: classify`",
        "`train_args.max_length` has no effect on `task: classify`",
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "builtin:qwen2-tiny"}, r"unknown built-in image model.*builtin:small-cnn"),
        ({"model": "builtin:small-cn"}, r"did you mean `builtin:small-cnn`"),
        ({"model": "./no/such/folder"}, r"does not exist"),
        ({"dataset": "builtin:python-docs"}, r"has no images.*builtin:digits"),
        ({"dataset": "no-such-folder"}, r"does not exist"),
        ({"dataset": "builtin:digits#0"}, r"selects 0 images"),
        ({"dataset": ["builtin:digits", "builtin:digits"]}, r"several sources"),
        ({"lora": {"enable": True}}, r"lora\.enable"),
    ],
)
def test_wrong_settings_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared_task(**keys)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (4, 4)).save(flat / "one.png")
    with pytest.raises(ConfigError, match=r"no class subfolders \(found: one\.png\)"):
        prepared_task(dataset=str(flat))
    with pytest.raises(ConfigError, match=r"is a file"):
        prepared_task(dataset=str(flat / "one.png"))
    with pytest.raises(ConfigError, match="has a single class, cat"):
        prepared_task(dataset=str(make_folder(tmp_path / "single", {"cat": 3})))
    with pytest.raises(ConfigError, match=r"did you mean.*single"):
        prepared_task(dataset=str(tmp_path / "singel"))
    (tmp_path / "void" / "cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no readable image"):
        prepared_task(dataset=str(tmp_path / "void"))
    for part in ("train", "val"):
        make_folder(tmp_path / "splits" / part, {"cat": 1, "dog": 1})
    with pytest.raises(
        ConfigError, match=r"contains splits.*`dataset: .*/train` and `val_dataset: .*/val`"
    ):
        prepared_task(dataset=str(tmp_path / "splits"))


def test_a_language_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )
    with pytest.raises(ConfigError, match=r"is a Qwen2ForCausalLM.*task: sft"):
        prepared_task(model=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match=r"model of type bert"):
        prepared_task(model=str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        prepared_task(model=str(tmp_path / "empty"))
