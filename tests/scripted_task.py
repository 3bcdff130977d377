"""A task whose weight counts the steps and whose evaluations are given by ``task_args.losses``:
``{step: loss}``; and functions that run it."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config.load import Loaded, load_config
from paceline.core.processes import temporary_environment
from paceline.core.stop import StopFlag
from paceline.distributed.devices import Devices
from paceline.distributed.environment import RankEnv
from paceline.launch.passes.draft import Draft, Host
from paceline.launch.passes.layout import choose_layout
from paceline.launch.plan import make_spec, plan
from paceline.train.setup import run_rank


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ScriptedTask(paceline.Task):
    def build_datasets(self):
        has_evaluation = bool(self.config.task_args["losses"])
        evaluation = TensorDataset(torch.ones(4, 1)) if has_evaluation else None
        return TensorDataset(torch.ones(64, 1)), evaluation

    def build_model(self):
        return Counting()

    def loss(self, model, batch):
        return -model(batch[0]).sum()

    def evaluate(self, model, batch):
        outputs = model(batch[0])
        loss = self.config.task_args["losses"].get(str(round(outputs[0].item())), 9.0)
        total = torch.tensor(loss * len(outputs))
        return {"loss": total, "score": -total}


def config_of(folder: Path, losses: dict[int, float], **args: Any) -> dict[str, Any]:
    """Return the config of a run of 8 steps in ``folder`` that evaluates every 2 steps. Arguments
    with dots written as ``__`` override it."""
    values = {
        "model": "counting",
        "task": f"{__file__}:ScriptedTask",
        "dataset": "scripted",
        "output_dir": str(folder),
        "parallel.device": "cpu",
        "task_args": {"losses": {str(step): loss for step, loss in losses.items()}},
        "train_args.max_steps": 8,
        "train_args.eval_steps": 2,
        "train_args.save_steps": 4,
        "train_args.optim": "sgd",
        "train_args.momentum": 0.0,
        "train_args.learning_rate": 1.0,
        "train_args.lr_scheduler_type": "constant",
        "train_args.max_grad_norm": 0.0,
    }
    return values | {key.replace("__", "."): value for key, value in args.items()}


def prepare(config: dict[str, Any], num_ranks: int = 1) -> Draft:
    return plan(draft_on_cpu(load_config(None, config), num_ranks), first=choose_layout)


def draft_on_cpu(loaded: Loaded, num_ranks: int) -> Draft:
    """Return the draft of a run whose ranks the test starts itself."""
    env, devices = RankEnv(0, num_ranks, 0, num_ranks), Devices("cpu", num_ranks)
    return Draft(loaded, time.time(), outer=env, host=Host(devices))


def run_here(config: dict[str, Any], stop: StopFlag | None = None) -> dict[str, Any]:
    """Run on one rank, in this process, and return the report."""
    with temporary_environment({"DS_ACCELERATOR": "cpu"}):  # a run sets it
        run_rank(make_spec(prepare(config)), RankEnv(), stop or StopFlag())
    return json.loads((Path(config["output_dir"]) / "report.json").read_text())


def run_on_ranks(config: dict[str, Any], num_ranks: int) -> None:
    """Run on several Gloo ranks, in processes of their own."""
    run_ranks(_run, num_ranks, make_spec(prepare(config, num_ranks)), init_process_group=False)


def _run(env: RankEnv, spec: Any) -> None:
    run_rank(spec, env, StopFlag())


def final_weight(folder: Path) -> float:
    from safetensors.torch import load_file

    return float(load_file(folder / "model" / "model.safetensors")["weight"])
