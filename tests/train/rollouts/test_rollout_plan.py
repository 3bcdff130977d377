"""The memory and time that a plan names for completions, compared with real runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from rollout_runs import train_on_rollouts, write_inputs

from paceline.planner.api import PlanReport, plan
from paceline.planner.estimate import ModeReport

pytestmark = pytest.mark.slow

#: A callback that measures the memory of the second step's rollout: everything that exists at its
#: first forward pass, and the peak of what is allocated from there to the update.
MEASURE = """
import gc, json, os
import torch
import paceline
from paceline.explain.allocations import LiveStorages


def resident():
    gc.collect()  # of what only cycles still hold
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    sizes = {}
    for tensor in found:
        try:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # without memory of its own, or freed
            continue
    return sum(size for address, size in sizes.items() if address)


class Measure(paceline.Callback):
    def on_train_begin(self, info, state):
        self.folder, self.rank, self.live, self.step = info.output_dir, info.rank, None, 0
        info.model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def on_step_begin(self, state):
        self.step = state.step

    def before_forward(self, model, inputs, named):
        generates = named.get("use_cache", False)
        if self.step == 1 and self.live is None and generates:
            self.held = resident()
            self.live = LiveStorages()
            self.live.__enter__()
        elif self.step == 1 and self.live is not None and not generates:
            self.live.__exit__(None, None, None)
            figures = {"held": self.held, "allocated": self.live.peak_bytes}
            path = os.path.join(self.folder, f"memory-{self.rank}.json")
            with open(path, "w") as file:
                json.dump(figures, file)
            self.step = -1
"""
#: Mode, number of ranks, and further settings.
CASES: dict[str, tuple[str, int, dict[str, str]]] = {
    "single": ("single", 1, {}),
    "ddp-bf16": ("ddp", 2, {"train_args.precision": "bf16-mixed"}),
    "zero1": ("zero1", 2, {"grpo.beta": "0.1"}),
    "zero2": ("zero2", 2, {"grpo.beta": "0.1", "grpo.top_k": "20"}),
    "zero3": ("zero3", 2, {"lora.enable": "true"}),
}
SETTINGS = {
    "grpo.num_generations": "8",
    "grpo.max_completion_length": "100",
    "train_args.global_batch_size": "16",
    "max_length": "256",
    "train_args.precision": "32",
}


def plan_of(folder: Path, world_size: int, settings: dict[str, str]) -> PlanReport:
    reward = {"function": f"{folder / 'own_rewards.py'}:vowels"}
    config: dict[str, Any] = {
        "model": "builtin:qwen2-micro",
        "task": "grpo",
        "dataset": str(folder / "prompts.jsonl"),
        "rewards": [reward],
        "output_dir": str(folder / "plan"),
        "parallel.device": "cpu",
    }
    return plan({**config, **settings}, world_size=world_size, uses_history=False)


def rollout(mode: ModeReport) -> int:
    return mode["memory_bytes"]["rollout"] or 0


def weights(mode: ModeReport) -> int:
    return mode["memory_bytes"]["parameters"] or 0


def seconds(value: float | None) -> float:
    assert value
    return value


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_planned_memory_is_that_of_a_rollout(case: str, tmp_path: Path) -> None:
    mode, world_size, changes = CASES[case]
    write_inputs(tmp_path)
    (tmp_path / "measure.py").write_text(MEASURE)
    settings = {**SETTINGS, **changes, "parallel.mode": mode}
    train_on_rollouts(
        tmp_path,
        "run",
        *(f"{key}={value}" for key, value in settings.items()),
        f"parallel.num_gpus={world_size}",
        "max_steps=2",
        f"callbacks=[{tmp_path / 'measure.py'}:Measure]",
    )
    report = plan_of(tmp_path, world_size, settings)
    (estimate,) = (each for each in report["modes"] if each["mode"] == mode)
    assert (estimate["memory_bytes"]["total"] or 0) >= rollout(estimate)
    for rank in range(world_size):
        figures = json.loads((tmp_path / f"run/memory-{rank}.json").read_text())
        assert rollout(estimate) == pytest.approx(figures["held"] + figures["allocated"], rel=0.05)


def test_a_plan_counts_completions_and_the_reference_model(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    settings = {**SETTINGS, "grpo.num_generations": "4", "train_args.global_batch_size": "8"}
    plain, with_reference = (
        plan_of(tmp_path, 2, {**settings, "grpo.beta": beta}) for beta in ("0", "0.1")
    )
    for before, after in zip(plain["modes"], with_reference["modes"], strict=True):
        if not before["fits"]:
            assert before["reason"]
            assert before["memory_bytes"]["rollout"] is None
            continue
        copies = {"single": 1, "ddp": 1}.get(before["mode"], 2)
        reference = 4 * plain["parameters"] / copies
        assert weights(after) - weights(before) == pytest.approx(reference, rel=0.01)
        assert rollout(after) - rollout(before) == pytest.approx(reference, rel=0.01)
        assert seconds(before["rollout_time_s"]) < seconds(before["step_time_s"])
    possible = [each["mode"] for each in plain["modes"] if each["fits"]]
    assert possible == ["single", "ddp", "zero1", "zero2", "zero3"]
    assert plain["chosen"] in possible
    assert any("estimated" in note for note in plain["notes"])
    longer = plan_of(tmp_path, 2, {**settings, "grpo.max_completion_length": "200"})
    assert seconds(longer["run"]["rollout_time_s"]) > seconds(plain["run"]["rollout_time_s"])


def test_a_plan_refuses_batches_that_divide_groups(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    report = plan_of(tmp_path, 3, {**SETTINGS, "train_args.global_batch_size": "12"})
    assert report["chosen"] is None
    assert all("is not a multiple" in each["reason"] for each in report["modes"][:3])
