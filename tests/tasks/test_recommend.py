"""`task: recommend`: the model, its tables, AUC over ranks, and reloading of a saved model."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from sklearn.metrics import roc_auc_score

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.loader_process import LoaderOptions
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.timing.progress import PROGRESS
from paceline.models.recommend import (
    ClickModel,
    Table,
    fill_rows,
    load_recommender,
    tables_without_values,
)
from paceline.parallel.registry import check_strategy
from paceline.strategies.ddp.strategy import DDPStrategy
from paceline.tasks import load_task
from paceline.tasks.base import Task
from paceline.train.evaluation import EvalResult, evaluate
from paceline.train.precision import Precision


def make_config(**keys: Any) -> Config:
    values = {
        "model": "builtin:dlrm",
        "task": "recommend",
        "dataset": "builtin:clicks#3000",
        "split_dataset_ratio": 0.2,
        **keys,
    }
    return Config.model_validate({"recommend": {"embedding_dim": 4}, **values})


def prepare_task(config: Config) -> Task:
    task = load_task(config)
    task.check()
    task.prepared = pickle.loads(pickle.dumps(task.prepare()))
    return task


def test_model_matches_formula_of_dlrm_paper(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ClickModel(3, (10, 5), 4, [6], [8])
    dense, ids = torch.randn(2, 3), [torch.tensor([9, 2, 2]), torch.tensor([0, 4])]
    starts = [torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2])]
    bottom = model.bottom(dense)
    first, second = model.tables[0].weight, model.tables[1].weight
    bags = [[first[9] + first[2], second[0]], [first[2], second[4]]]
    expected = []
    for row in range(2):
        vectors = [bottom[row], *bags[row]]
        dots = [vectors[0] @ vectors[1], vectors[0] @ vectors[2], vectors[1] @ vectors[2]]
        expected.append(model.top(torch.cat([*vectors, torch.stack(dots)]))[0])
    assert torch.allclose(model(dense, ids, starts), torch.stack(expected), atol=1e-6)


def test_table_rows_are_reproducible_for_any_range() -> None:
    torch.manual_seed(0)
    table = Table(9000, 3)
    next_values = torch.rand(3)
    torch.manual_seed(0)
    with tables_without_values():
        meta_table = Table(9000, 3)
    assert meta_table.weight.device.type == "meta"
    assert torch.equal(torch.rand(3), next_values)  # the random state advances equally
    assert float(table.weight.detach().abs().max()) <= 9000**-0.5
    assert abs(float(table.weight.detach().mean())) < 1e-3
    for start, end in ((0, 9000), (4090, 4100), (8999, 9000)):
        rows = torch.empty(end - start, 3)
        fill_rows(rows, meta_table.seed, 9000, start)
        assert torch.equal(rows, table.weight.detach()[start:end])


def test_training_learns_and_saved_model_reloads(tmp_path: Path) -> None:
    config = make_config()
    task = prepare_task(config)
    assert task.prepared is not None
    assert (task.prepared.num_train, task.prepared.num_eval) == (2400, 600)
    assert any("AUC of at most" in text for _, text in task.prepared.notices)
    torch.manual_seed(0)
    model = task.build_model()
    train, evaluation = task.build_datasets()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(train))
        for start in range(0, len(order), 100):
            batch = task.collate([train[int(index)] for index in order[start : start + 100]])
            loss = task.loss(model, batch) / task.count(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05

    task.save_model(model, tmp_path)
    reloaded, form = load_recommender(tmp_path)
    batch = task.collate([evaluation[row] for row in range(50)])
    inputs = (batch["dense"], batch["ids"], batch["starts"])
    assert torch.equal(reloaded(*inputs), model.eval()(*inputs))
    assert form["categorical"] == ["c1", "c2", "c3", "c4", "c5", "c6"]
    # The folder can be used as the model of another run with the same layout.
    second_task = prepare_task(make_config(model=str(tmp_path)))
    assert torch.equal(second_task.build_model()(*inputs), model(*inputs))
    with raises_error(ConfigError, code="mismatched-model"):
        prepare_task(make_config(model=str(tmp_path), recommend={"embedding_dim": 8})).build_model()


def evaluate_on_rank(world: Communicator, mode: str) -> tuple[EvalResult, list[float], list[float]]:
    config = make_config(evaluation={"mode": mode}, train_args={"per_device_eval_batch_size": 70})
    task = prepare_task(config)
    torch.manual_seed(0)
    model = task.build_model()
    strategy = DDPStrategy(config, world)
    strategy.setup(model)
    rows = task.build_datasets()[1]
    precision = Precision(config.train_args, world)
    options = LoaderOptions()
    result = evaluate(task, model, strategy, rows, config, precision, options, PROGRESS)
    batch = task.collate([rows[row] for row in range(len(rows))])
    with torch.no_grad():
        scores = model(batch["dense"], batch["ids"], batch["starts"])
    world.barrier()
    return result, batch["label"].tolist(), scores.tolist()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world_size", "mode"), [(1, "distributed"), (3, "distributed"), (2, "rank0")]
)
def test_auc_over_ranks_matches_full_dataset(world_size: int, mode: str) -> None:
    for result, labels, scores in run_ranks(evaluate_on_rank, world_size, mode):
        assert result.count == 600
        assert result.metrics["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-4)
        assert 0.8 < result.metrics["best_auc"] < 0.95


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"lora": {"enable": True}}, ("lora-with-task", "lora.enable")),
        ({"model": "builtin:small-cnn"}, ("not-a-click-model", "model")),
        ({"dataset": "log.csv"}, ("missing-sparse-features", "recommend.sparse_features")),
        ({"dataset": ["builtin:clicks", "builtin:clicks"]}, ("several-files", "")),
        (
            {"dataset": "log.csv", "recommend": {"sparse_features": ["label"]}},
            ("repeated-feature", ""),
        ),
        (
            {"dataset": "log.csv", "recommend": {"sparse_features": ["a"], "table_size": {"b": 3}}},
            ("unknown-feature", ""),
        ),
    ],
)
def test_rejects_invalid_settings(keys: dict[str, Any], error: tuple[str, str]) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        load_task(make_config(**keys)).check()


@pytest.mark.parametrize(
    ("mode", "dims"),
    [
        ("pipeline", ParallelDims()),
        ("tensor", ParallelDims(tensor=2)),
        ("hybrid", ParallelDims(data=2, tensor=2)),
        ("hybrid", ParallelDims(pipeline=2)),
    ],
)
def test_rejects_modes_that_divide_layers(mode: str, dims: ParallelDims) -> None:
    with pytest.raises(ConfigError) as caught:
        check_strategy(mode, make_config(), dims)
    assert "no sequence of layers to split" in caught.value.what
    check_strategy("hybrid", make_config(), ParallelDims(shard=2))


def test_warns_about_settings_without_effect() -> None:
    task = prepare_task(make_config(train_args={"packing": True}))
    assert task.prepared is not None
    assert (
        "warning",
        "`train_args.packing` has no effect on `task: recommend`",
    ) in task.prepared.notices
