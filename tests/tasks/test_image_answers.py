"""Answers of vision-language models to questions with images: `paceline generate`."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import events, run
from PIL import Image
from raised import raises_error
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import make_model

from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.inference.generate import generate

NUM_TOKENS = 12


def make_picture(path: Path, color: str) -> Path:
    Image.new("RGB", (36, 24), color).save(path)
    return path


@pytest.fixture(scope="module", params=["llava", "idefics3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_model(folder / "model", request.param)
    return folder


def expected_answer(run: Path, question: str, images: list[Path]) -> str:
    """Return the answer of transformers with the model's own processor."""
    folder = run / "model"
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    batch = processor(
        text=[inputs],
        images=[[Image.open(image) for image in images]] if images else None,
        return_tensors="pt",
        add_special_tokens=False,
    )
    with torch.no_grad():
        output = model.generate(**batch, do_sample=False, max_new_tokens=NUM_TOKENS)
    answer = output[0, batch["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(answer, skip_special_tokens=True)).strip()


def test_answer_equals_the_answer_of_transformers(model: Path, tmp_path: Path) -> None:
    red, blue = make_picture(tmp_path / "red.png", "red"), make_picture(tmp_path / "b.png", "blue")
    answers = set()
    for images in ([], [red], [blue], [red, blue]):
        answer = generate(
            model, "Which color?", images=[*map(str, images)], max_new_tokens=NUM_TOKENS
        )
        assert answer == expected_answer(model, "Which color?", images)
        answers.add(answer)
    assert len(answers) > 1  # The pixels reach the model.


def test_chat_server_reads_images(model: Path, tmp_path: Path) -> None:
    red = make_picture(tmp_path / "red.png", "red")
    content = base64.b64encode(red.read_bytes()).decode()
    turn = {"role": "user", "content": "Which color?"}
    requests = [
        {"messages": [{**turn, "images": [f"data:image/png;base64,{content}"]}]},
        {"messages": [{**turn, "images": ["data:image/png;base64,AAAA"]}]},
    ]
    lines = [
        json.dumps({"id": number, "max_new_tokens": NUM_TOKENS, **request})
        for number, request in enumerate(requests)
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "generate", str(model), "--serve", "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("".join(f"{line}\n" for line in lines))
    process.stdin.flush()
    messages = []
    for line in process.stdout:
        messages.append(json.loads(line))
        if "error" in messages[-1]:
            break
    process.stdin.close()
    process.wait()
    process.stdout.close()
    assert messages[0]["ready"]["images"] is True
    text = "".join(message.get("token", "") for message in messages)
    assert text.strip() == expected_answer(model, "Which color?", [red])
    assert messages[-1]["id"] == 1
    assert messages[-1]["error"]["code"] == "image-not-read"
    assert "it is not an image" in messages[-1]["error"]["what"]


def test_images_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no image", encoding="utf-8")
    for image in (text, tmp_path / "missing.png"):
        arguments = ["generate", str(tmp_path), "Which?", "--image", str(image)]
        with raises_error(ConfigError, code="image-not-read", naming=str(image)):
            generate(tmp_path, "Which?", images=[str(image)])
        assert main(arguments) == 2


def test_language_model_refuses_images(tmp_path: Path) -> None:
    red = make_picture(tmp_path / "red.png", "red")
    with raises_error(ConfigError, code="model-without-images"):
        generate(_language_model(tmp_path / "model"), "Which?", images=[str(red)])


def _language_model(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from paceline.models.builtin import resolve_model

    source = str(resolve_model("builtin:qwen2-micro"))
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def write_chats(file: Path, images: list[list[Path]]) -> str:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<image>" * len(paths) + "Which color?"},
                {"role": "assistant", "content": "Red, I think."},
            ],
            "images": [*map(str, paths)],
        }
        for paths in images
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("mode", ["single", "zero3"])
def test_answers_at_evaluations_are_the_answers_of_the_model(
    model: Path, tmp_path: Path, mode: str
) -> None:
    red, blue = make_picture(tmp_path / "red.png", "red"), make_picture(tmp_path / "b.png", "blue")
    chats = [[red], [], [red, blue]]
    data = write_chats(tmp_path / "rows.jsonl", chats)
    run(
        f"model={model / 'model'}",
        f"dataset={data}",
        f"val_dataset={data}",
        f"output_dir={tmp_path}/run",
        "parallel.device=cpu",
        f"parallel.mode={mode}",
        f"parallel.num_gpus={1 if mode == 'single' else 2}",
        "per_device_train_batch_size=1",
        "train_args.max_steps=1",
        "train_args.learning_rate=0",
        "train_args.weight_decay=0",
        "evaluation.num_samples=3",
        f"evaluation.max_new_tokens={NUM_TOKENS}",
        "evaluation.metrics=exact_match",
    )
    samples = events(tmp_path / "run", "sample")[-1]["samples"]
    for sample, images in zip(samples, chats, strict=True):
        assert sample["reference"].strip() == "Red, I think."
        assert sample["text"].strip() == expected_answer(model, "Which color?", images)
    evaluation = events(tmp_path / "run", "eval")[-1]
    assert evaluation["answered_rows"] == 3
    assert evaluation["metrics"]["exact_match"] == 0
