"""The planned activations of vision-language models, against a forward pass with values."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from vision_models import make_model

from paceline.config.schema import Config
from paceline.distributed.torch_compat import storage_id
from paceline.planner.api import make_plan
from paceline.planner.model_profile import describe
from paceline.tasks import load_task


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("family", ["llava", "llava_next", "gemma3"])
def test_planned_activations_hold_the_activations(
    family: str, is_frozen: bool, tmp_path: Path
) -> None:
    """The plan counts a mask for padding, which a batch of equal lengths does not have."""
    config = make_config(tmp_path, family, is_frozen)
    profile = describe(config)
    assert profile.notes == ()
    stored_bytes, flops = run_with_values(config)
    assert stored_bytes <= profile.activation_bytes < 1.4 * stored_bytes
    assert flops <= profile.flops < 1.4 * flops


def make_config(folder: Path, family: str, is_frozen: bool) -> Config:
    make_model(folder / "model", family)
    Image.new("RGB", (36, 24), "red").save(folder / "red.png")
    turns = [
        {"role": "user", "content": "<image>Which color?"},
        {"role": "assistant", "content": "Red."},
    ]
    row = json.dumps({"messages": turns, "images": ["red.png"]})
    (folder / "rows.jsonl").write_text(f"{row}\n" * 4, encoding="utf-8")
    values = {
        "model": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "vision": {"freeze_vision_tower": is_frozen, "freeze_multi_modal_projector": is_frozen},
        "train_args": {"per_device_train_batch_size": 2, "max_length": 512, "precision": "32"},
    }
    return Config.model_validate(values)


def run_with_values(config: Config) -> tuple[int, int]:
    """Return the bytes that a forward pass stores for backward, and the operations of both."""
    task = load_task(config)
    task.prepared = task.prepare()
    model = task.build_model()
    task.setup(model)
    dataset, _ = task.build_datasets()
    batch = task.collate([dataset[0], dataset[1]])
    weights = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    stored: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_id(tensor) not in weights:
            stored[storage_id(tensor)] = tensor.untyped_storage()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = task.loss(model, batch)
        stored_bytes = sum(storage.nbytes() for storage in stored.values())
        loss.backward()
    return stored_bytes, counter.get_total_flops()


def test_plan_lists_the_modes_that_vision_towers_do_not_support(tmp_path: Path) -> None:
    config = make_config(tmp_path, "llava", is_frozen=True)
    report = make_plan(config, world_size=2, device="H100-SXM").as_dict()
    refused = {mode["mode"]: mode["reason"] for mode in report["modes"] if not mode["fits"]}
    assert set(refused) >= {"tensor", "pipeline"}
    assert "vision-language model" in refused["tensor"]
