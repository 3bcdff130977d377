"""The sums of a global batch of one micro-batch are computed without a pass of their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build_model, make_model

from paceline.config.schema import Config
from paceline.data.loader import MicroBatch
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.models.head.router_loss import is_deterministic
from paceline.tasks.language import LanguageTask
from paceline.train.precision import Precision
from paceline.train.totals import add_totals


def make_task(folder: Path) -> tuple[LanguageTask, Any]:
    args = {"router_aux_loss_coef": 0.5, "max_length": 64}
    config = Config(
        model=str(make_model("mixtral", folder)), dataset="builtin:python-docs#8", train_args=args
    )
    task = LanguageTask(config)
    task.prepared = task.prepare()
    model = task.build_model()
    task.setup(model)
    return task, model.train()


def components(task: LanguageTask, model: Any) -> Any:
    """Return the components of one rank whose strategy only runs the model."""
    world = Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))
    strategy = SimpleNamespace(
        world=world,
        count_group=world,
        reports_loss=True,
        evaluate=lambda run, each: run(each),
    )
    return SimpleNamespace(
        task=task,
        model=model,
        strategy=strategy,
        precision=Precision(task.config.train_args, world),
    )


def gradients(task: LanguageTask, model: Any, batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = task.loss(model, batch)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def test_one_micro_batch_has_the_same_gradients_in_one_pass(tmp_path: Path) -> None:
    task, model = make_task(tmp_path)
    train, _ = task.build_datasets()
    samples = [train[number] for number in range(4)]
    passes: list[Any] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = []
    for sums_own_totals in (True, False):
        batch = MicroBatch(task.collate(samples), len(samples))
        assert task.sums_own_totals
        parts = components(task, model)
        parts.task.sums_own_totals = sums_own_totals
        add_totals(parts, [batch])
        assert bool(batch.data["totals"]) != sums_own_totals
        found.append(gradients(task, model, batch.data))
        task.sums_own_totals = True
    assert len(passes) == 1 + 2
    assert len(found[0]) > 5
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    two_batches = [
        MicroBatch(task.collate(samples[:2]), 2),
        MicroBatch(task.collate(samples[2:]), 2),
    ]
    add_totals(components(task, model), two_batches)
    assert all(batch.data["totals"] for batch in two_batches)


@pytest.mark.parametrize(
    ("numbers", "args"),
    [
        ({"attention_dropout": 0.1}, {}),
        ({"router_jitter_noise": 0.1}, {}),
        ({}, {"torch_compile": True}),
    ],
)
def test_passes_that_may_differ(numbers: dict[str, float], args: dict[str, bool]) -> None:
    plain, changed = (Config(model="m", dataset="d", train_args=each) for each in ({}, args))
    assert is_deterministic(build_model("mixtral"), plain)
    assert not is_deterministic(build_model("mixtral", **numbers), changed)


def test_dropout_of_adapters_makes_passes_differ() -> None:
    model = build_model("mixtral")
    model.model.layers[0].self_attn.q_proj.lora_dropout = torch.nn.Dropout(0.1)
    assert not is_deterministic(model, Config(model="m", dataset="d"))
