"""Runs on rows with weights of their loss."""

import json
from pathlib import Path

import pytest
from commands import events, losses, run

pytestmark = [pytest.mark.slow, pytest.mark.soak]

#: name → (ranks, replicas, arguments)
MODES = {
    "ddp": (2, 2, ("parallel.mode=ddp",)),
    "zero1": (2, 2, ("parallel.mode=zero1",)),
    "zero3": (2, 2, ("parallel.mode=zero3",)),
    "deepspeed": (2, 2, ("parallel.mode=deepspeed", "parallel.deepspeed_stage=2")),
    "tensor": (2, 1, ("parallel.mode=tensor",)),
    "pipeline": (2, 1, ("parallel.mode=pipeline",)),
    "hybrid": (4, 2, ("parallel.shard=2", "parallel.tensor=2")),
}


def train(folder: Path, weights: list[float], mode: str, *args: str) -> list[float]:
    rows = [
        {"prompt": f"What is {n}?", "completion": f"It is {'very ' * (n % 7)}{n}.", "w": weight}
        for n, weight in enumerate(weights)
    ]
    file = folder.parent / f"{folder.name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(file), "columns": {"loss_weight": "w"}}
    ranks, replicas, mode_args = MODES.get(mode, (1, 1, ("parallel.mode=single",)))
    run(
        "model=builtin:qwen2-micro", f"dataset={json.dumps(source)}", "parallel.device=cpu",
        f"output_dir={folder}", "per_device_train_batch_size=4", "max_length=64", "max_steps=4",
        "lr_scheduler_type=constant", "learning_rate=1e-2", f"parallel.num_gpus={ranks}",
        f"gradient_accumulation_steps={2 // replicas}", *mode_args, *args,
    )  # fmt: skip
    return losses(folder)


#: A step's weights sum to less than 1 in places, so that a denominator of at least 1 would show.
UNEVEN = [0.002 * (n % 5) for n in range(64)]


@pytest.mark.parametrize("args", [(), ("packing_strategy=bfd",)], ids=["rows", "packed-rows"])
@pytest.mark.parametrize("mode", MODES)
def test_strategies_agree(mode: str, args: tuple[str, ...], tmp_path: Path) -> None:
    args = (*args, "split_dataset_ratio=8", "eval_steps=2", "evaluation.num_samples=0")
    expected = train(tmp_path / "alone", UNEVEN, "single", *args)
    assert train(tmp_path / "run", UNEVEN, mode, *args) == pytest.approx(expected, rel=2e-4)
    first, second = (
        [event["loss"] for event in events(tmp_path / name, "eval")] for name in ("alone", "run")
    )
    assert first == pytest.approx(second, rel=2e-4)


@pytest.mark.parametrize("args", [(), ("packing=false",), ("streaming=true",)])
def test_equal_weights_have_no_effect_and_others_do(args: tuple[str, ...], tmp_path: Path) -> None:
    by_weight = [
        train(tmp_path / str(number), weights, "ddp", *args)
        for number, weights in enumerate(([1.0] * 64, [0.25] * 64, UNEVEN))
    ]
    assert by_weight[0] == pytest.approx(by_weight[1], rel=1e-6)
    assert by_weight[0] != pytest.approx(by_weight[2], rel=1e-2)
