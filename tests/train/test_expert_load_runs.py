"""Runs report the same tokens of the experts in every mode, and over all attempts."""

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
    "train_args.logging_steps=2",
)
TWO_BATCHES = "train_args.gradient_accumulation_steps=2"
FOUR_BATCHES = "train_args.gradient_accumulation_steps=4"


def test_modes_report_the_same_tokens(tmp_path: Path) -> None:
    model = f"model={make_model('mixtral', tmp_path)}"
    layouts = {
        "single": ("parallel.mode=single", FOUR_BATCHES),
        "ddp": ("parallel.mode=ddp", TWO_BATCHES, "train_args.gradient_checkpointing=full"),
        "dp": ("parallel.mode=dp", "parallel.num_gpus=2", TWO_BATCHES),
        "zero3": ("parallel.mode=zero3", TWO_BATCHES),
        "tensor": ("parallel.mode=tensor", "parallel.tensor=2", FOUR_BATCHES),
        "pipeline": ("parallel.mode=pipeline", "parallel.pipeline=2", FOUR_BATCHES),
    }
    figures = {}
    for name, args in layouts.items():
        packing = f"train_args.packing={str(name == 'zero3').lower()}"
        run(model, *ARGS, *args, packing, "train_args.max_steps=4", f"output_dir={tmp_path / name}")
        figures[name] = report(tmp_path / name)["experts"]
    tokens = 2 * report(tmp_path / "single")["train_tokens"]
    assert [sum(layer["tokens"]) for layer in figures["single"]["layers"]] == [tokens, tokens]
    assert figures == dict.fromkeys(layouts, figures["single"])
    (step, *_) = events(tmp_path / "ddp", "step")
    assert step["experts"]["aux_loss"] is None
    html = (tmp_path / "ddp" / "report.html").read_text()
    assert "model.layers.1.mlp.experts" in html
    assert "Load of the experts" in html


def test_resumed_run_counts_all_attempts(tmp_path: Path) -> None:
    coefficient = "train_args.router_aux_loss_coef=0.02"
    args = (f"model={make_model('mixtral', tmp_path)}", *ARGS, "parallel.num_gpus=2", coefficient)
    run(*args, "train_args.max_steps=4", f"output_dir={tmp_path}/whole")
    for steps in (2, 4):
        limit = f"train_args.max_steps={steps}"
        run(*args, f"output_dir={tmp_path}/parts", limit, "train_args.lr_scheduler_type=constant",
              "--allow-config-change")  # fmt: skip
    whole, parts = report(tmp_path / "whole"), report(tmp_path / "parts")
    assert parts["resumed_from_step"] == 2
    assert parts["experts"]["max_over_mean"] == pytest.approx(
        whole["experts"]["max_over_mean"], rel=0.02
    )
    assert "from_step" not in parts["experts"]
    for layer in parts["experts"]["layers"]:
        assert sum(layer["tokens"]) == 2 * parts["train_tokens"]
    losses = [step["experts"]["aux_loss"] for step in events(tmp_path / "whole", "step")]
    assert losses == pytest.approx([2.0] * len(losses), abs=0.05)
