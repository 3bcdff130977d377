"""Runs in which ranks divide the experts: checkpoints move between layouts, and the report has the
size."""

from pathlib import Path

import pytest
from commands import events, report, run
from families import make_model

pytestmark = [pytest.mark.slow, pytest.mark.soak]

ARGS = (
    "dataset=builtin:python-docs#240",
    "parallel.device=cpu",
    "max_length=64",
    "per_device_train_batch_size=2",
    "train_args.logging_steps=1",
    "train_args.lr_scheduler_type=constant",
    "train_args.learning_rate=1e-3",
    "train_args.max_grad_norm=0.5",
    "train_args.router_aux_loss_coef=0.02",
    "evaluation.num_samples=0",
)
SINGLE = ("parallel.mode=single", "train_args.gradient_accumulation_steps=4")
DATA = ("parallel.expert=2", "parallel.num_gpus=2", "train_args.gradient_accumulation_steps=2")
SHARDED = (*DATA, "parallel.shard=2")
#: No expert is trained.
OF_ATTENTION = ("lora.enable=true", "lora.target_modules=q_proj,v_proj", "lora.dropout=0")
ADAPTERS = ("lora.enable=true", "lora.target_modules=q_proj,w1,w2,w3", "lora.dropout=0")


@pytest.mark.parametrize(
    ("layouts", "more"),
    [
        ((DATA, SINGLE, SHARDED), ()),
        ((SHARDED, DATA, SINGLE), ()),
        ((DATA, SHARDED, SINGLE), ADAPTERS),
        ((DATA, SHARDED, SINGLE), OF_ATTENTION),
    ],
    ids=["data", "shard", "adapters", "adapters of attention"],
)
def test_checkpoints_move_between_layouts(
    layouts: tuple[tuple[str, ...], ...], more: tuple[str, ...], tmp_path: Path
) -> None:
    args = (f"model={make_model('mixtral', tmp_path)}", *ARGS, *more)
    run(*args, f"output_dir={tmp_path}/whole", *SINGLE, "train_args.max_steps=6")
    for number, layout in enumerate(layouts):
        steps = f"train_args.max_steps={2 * number + 2}"
        run(*args, f"output_dir={tmp_path}/parts", *layout, steps, "--allow-config-change")
    whole, parts = (
        {event["step"]: event for event in events(tmp_path / name, "step")}
        for name in ("whole", "parts")
    )
    assert list(whole) == list(parts) == [1, 2, 3, 4, 5, 6]
    for step, event in whole.items():
        assert parts[step]["loss"] == pytest.approx(event["loss"], rel=1e-6)
        assert parts[step]["grad_norm"] == pytest.approx(event["grad_norm"], rel=1e-5)
        assert parts[step]["experts"]["aux_loss"] == pytest.approx(
            event["experts"]["aux_loss"], rel=1e-6
        )
    tokens = [[sum(each["tokens"]) for each in report(tmp_path / name)["experts"]["layers"]]
              for name in ("whole", "parts")]  # fmt: skip
    assert tokens[0] == tokens[1]
    sizes = {path.name for path in (tmp_path / "whole" / "model").iterdir()}
    assert sizes == {path.name for path in (tmp_path / "parts" / "model").iterdir()}


def test_report_has_the_size_and_the_traffic(tmp_path: Path) -> None:
    model = f"model={make_model('qwen3_moe', tmp_path)}"
    run(model, f"output_dir={tmp_path}/run", *ARGS, *DATA, "train_args.max_steps=3")
    figures = report(tmp_path / "run")
    assert figures["experts"]["size"] == 2
    assert figures["strategy"] == "hybrid"
    (*_, last) = events(tmp_path / "run", "step")
    assert last["traffic"]["all_to_all"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        (*OF_ATTENTION, "train_args.gradient_accumulation_steps=2"),
        ("lora.enable=true", "lora.target_modules=w1,w2,w3", "lora.dropout=0"),
        ("train_args.trainable=[experts]",),
    ],
    ids=["attention", "adapters", "experts"],
)
def test_traffic_of_partly_frozen_models_is_predicted(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    model = f"model={make_model('mixtral', tmp_path, intermediate_size=1024)}"
    modes = ("--world-size", "4", "--modes", "shard4-expert2", "--steps", "3")
    process = run(model, *ARGS, *settings, *modes, verb="verify")
    assert "1 of 1 modes agree" in process.stdout
