"""Runs of text classifiers and vision-language models: `paceline verify` certifies the strategies
that they support, and a resumed run ends with the same bits."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import losses, run
from PIL import Image
from torchvision_server import TorchvisionServer, torchvision_environment
from vision_models import TINY, make_model

pytestmark = [pytest.mark.slow, pytest.mark.soak]

#: One model of each kind of vision tower; :data:`ALL` takes long.
KINDS = ("text-classifier", "llava", "idefics3", "gemma3", "qwen2_5_vl")
ALL = ("text-classifier", *TINY)
MODES = "single,ddp,zero1,zero2,zero3,deepspeed"
#: With a higher learning rate, AdamW amplifies the rounding of gradients that are zero in exact
#: arithmetic (those of the biases of keys), and the losses on these few rows differ by 2e-6.
RUN = (
    "parallel.device=cpu",
    "per_device_train_batch_size=4",
    "max_length=200",
    "lr_scheduler_type=constant",
    "learning_rate=1e-4",
)


def write_texts(folder: Path) -> list[str]:
    rows = [{"text": f"row {n} " + "word " * (n % 9), "label": "ab"[n % 2]} for n in range(48)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "model=builtin:qwen2-micro", "task=classify", f"dataset={folder / 'texts.jsonl'}",
    ]  # fmt: skip


def write_images(folder: Path, family: str) -> list[str]:
    """Write a model and chats, some of them without images, so that some ranks have none."""
    model = folder / family
    if TINY[family].needs_torchvision:
        server = TorchvisionServer()
        server.call(make_model, model, family)
        server.stop()
    else:
        make_model(model, family)
    rows = []
    for number in range(48):
        pixels = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        images = [f"{number}.png"] if number % 5 < 2 else []
        question = {"role": "user", "content": "<image>" * len(images) + f"What is {number}?"}
        answer = {"role": "assistant", "content": f"It is {number % 7}."}
        rows.append({"messages": [question, answer], "images": images})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model={model}", f"dataset={folder / 'chats.jsonl'}", "vision.freeze_vision_tower=false",
        "vision.freeze_multi_modal_projector=false",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the model, the task and the data."""
    folder = tmp_path_factory.mktemp("data")
    if request.param == "text-classifier":
        return write_texts(folder)
    return write_images(folder, request.param)


def run_kind(settings: list[str], *args: str, verb: str = "sft") -> str:
    """Run a command, with torchvision if the model needs it, and return what it prints."""
    family = Path(settings[0]).name
    process: dict[str, Any] = {}
    if family in TINY and TINY[family].needs_torchvision:
        process = {"env": torchvision_environment(), "stdin": subprocess.DEVNULL}
    return run(*settings, *RUN, *args, verb=verb, **process).stdout


@pytest.mark.parametrize("settings", KINDS, indirect=True)
def test_verify_certifies_the_strategies(settings: list[str], tmp_path: Path) -> None:
    args = ("--world-size", "2", "--modes", MODES, "--output", str(tmp_path / "out"), "--json")
    certificate = json.loads(run_kind(settings, *args, verb="verify"))
    assert certificate["ok"]
    results = {result["mode"]: result["ok"] for result in certificate["modes"]}
    assert set(MODES.split(",")) - {"single", "deepspeed"} <= results.keys()
    assert all(results.values())


@pytest.mark.parametrize("settings", ALL, indirect=True)
def test_resumed_run_ends_with_the_same_bits(settings: list[str], tmp_path: Path) -> None:
    def train(folder: str, mode: str, steps: int) -> Path:
        ranks = 1 if mode == "single" else 2
        run_kind(
            settings, f"output_dir={tmp_path / folder}", f"parallel.mode={mode}",
            f"parallel.num_gpus={ranks}", f"gradient_accumulation_steps={2 // ranks}",
            f"max_steps={steps}", "--allow-config-change",
        )  # fmt: skip
        return tmp_path / folder

    def digest(folder: Path) -> str:
        checkpoint = str(folder / "checkpoints" / "step-00000004")
        return json.loads(run(checkpoint, "--json", verb="inspect").stdout)["digest"]

    once = train("once", "single", 4)
    for step in (2, 4):
        again = train("again", "single", step)
        train("other", "zero3" if step == 2 else "ddp", step)
    assert digest(once) == digest(again)
    assert losses(tmp_path / "other") == pytest.approx(losses(once), rel=2e-4)


@pytest.mark.parametrize("settings", ALL, indirect=True)
def test_two_ranks_train_as_one(settings: list[str], tmp_path: Path) -> None:
    for ranks in (1, 2):
        run_kind(
            settings, f"output_dir={tmp_path / str(ranks)}", f"parallel.num_gpus={ranks}",
            f"gradient_accumulation_steps={2 // ranks}", "max_steps=3",
        )  # fmt: skip
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-6)


def test_two_ranks_train_rows_of_whole_samples_as_one(tmp_path: Path) -> None:
    settings = write_images(tmp_path, "llava")
    for ranks in (1, 2):
        run_kind(
            settings, f"output_dir={tmp_path / str(ranks)}", f"parallel.num_gpus={ranks}",
            f"gradient_accumulation_steps={2 // ranks}", "max_steps=3", "packing=true",
            "packing_strategy=bfd",
        )  # fmt: skip
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-6)


def test_a_resume_with_another_image_backend_is_refused(tmp_path: Path) -> None:
    settings = [*write_images(tmp_path, "llava"), *RUN, f"output_dir={tmp_path / 'run'}"]
    run(*settings, "max_steps=1", env=torchvision_environment(), stdin=subprocess.DEVNULL)
    result = run(*settings, "max_steps=2", "--allow-config-change", expect=2)
    assert "[changed-image-backend]" in result.stderr
