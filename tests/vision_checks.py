"""What holds for each family of vision-language models. The functions are called in the process
that can import the family's processor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import TINY, make_model

from paceline.config.schema import Config
from paceline.tasks import load_task
from paceline.tasks.vision_language import VisionLanguageTask

TRAINS_ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
_IMAGE = {"type": "image"}
#: (question, answer, sizes of the images) of each chat.
CHATS: list[tuple[list[Any], str, list[tuple[int, int]]]] = [
    ([_IMAGE, "What differs from ", _IMAGE, " here?"], "A.", [(40, 30), (49, 30)]),
    (["Hello"], "A cat.", []),
    (["Which?", _IMAGE], "A dog.", [(30, 70)]),
]


def write_chats(folder: Path) -> Path:
    """Write the chats with their images, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (question, answer, sizes) in enumerate(CHATS):
        names = []
        for index, (width, height) in enumerate(sizes):
            random = np.random.default_rng([number, index])
            names.append(f"{number}-{index}.png")
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / names[-1])
        text = "".join(part if isinstance(part, str) else "<image>" for part in question)
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns, "images": names}) + "\n")
    (folder / "chats.jsonl").write_text("".join(lines))
    return folder / "chats.jsonl"


def prepare(model: Path, data: Path, **keys: Any) -> VisionLanguageTask:
    args = {"max_length": 400, "loss_chunk_size": 3, "packing": False}
    args |= keys.pop("train_args", {})
    task = load_task(
        Config.model_validate(
            {"model": str(model), "dataset": str(data), "train_args": args, **keys}
        )
    )
    assert isinstance(task, VisionLanguageTask)
    task.check()
    task.prepared = task.prepare()
    return task


def check_batch_and_loss(family: str, folder: str) -> None:
    """Tokens, inputs, loss and gradients of a batch are those of transformers."""
    model_folder = make_model(Path(folder) / family, family)
    data = write_chats(Path(folder) / "data")
    task = prepare(model_folder, data, vision=TRAINS_ALL)
    train = task.build_datasets()[0]
    batch: Any = task.collate([train[index] for index in range(len(CHATS))])
    processor = AutoProcessor.from_pretrained(model_folder)
    chats = []
    for number, (question, answer, _) in enumerate(CHATS):
        index = iter(range(len(question)))
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": Image.open(data.parent / f"{number}-{next(index)}.png")}
            for part in question
        ]
        answers = [{"type": "text", "text": answer}]
        chats.append(
            [{"role": "user", "content": parts}, {"role": "assistant", "content": answers}]
        )
    expected = processor.apply_chat_template(
        chats,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "right"},
    )
    given = {**batch, **batch["vision_inputs"]}
    assert batch["vision_inputs"].keys() | {"input_ids", "attention_mask"} == expected.keys()
    for name, value in expected.items():
        assert given[name].dtype == value.dtype, name
        assert torch.equal(given[name], value), name
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (_, answer, _) in enumerate(CHATS):
        ids = batch["input_ids"][row].tolist()
        tokens = processor.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        start = next(at for at in range(len(ids)) if ids[at : at + len(tokens)] == tokens)
        labels[row, start : start + len(tokens)] = torch.tensor(tokens)
    assert task.count(batch) == int((labels != -100).sum())
    model = task.build_model()
    task.setup(model)
    assert task._transform is not None
    loss = task.loss(model, batch)
    loss.backward()
    reference = AutoModelForImageTextToText.from_pretrained(model_folder).train()
    pixels = {
        name: value.float() if value.is_floating_point() else value
        for name, value in expected.items()
    }
    own_loss = reference(**pixels, labels=labels).loss * task.count(batch)
    own_loss.backward()
    torch.testing.assert_close(loss, own_loss, rtol=1e-5, atol=1e-6)
    for (name, value), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (value.grad is None) is (other.grad is None), name
        if value.grad is not None:
            limit = 1e-5 * max(1.0, other.grad.abs().max().item())
            torch.testing.assert_close(value.grad, other.grad, rtol=1e-3, atol=limit, msg=name)


def check_parts(family: str, folder: str) -> None:
    """Each part can be frozen, also from adapters; a batch without images trains the same weights
    as one with images."""
    model_folder = make_model(Path(folder) / family, family)
    data = write_chats(Path(folder) / "data")
    tiny = TINY[family]

    def part(name: str) -> str:
        if name.startswith(f"{tiny.projector}.") or "image_newline" in name or "deepstack" in name:
            return "projector"
        return "tower" if name.startswith(f"{tiny.tower}.") else "language"

    for frozen, keys in (
        ({"tower", "projector"}, {}),
        ({"tower"}, {"freeze_multi_modal_projector": False}),
        ({"projector"}, {"freeze_vision_tower": False}),
        ({"language"}, {**TRAINS_ALL, "freeze_language_model": True}),
    ):
        task = prepare(model_folder, data, vision=keys)
        model = task.build_model()
        for name, value in model.named_parameters():
            assert value.requires_grad is (part(name) not in frozen), (name, frozen)
        lora = {"enable": True, "dropout": 0}
        adapted = prepare(model_folder, data, vision=keys, lora=lora).build_model()
        trained = {
            part(name.removeprefix("base_model.model."))
            for name, value in adapted.named_parameters()
            if value.requires_grad
        }
        assert trained
        assert not trained & frozen, frozen
    task, frozen_task = (prepare(model_folder, data, vision=keys) for keys in (TRAINS_ALL, {}))
    model = task.build_model()
    batches = [each.collate([each.build_datasets()[0][1]]) for each in (task, frozen_task)]
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1]
    losses = [task.loss(model, batch) for batch in batches]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    losses[0].backward()
    missing = {name for name, value in model.named_parameters() if value.grad is None}
    train = task.build_datasets()[0]
    task.loss(model, task.collate([train[0]])).backward()
    assert missing == {name for name, value in model.named_parameters() if value.grad is None}
    # A rank without images and one with images have the gradients of one rank with both.
    apart = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    task.loss(model, task.collate([train[0], train[1]])).backward()
    for name, value in model.named_parameters():
        if value.grad is not None:
            limit = 1e-5 * max(1.0, value.grad.abs().max().item())
            torch.testing.assert_close(apart[name], value.grad, rtol=1e-4, atol=limit, msg=name)


#: What the notice says of the families whose samples with images do not share a row.
PADDED = {"llama4": "attention in chunks", "gemma3": "in both directions"}


def check_packed_rows(family: str, folder: str) -> None:
    """Samples with images share a row, with the loss and the gradients of padded rows; or rows are
    padded, with the reason."""
    model_folder = make_model(Path(folder) / family, family)
    data = write_chats(Path(folder) / "data")
    args: dict[str, Any] = {"packing": "auto"}
    packed, padded = (
        prepare(model_folder, data, vision=TRAINS_ALL, train_args=each) for each in (args, {})
    )
    model = packed.build_model()
    notices = {text.code: str(text) for _, text in packed.setup(model)}
    reference = padded.build_model()
    padded.setup(reference)
    reference.load_state_dict(model.state_dict())
    train = packed.build_datasets()[0]
    if family in PADDED:
        assert PADDED[family] in notices["packing-off"]
        assert not packed.packed
        return
    assert "packing-checked" in notices, notices
    for numbers in ((0, 1, 2), (1, 0, 2), (2, 1), (1, 1), (0, 0, 1, 2, 2)):
        samples = [train[number] for number in numbers]
        batches: list[Any] = [task.collate(samples) for task in (packed, padded)]
        assert len(batches[0]["input_ids"]) == 1
        assert batches[0]["num_tokens"] == batches[1]["num_tokens"]
        assert "attention_mask" not in batches[0]
        compare_losses((packed, padded), (model, reference), batches)


def check_images_that_attend_both_ways(folder: str) -> None:
    """In some models of a family, tokens of an image attend in both directions: rows are padded."""
    model_folder = make_model(Path(folder) / "gemma4", "gemma4")
    settings = json.loads((model_folder / "config.json").read_text())
    settings["text_config"]["use_bidirectional_attention"] = "vision"
    (model_folder / "config.json").write_text(json.dumps(settings))
    args = {"packing": "auto"}
    task = prepare(model_folder, write_chats(Path(folder) / "data"), train_args=args)
    notices = {text.code: str(text) for _, text in task.setup(task.build_model())}
    assert "in both directions" in notices["packing-off"]


def compare_losses(tasks: Any, models: Any, batches: Any) -> None:
    losses = []
    for task, model, batch in zip(tasks, models, batches, strict=True):
        model.zero_grad()
        losses.append(task.loss(model.train(), batch))
        losses[-1].backward()
    assert abs(losses[0].item() - losses[1].item()) <= 1e-6 * abs(losses[1].item())
    for (name, value), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert (value.grad is None) is (other.grad is None), name
    gradients = [
        torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])
        for model in models
    ]
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-6 * gradients[1].abs().max()
