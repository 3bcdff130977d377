"""Test that each recipe in `examples/recipes/` trains, with tiny stand-ins for the model, the data
and the devices, and that the guide has the predictions of the planner."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from commands import report, run

from paceline.config.load import load_config

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"

_LANGUAGE = (
    "model=builtin:qwen2-micro",
    "max_length=64",
    "max_steps=2",
    "gradient_accumulation_steps=1",
    "parallel.device=cpu",
    "logging_steps=1",
)
_TEXTS = (*_LANGUAGE, "dataset=builtin:python-docs#64")
_ON_2_RANKS = (*_TEXTS, "parallel.num_gpus=2")
#: Recipe → overrides, and the strategy that the recipe must still use.
STAND_INS = {
    "qwen-7b-lora-4xa10": (_ON_2_RANKS, "ddp"),
    "full-1.5b-24gb": (_TEXTS, "single"),
    "lora-70b-8x80gb": (_ON_2_RANKS, "zero3"),
    "two-boxes-gigabit": (
        (*_ON_2_RANKS, "nnodes=1", "parallel.rdzv_endpoint=null", "local_sgd.sync_every=2"),
        "diloco",
    ),
    "cpu-laptop": (_ON_2_RANKS, "ddp"),
    "image-classifier": (
        ("dataset=builtin:digits", "classify.image_size=8", "max_steps=2", "parallel.device=cpu",
         "parallel.num_gpus=1", "dataloader_num_workers=1"),
        "single",
    ),
    "click-model-large-table": (
        ("recommend.table_size={user: 100, item: 10}", "max_steps=2",
         "per_device_train_batch_size=32"),
        "parameter_server",
    ),
    "continued-pretraining": (
        (*_LANGUAGE, "dataset=builtin:python-source#4", "parallel.num_gpus=2"), "zero1",
    ),
}  # fmt: skip


def test_each_recipe_has_a_stand_in() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(STAND_INS)
    for name in STAND_INS:
        load_config(RECIPES / f"{name}.yaml")
    page = (ROOT / "docs/how-to/recipes.md").read_text(encoding="utf-8")
    # The job array has a test of its own, which needs Slurm.
    for name in (*STAND_INS, "slurm-lora-ranks"):
        assert page.count(f"| `{name}` |") == 2  # what it is for, and what is predicted
    # Measured, not predicted, and trained by tests/tasks/grpo/test_grpo_recipe.py.
    assert page.count("| `grpo-letters` |") == 1


@pytest.mark.soak
@pytest.mark.parametrize("name", STAND_INS)
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    overrides, strategy = STAND_INS[name]
    if name == "click-model-large-table":
        _predict_program().write_clicks(tmp_path / "clicks.csv")
    run(str(RECIPES / f"{name}.yaml"), *overrides, f"output_dir={tmp_path / 'run'}", cwd=tmp_path)
    result = report(tmp_path / "run")
    assert result["status"] == "done"
    assert result["strategy"] == strategy
    assert result["steps"] == 2
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.soak
def test_predictions_in_the_guide_are_current() -> None:
    page = (ROOT / "docs/how-to/recipes.md").read_text(encoding="utf-8")
    assert _predict_program().table() in page, (
        "run python examples/recipes/predict.py --write docs/how-to/recipes.md"
    )


def _predict_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predict", RECIPES / "predict.py")
    assert spec is not None
    assert spec.loader is not None
    predict = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(predict)
    return predict
