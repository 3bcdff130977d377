"""`task: classify`: digits, image folders, Hugging Face classifiers, and errors."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from raised import raises_error
from tar_shards import write_shard

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.data.images import ImageDataset, ImageForm, open_images
from paceline.distributed.seeds import seed_everything
from paceline.models.classifiers.images import load_classifier
from paceline.tasks import load_task
from paceline.tasks.base import Task
from paceline.tasks.classify import _mean_auc


def make_config(**keys: Any) -> Config:
    values = {"model": "builtin:small-cnn", "task": "classify", "dataset": "builtin:digits", **keys}
    return Config.model_validate(values)


def prepare_task(**keys: Any) -> Task:
    task = load_task(make_config(**keys))
    task.check()
    task.prepared = task.prepare()
    return task


def make_folder(root: Path, classes: dict[str, int], size: int = 12) -> Path:
    """Create noise images with a different brightness for each class."""
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
    """Train in a simple loop; return the model and the mean loss of each epoch."""
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
    with torch.no_grad():
        results = [task.evaluate(model.eval(), batch) for batch in batches(task, dataset, 50)]
    return sum(float(result["accuracy"]) for result in results) / len(dataset)


def test_learns_digits_and_reloads_model(tmp_path: Path) -> None:
    task = prepare_task(split_dataset_ratio=0.1, classify={"hidden_size": 16})
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
    reloaded, classes = load_classifier(tmp_path)
    images, _ = batches(task, task.build_datasets()[1], 50)[0]
    assert classes == [str(digit) for digit in range(10)]
    assert torch.equal(reloaded(images), model.eval()(images))
    # The folder can be used as the model of another run.
    second_task = prepare_task(model=str(tmp_path))
    assert torch.equal(second_task.build_model().eval()(images), model(images))


def test_digits_have_declared_shape_and_range() -> None:
    task = prepare_task()
    image, label = task.build_datasets()[0][0]
    assert (image.shape, image.dtype, label.shape, label.dtype) == (
        (1, 8, 8),
        torch.float32,
        (),
        torch.int64,
    )
    images = torch.stack([image for image, _ in task.build_datasets()[0]])
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)


def test_digits_match_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    dataset = prepare_task().build_datasets()[0]
    assert np.array_equal(dataset.index.labels, digits)
    assert np.allclose(dataset.pixels.reshape(-1, 64) * 16, pixels)


def test_split_depends_only_on_seed_and_survives_pickling() -> None:
    def held_out_rows(seed: int) -> set[int]:
        task = prepare_task(split_dataset_ratio=0.2, train_args={"seed": seed})
        task.prepared = pickle.loads(pickle.dumps(task.prepared))
        train_set, held_out = task.build_datasets()
        train_rows, eval_rows = (
            set(train_set.index.rows.tolist()),
            set(held_out.index.rows.tolist()),
        )
        assert not train_rows & eval_rows
        assert len(train_rows | eval_rows) == 1797
        return eval_rows

    assert held_out_rows(1) == held_out_rows(1) != held_out_rows(2)


def test_fingerprint_changes_with_data() -> None:
    def fingerprint(**keys: Any) -> str | None:
        prepared = prepare_task(**keys).prepared
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


def test_loss_of_batch_is_sum_over_parts() -> None:
    task = prepare_task(dataset="builtin:digits#40", model="builtin:mlp")
    torch.manual_seed(1)
    model = task.build_model()
    batch = batches(task, task.build_datasets()[0], 40)[0]
    parts = batches(task, task.build_datasets()[0], 13)
    assert task.count(batch) == sum(task.count(part) for part in parts) == 40
    torch.testing.assert_close(
        task.loss(model, batch), sum(task.loss(model, part) for part in parts)
    )


def test_f1_is_the_mean_over_classes_as_in_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    generator = torch.Generator().manual_seed(0)
    # Classes 8 and 9 neither occur nor are predicted.
    predicted, labels = torch.randint(0, 8, (2, 60), generator=generator).double()
    expected = f1_score(labels, predicted, average="macro")
    gathered = {"predicted": predicted, "label": labels}
    metrics = prepare_task().metrics({**gathered, "probabilities": torch.rand(600)})
    assert metrics["f1"] == pytest.approx(expected)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_auc_as_in_scikit_learn(num_classes: int) -> None:
    from sklearn.metrics import roc_auc_score

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(50) % num_classes
    probabilities = torch.rand((50, num_classes), generator=generator).softmax(-1).double()
    scores = probabilities[:, 1] if num_classes == 2 else probabilities
    expected = roc_auc_score(labels, scores, multi_class="ovr")
    assert _mean_auc(labels, probabilities) == pytest.approx(expected)


def test_number_suffix_selects_images(tmp_path: Path) -> None:
    assert len(open_images("builtin:digits#100", seed=3)) == 100
    first, second = (open_images("builtin:digits#100", seed=seed).rows for seed in (3, 4))
    assert first is not None
    assert second is not None
    assert not np.array_equal(first, second)
    folder = make_folder(tmp_path / "images", {"dark": 4, "light": 4})
    assert len(open_images(f"{folder}#5", seed=0)) == 5
    prepared = prepare_task(dataset=f"{folder}#50").prepared
    assert prepared is not None
    assert prepared.num_train == 8
    assert any(
        "8 images; using all of them" in text
        for level, text in prepared.notices
        if level == "warning"
    )


def test_learns_image_folder_and_counts_unreadable_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", {"dark": 12, "grey": 12, "light": 12})
    (folder / "dark" / "empty.png").touch()
    (folder / "dark" / "notes.txt").write_text("no image")
    (folder / "light" / "truncated.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 20)
    (folder / "labels.csv").write_text("a,b\n")
    (folder / "unused").mkdir()
    task = prepare_task(
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


def test_undecodable_image_error_names_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", {"a": 1, "b": 1}, size=64)
    file = folder / "a" / "00.png"
    file.write_bytes(file.read_bytes()[:3000])  # valid header, truncated pixel data
    task = prepare_task(dataset=str(folder))
    with pytest.raises(RunError, match=r"a/00\.png has a valid header"):
        task.build_datasets()[0][0]


def test_images_in_tar_shards_are_those_of_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", {"2": 3, "10": 3})
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*.png"))}
    shards: list[dict[str, bytes]] = [{}, {}]
    for number, (path, content) in enumerate(files.items()):
        shard = shards[number % 2]
        shard[f"{number}.png"] = content
        if number % 2:
            shard[f"{number}.json"] = json.dumps({"label": int(path.parent.name)}).encode()
        else:
            shard[f"{number}.cls"] = path.parent.name.encode()
    shards[1] |= {"x1.png": b"", "x1.cls": b"2", "x2.png": b"text", "x2.cls": b"2"}
    shards[1] |= {"x3.png": shards[0]["0.png"], "x4.cls": b"2"}
    for number, shard in enumerate(shards):
        write_shard(tmp_path / "shards" / f"train-{number}.tar", shard)
    names = {"{0..1}.tar": 6, "*.tar": 6, "0.tar": 3, "{0..1}.tar#4": 4}
    sizes = {f"{tmp_path}/shards/train-{name}": number for name, number in names.items()}
    sizes |= {f"{tmp_path}/shards": 6, f"file://{tmp_path}/shards/train-*.tar": 6}
    for dataset, size in sizes.items():
        task = prepare_task(dataset=dataset, streaming=True)
        assert task.prepared is not None
        assert task.prepared.num_train == size
        train_set = pickle.loads(pickle.dumps(task.build_datasets()[0]))
        assert len(train_set) == size
    task = prepare_task(dataset=f"{tmp_path}/shards")
    assert task.prepared is not None
    assert task.prepared.counts.dropped == {
        "empty file": 1, "not an image": 1, "image without a class": 1, "no image": 1,
    }  # fmt: skip
    assert task._handle.train.classes == ["2", "10"]  # by value
    images, expected = task.build_datasets()[0], prepare_task(dataset=str(folder)).build_datasets()
    order = [expected[0].index.names.index(path.relative_to(folder).as_posix()) for path in files]
    for index, number in enumerate([0, 2, 4, 1, 3, 5]):
        image, label = expected[0][order[number]]
        assert torch.equal(images[index][0], image)
        assert ["2", "10"][images[index][1]] == expected[0].index.classes[label]


@pytest.mark.parametrize(
    ("name", "files", "error"),
    [
        ("a.tar", {"1.png": b"x", "2.png": b""}, ("no-images-in-shards", "")),
        ("a.tar", {}, ("no-images-in-shards", "")),
        ("b-{0..1}.tar", {}, ("missing-shards", "b-0.tar")),
    ],
)
def test_unusable_tar_shards_are_refused(
    name: str, files: dict[str, bytes], error: tuple[str, str], tmp_path: Path
) -> None:
    write_shard(tmp_path / "a.tar", files)
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        prepare_task(dataset=str(tmp_path / name))


def test_validation_folder_uses_training_class_indices(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "train", {"ant": 2, "bee": 2, "cat": 2})
    val_folder = make_folder(tmp_path / "val", {"cat": 2, "bee": 1})
    task = prepare_task(dataset=str(folder), val_dataset=str(val_folder))
    held_out = task.build_datasets()[1]
    assert held_out.index.labels.tolist() == [1, 2, 2]
    assert task.prepared is not None
    assert any("no images of 1 class" in text for _, text in task.prepared.notices)
    make_folder(tmp_path / "val2", {"cat": 1, "dog": 1})
    with raises_error(ConfigError, code="unknown-validation-class"):
        prepare_task(dataset=str(folder), val_dataset=str(tmp_path / "val2"))


def test_augmentation_is_determined_by_seed() -> None:
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
    """The folder of a Hugging Face classifier with 1,000 classes and random weights."""
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


def test_hugging_face_classifier_receives_images_in_expected_format(
    hub_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageClassification

    task = prepare_task(model=str(hub_folder), dataset="builtin:digits#64")
    assert task.default_learning_rate == 2e-5
    train_set = task.build_datasets()[0]
    assert train_set[0][0].shape == (3, 16, 16)
    assert float(train_set[0][0].min()) == -2.0
    model, losses = train(task, epochs=3)
    assert losses[-1] < losses[0]
    out = tmp_path / "out"
    out.mkdir()
    task.save_model(model, out)
    reloaded = AutoModelForImageClassification.from_pretrained(out)
    images = batches(task, train_set, 8)[0][0]
    torch.testing.assert_close(reloaded(images).logits, model.eval()(images).logits)
    assert load_classifier(out)[1] == [str(digit) for digit in range(10)]
    assert (out / "preprocessor_config.json").is_file()


def test_warns_about_batch_normalization() -> None:
    task = prepare_task()
    assert task.setup(task.build_model()) == []
    notices = task.setup(torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)))
    assert notices[0][0] == "warning"
    assert "1 batch normalization" in notices[0][1]


def test_warns_about_language_model_settings() -> None:
    prepared = prepare_task(system="Be kind.", train_args={"max_length": 512}).prepared
    assert prepared is not None
    texts = [text for level, text in prepared.notices if level == "warning"]
    assert texts == [
        "`system` has no effect on `task: classify`",
        "`train_args.max_length` has no effect on `task: classify`",
    ]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"model": "builtin:qwen2-tiny"}, ("unknown-name", "builtin:qwen2-tiny")),
        ({"model": "builtin:small-cn"}, ("unknown-name", "builtin:small-cn")),
        ({"model": "./no/such/folder"}, ("missing-image-model", "")),
        ({"dataset": "builtin:python-docs"}, ("unknown-image-dataset", "")),
        ({"dataset": "no-such-folder"}, ("missing-image-folder", "")),
        ({"dataset": "builtin:digits#0"}, ("selects-no-rows", "")),
        ({"dataset": ["builtin:digits", "builtin:digits"]}, ("several-sources", "")),
        ({"lora": {"enable": True}}, ("lora-with-task", "lora.enable")),
    ],
)
def test_rejects_invalid_settings(keys: dict[str, Any], error: tuple[str, str]) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        prepare_task(**keys)


def test_rejects_invalid_folders(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.new("RGB", (4, 4)).save(flat / "image.png")
    with raises_error(ConfigError, code="no-classes"):
        prepare_task(dataset=str(flat))
    with raises_error(ConfigError, code="missing-image-folder"):
        prepare_task(dataset=str(flat / "image.png"))
    with raises_error(ConfigError, code="single-class"):
        prepare_task(dataset=str(make_folder(tmp_path / "single", {"cat": 3})))
    with pytest.raises(ConfigError, match=r"did you mean.*single"):
        prepare_task(dataset=str(tmp_path / "singel"))
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with raises_error(ConfigError, code="no-readable-images"):
        prepare_task(dataset=str(tmp_path / "empty"))
    for part in ("train", "val"):
        make_folder(tmp_path / "splits" / part, {"cat": 1, "dog": 1})
    with raises_error(ConfigError, code="splits-instead-of-classes"):
        prepare_task(dataset=str(tmp_path / "splits"))


def test_rejects_language_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )
    with raises_error(ConfigError, code="not-an-image-classifier", naming="task"):
        prepare_task(model=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with raises_error(ConfigError, code="not-an-image-classifier"):
        prepare_task(model=str(tmp_path))
    (tmp_path / "empty").mkdir()
    with raises_error(ConfigError, code="no-model-config"):
        prepare_task(model=str(tmp_path / "empty"))
