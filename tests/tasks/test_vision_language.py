"""`task: sft` with vision-language models: rows, tokens, loss, frozen parts, and saved models."""

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from merged_models import write_merged
from PIL import Image
from raised import raises_error
from tar_shards import write_shard
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import FAMILIES, make_model

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.loader import eval_batches
from paceline.data.loader_process import LoaderOptions
from paceline.data.stats.dataset import dataset_stats
from paceline.data.vision_language.images import NO_IMAGE_FILE
from paceline.distributed.devices import Devices
from paceline.launch.passes.draft import Draft, Host
from paceline.launch.passes.layout import choose_layout, set_accumulation
from paceline.launch.plan import plan
from paceline.models.builtin import resolve_model
from paceline.tasks import load_task
from paceline.tasks.preview import as_text, preview
from paceline.tasks.vision_language import VisionLanguageTask
from paceline.verify.modes import make_mode
from paceline.verify.run import _check_mode

WIDTH = 40
PADDED = {"train_args": {"max_length": 200, "packing": False}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family) for family in (*FAMILIES, "gemma3")}


def make_image(path: Path, seed: int, width: int = WIDTH) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(path)
    return image


def chat(question: Any, answer: str = "A cat.", **columns: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_config(model: Path, dataset: str, **keys: Any) -> Config:
    values = {"model": str(model), "dataset": dataset, "train_args": {"max_length": 200}, **keys}
    return Config.model_validate(values)


def prepare_task(model: Path, dataset: str, **keys: Any) -> VisionLanguageTask:
    task = load_task(make_config(model, dataset, **keys))
    assert isinstance(task, VisionLanguageTask)
    task.check()
    task.prepared = task.prepare()
    return task


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_and_loss_equal_those_of_transformers(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    images = [
        make_image(tmp_path / f"{number}.png", number, 40 + 9 * number) for number in range(3)
    ]
    rows = [
        chat("<image>What differs from <image> here?", "A.", images=["0.png", "1.png"]),
        chat("Hello"),
        chat([{"type": "text", "text": "Which?"}, {"type": "image", "image": "2.png"}], "A dog."),
    ]
    task = prepare_task(models[family], write_rows(tmp_path / "rows.jsonl", rows), **PADDED)
    dataset = task.build_datasets()[0]
    batch = task.collate([dataset[0], dataset[1], dataset[2]])
    processor = AutoProcessor.from_pretrained(models[family])
    image, text = {"type": "image"}, lambda content: {"type": "text", "text": content}
    contents = [
        [image, text("What differs from "), image, text(" here?")],
        [text("Hello")],
        [text("Which?"), image],
    ]
    answers = ["A.", "A cat.", "A dog."]
    texts = [
        processor.apply_chat_template(
            [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [text(answer)]},
            ]
        )
        for content, answer in zip(contents, answers, strict=True)
    ]
    expected = processor(
        text=texts,
        images=[images[:2], [], images[2:]],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    for name, value in expected.items():
        assert torch.equal({**batch, **batch["vision_inputs"]}[name], value), name
    model = task.build_model()
    task.setup(model)
    labels = torch.full_like(batch["input_ids"], -100)
    for row, answer in enumerate(answers):
        ids = batch["input_ids"][row].tolist()
        tokens = processor.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        start = next(at for at in range(len(ids)) if ids[at : at + len(tokens)] == tokens)
        labels[row, start : start + len(tokens)] = torch.tensor(tokens)
    logits = model(**expected).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    assert task.count(batch) == int((labels != -100).sum())
    assert task.loss(model, batch).item() == pytest.approx(loss.item(), rel=1e-5)


def test_rows_that_cannot_be_used_are_counted(models: dict[str, Path], tmp_path: Path) -> None:
    make_image(tmp_path / "a.png", 0)
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows = [
        chat("Before the question", images=["a.png"]),
        chat("<image><image>", images=["a.png"]),
        chat("<image>", images=["missing.png"]),
        chat("<image>", images=["broken.png"]),
        chat("Three", images=["a.png"] * 3),
        chat("word " * 300, images=["a.png"]),
        chat("<image>" + "word " * 300, images=["a.png"]),
    ]
    task = prepare_task(
        models["llava"], write_rows(tmp_path / "rows.jsonl", rows), vision={"max_images": 2}
    )
    assert task.prepared is not None
    figures = task.prepared.counts.as_dict()
    assert (figures["read"], figures["kept"]) == (7, 1)
    assert figures["dropped"] == {
        "the number of images differs from the number of placeholders": 1,
        NO_IMAGE_FILE: 1,
        "the image cannot be read": 1,
        "more than 2 images": 1,
        "no answer left after truncation": 2,
    }
    config = make_config(models["llava"], task.config.dataset)  # type: ignore[arg-type]
    assert "16 tokens" not in as_text(preview(config, rows=1))
    assert "Before the question" in as_text(preview(config, rows=1))


def test_images_in_parquet_and_urls(models: dict[str, Path], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    content = io.BytesIO()
    make_image(tmp_path / "a.png", 3).save(content, "PNG")
    rows = [chat("Which?", images=[{"bytes": content.getvalue(), "path": "a.png"}])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    stored = prepare_task(models["idefics3"], str(tmp_path / "rows.parquet"))
    text = base64.b64encode(content.getvalue()).decode()
    parts = [{"type": "image", "base64": text}, {"type": "text", "text": "Which?"}]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
    # LLaMA-Factory v1.
    path = {"type": "image_url", "value": str(tmp_path / "a.png")}
    question = {"type": "text", "value": "Which?"}
    expected = stored.build_datasets()[0][0]
    for number, row in enumerate(
        (
            chat("Which?", image=str(tmp_path / "a.png")),
            chat(parts),
            chat([url, parts[1]]),
            chat([path, question]),
        )
    ):
        file = write_rows(tmp_path / f"{number}.jsonl", [row])
        sample = prepare_task(models["idefics3"], file).build_datasets()[0][0]
        assert np.array_equal(sample["input_ids"], expected["input_ids"])
        assert torch.equal(sample["pixels"]["pixel_values"], expected["pixels"]["pixel_values"])
    file = write_rows(tmp_path / "invalid.jsonl", [chat([{"type": "image", "base64": "!"}])])
    with raises_error(ConfigError, code="no-usable-rows"):
        prepare_task(models["llava"], file)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (chat("Which?", videos=["a.mp4"]), "videos"),
        (chat("Which?", audio="a.wav"), "audio"),
        (chat([{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "Which?"}]), "video"),
        (chat([{"type": "input_audio", "input_audio": {"data": ""}}]), "input_audio"),
    ],
)
def test_video_and_audio_are_refused(
    row: dict[str, Any], kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [row])
    with raises_error(ConfigError, code="data-of-another-method", naming=f"`{kind}`"):
        prepare_task(models["llava"], data)


def test_tokens_begin_as_those_of_the_processor(models: dict[str, Path], tmp_path: Path) -> None:
    """A processor adds the token of the beginning unless the template prints it."""
    folder = tmp_path / "model"
    shutil.copytree(models["llava"], folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    start = "<|im_start|>"
    number = next(each["id"] for each in settings["added_tokens"] if each["content"] == start)
    sequence = [
        {"SpecialToken": {"id": start, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": [*sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {start: {"id": start, "ids": [number], "tokens": [start]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    make_image(tmp_path / "a.png", 0)
    rows = [chat("<image>Which?", images=["a.png"]), chat("Hello")]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    task = prepare_task(folder, data, chat_template=template)
    processor = AutoProcessor.from_pretrained(folder)
    texts = [f"{question}<|im_end|>A cat.<|im_end|>" for question in ("<image>Which?", "Hello")]
    image = Image.open(tmp_path / "a.png")
    expected = processor(text=texts, images=[[image], []])["input_ids"]
    for index, ids in enumerate(expected):
        sample = task.build_datasets()[0][index]
        assert sample["input_ids"].tolist() == ids
        assert ids[0] == number


def test_chats_in_tar_shards_are_those_of_files(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        chat("Which?", images=["0.png"]),
        chat("<image> or <image>?", images=["1.png", "2.png"]),
    ]
    for number in range(3):
        make_image(tmp_path / f"{number}.png", number)
    images = [(tmp_path / f"{number}.png").read_bytes() for number in range(3)]
    shard = {
        "a.png": images[0], "a.json": json.dumps(chat("Which?", image="a.png")).encode(),
        "b.left.png": images[1], "b.right.png": images[2],
        "b.json": json.dumps(chat("<image> or <image>?")).encode(),
    }  # fmt: skip
    packed = prepare_task(models["idefics3"], str(write_shard(tmp_path / "rows.tar", shard)))
    linked = prepare_task(models["idefics3"], write_rows(tmp_path / "rows.jsonl", rows))
    samples, expected = (task.build_datasets()[0] for task in (packed, linked))
    assert len(samples) == 2
    for index in range(2):
        assert np.array_equal(samples[index]["input_ids"], expected[index]["input_ids"])
        pixels = (row[index]["pixels"]["pixel_values"] for row in (samples, expected))
        assert torch.equal(*pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_and_adapters(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    make_image(tmp_path / "a.png", 0)
    data = write_rows(tmp_path / "rows.jsonl", [chat("Which?", images=["a.png"]), chat("Hello")])
    names = {"llava": "vision_tower multi_modal_projector", "idefics3": "vision_model connector"}
    tower, projector = names[family].split()
    model = prepare_task(models[family], data).build_model()
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen
    assert all(f".{tower}." in name or f".{projector}." in name for name in frozen)
    trains_projector = {"vision": {"freeze_multi_modal_projector": False}}
    model = prepare_task(models[family], data, **trains_projector).build_model()
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert all(f".{tower}." in name for name in frozen)
    task = prepare_task(models[family], data, lora={"enable": True, "dropout": 0}, **PADDED)
    model = task.build_model().eval()
    task.setup(model)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained
    assert all(tower not in name and projector not in name for name in trained)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    (tmp_path / "run" / "model").mkdir(parents=True)
    task.save_model(model, tmp_path / "run" / "model")
    merged = write_merged(tmp_path / "run")
    loaded = AutoModelForImageTextToText.from_pretrained(merged)
    assert type(AutoProcessor.from_pretrained(merged)).__name__.lower().startswith(family)
    batch = task.collate([task.build_datasets()[0][0]])
    torch.testing.assert_close(
        loaded(**task._inputs(batch)).logits,
        model(**task._inputs(batch)).logits,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_without_images_give_gradients_to_every_part(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    make_image(tmp_path / "a.png", 0)
    rows = [chat("Hello"), chat("Which?", images=["a.png"])]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    keys = {"vision": {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}}
    task, frozen = (prepare_task(models[family], data, **PADDED, **each) for each in (keys, {}))
    model = task.build_model()
    batches = [each.collate([each.build_datasets()[0][0]]) for each in (task, frozen)]
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1]
    assert task.count(batches[0]) == frozen.count(batches[1])
    losses = [task.loss(model, batch) for batch in batches]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    losses[0].backward()
    missing = {name for name, value in model.named_parameters() if value.grad is None}
    model.zero_grad()
    task.loss(model, task.collate([task.build_datasets()[0][1]])).backward()
    assert missing == {name for name, value in model.named_parameters() if value.grad is None}
    weights = [
        int(batch.weight)
        for batch in eval_batches(
            task.build_datasets()[0],
            task.collate,
            batch_size=1,
            rank=0,
            world_size=1,
            seed=0,
            options=LoaderOptions(num_workers=0),
        )
    ]
    assert weights == [1, 1]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (
            {"train_args": {"torch_compile": True}},
            ("setting-with-vision-language", "torch_compile"),
        ),
        ({"tokenizer": "builtin:qwen2-micro"}, ("setting-with-vision-language", "tokenizer")),
    ],
)
def test_refused(
    keys: dict[str, Any], error: tuple[str, str], models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [chat("Hello")])
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        prepare_task(models["llava"], data, **keys)


TEMPLATE_FOR_TEXTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_for_texts_prints_the_image_token_of_the_model(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["llava"], folder)
    for file in folder.glob("*.json*"):
        file.write_text(file.read_text().replace("<image>", "[IMG]"))
    make_image(tmp_path / "a.png", 3)
    row = chat("<image>Which?", images=[str(tmp_path / "a.png")])
    data = write_rows(tmp_path / "rows.jsonl", [row])
    expected = prepare_task(models["llava"], data, chat_template=TEMPLATE_FOR_TEXTS)
    other = prepare_task(folder, data, chat_template=TEMPLATE_FOR_TEXTS)
    assert AutoProcessor.from_pretrained(folder).image_token == "[IMG]"
    samples = [task.build_datasets()[0][0]["input_ids"] for task in (expected, other)]
    assert np.array_equal(*samples)
    assert len(samples[0]) > 20


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
@pytest.mark.parametrize("settings", [{"packing": True}, {"packing_strategy": "bfd"}])
def test_texts_without_images_share_a_row(
    family: str, settings: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [chat("Hello"), chat("What is it?", "A longer answer than that."), chat("Bye", "Yes.")]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    packed = prepare_task(models[family], data, train_args={"max_length": 200, **settings})
    padded = prepare_task(models[family], data, **PADDED)
    losses = []
    for task in (packed, padded):
        train, _ = task.build_datasets()
        model = task.build_model()
        task.setup(model)
        batch = task.collate([train[index] for index in range(3)])
        losses.append(task.loss(model, batch).item())
        assert (len(batch["input_ids"]) == 1) is (task is packed)
        assert "attention_mask" not in batch or task is padded
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"parallel": {"mode": "tensor"}}, ("vision-language-layout", "parallel.tensor")),
        ({"parallel": {"pipeline": 2}}, ("vision-language-layout", "parallel.pipeline")),
    ],
)
def test_strategies_refused(
    keys: dict[str, Any], error: tuple[str, str], models: dict[str, Path]
) -> None:
    config = make_config(models["llava"], "d", **keys)
    draft = Draft(Loaded(config), 0.0, host=Host(Devices("cpu", 2)))
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        plan(draft, first=choose_layout, last=set_accumulation)


def test_statistics_count_the_tokens_of_images(models: dict[str, Path], tmp_path: Path) -> None:
    make_image(tmp_path / "a.png", 1)
    rows = [chat("<image>What is it?", images=["a.png"]), chat("Hello")]
    config = make_config(models["llava"], write_rows(tmp_path / "rows.jsonl", rows))
    stats, prepared = dataset_stats(config, resolve_model, has_images=True)
    assert stats["samples"] == 2
    assert stats["lengths"]["max"] - stats["lengths"]["min"] >= 16  # patches of an image
    assert any("not by their images" in notice[1] for notice in prepared.notices)


def test_verify_leaves_out_division_of_the_model(models: dict[str, Path]) -> None:
    config = make_config(models["llava"], "d")
    for name in ("tensor", "pipeline"):
        with raises_error(ConfigError, code="vision-language-layout", naming=name):
            _check_mode(make_mode(name, config, 2), config, "cpu")
