"""Runs of text classifiers and vision-language models: `paceline verify` certifies the strategies
that they support, and a resumed run ends with the same bits."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import losses, run
from PIL import Image
from vision_models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.soak]

KINDS = ("text-classifier", "llava", "idefics3")
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
    model = make_model(folder / family, family)
    rows = []
    for number in range(48):
        pixels = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        question = {"role": "user", "content": f"<image>What is {number}?"}
        answer = {"role": "assistant", "content": f"It is {number % 7}."}
        rows.append({"messages": [question, answer], "images": [f"{number}.png"]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model={model}", f"dataset={folder / 'chats.jsonl'}", "vision.freeze_vision_tower=false",
        "vision.freeze_multi_modal_projector=false",
    ]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the model, the task and the data."""
    folder = tmp_path_factory.mktemp("data")
    if request.param == "text-classifier":
        return write_texts(folder)
    return write_images(folder, request.param)


def test_verify_certifies_the_strategies(settings: list[str], tmp_path: Path) -> None:
    args = ("--world-size", "2", "--modes", MODES, "--output", str(tmp_path / "out"), "--json")
    certificate = json.loads(run(*settings, *RUN, *args, verb="verify").stdout)
    assert certificate["ok"]
    results = {result["mode"]: result["ok"] for result in certificate["modes"]}
    assert set(MODES.split(",")) - {"single", "deepspeed"} <= results.keys()
    assert all(results.values())


def test_resumed_run_ends_with_the_same_bits(settings: list[str], tmp_path: Path) -> None:
    def train(folder: str, mode: str, steps: int) -> Path:
        ranks = 1 if mode == "single" else 2
        run(
            *settings, *RUN, f"output_dir={tmp_path / folder}", f"parallel.mode={mode}",
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
