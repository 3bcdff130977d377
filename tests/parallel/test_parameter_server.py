"""`parameter_server`: the steps of ddp, tables in parts, checkpoints for any layout, and losses of
ranks that are named."""

import json
from pathlib import Path

import pytest
import torch
from commands import run
from ranks import run_ranks
from serving import make_config
from states import assemble, copied
from torch.distributed import rpc
from torch.nn import functional

from paceline.checkpoint.store import CheckpointReader
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.recommend import ClickModel, load_recommender
from paceline.models.shape.outline import outline
from paceline.parallel.base import make_strategy
from paceline.parallel.cost import Workload
from paceline.parallel.parameter_server.asynchronous import _STORE
from paceline.parallel.protocols import (
    close_servers,
    has_data,
    model_init_context,
    replica_of,
    report_metrics,
)
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes, state_shards
from paceline.train.optimizer import build_optimizer, matrices_of

TABLES, DIM, ROWS = (5000, 7, 2), 4, 24


def batch_of(step):
    """A global batch: ids from a power law, so that ranks share rows; the last table's ids come in
    bags, some empty."""
    generator = torch.Generator().manual_seed(step)
    ids = [((torch.rand(ROWS, generator=generator) ** 6) * size).long() for size in TABLES]
    return (
        torch.randn(ROWS, 2, generator=generator),
        ids,
        torch.randint(0, 2, (ROWS,), generator=generator).float(),
    )


def share_of(batch, rows):
    dense, ids, labels = batch
    starts = [torch.arange(len(rows) + 1) for _ in ids]
    return dense[rows], [one[rows] for one in ids], starts, labels[rows]


def train(
    world,
    mode,
    optimizer,
    workers,
    servers=1,
    steps=6,
    source=None,
    first=0,
    watch=(),
    rhythm="sync",
    dense="auto",
):
    """Losses of the global batch, and what this rank writes after each step of ``watch``."""
    world = Communicator(world.env, world.device, ParallelDims(data=workers))
    config = make_config(mode, optimizer, servers, rhythm, dense)
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(0)
    with model_init_context(strategy):
        model = ClickModel(2, TABLES, DIM, [6], [8])
    shape, matrices = outline(model, config), matrices_of(model)
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, 0.05, named, matrices)
    )
    if source is not None:
        load_state(strategy, source)
    losses, norms, parts = [], [], {}
    for step in range(first, first + steps):
        batch = batch_of(step)
        seen = []

        def micro_step(number, module, batch=batch, seen=seen):
            each = ROWS // (2 * workers)
            begin = (replica_of(strategy)[0] * 2 + number) * each
            dense, ids, starts, labels = share_of(batch, torch.arange(begin, begin + each))
            loss = (
                functional.binary_cross_entropy_with_logits(
                    module(dense, ids, starts), labels, reduction="sum"
                )
                / ROWS
            )
            seen.append(float(loss.detach()))
            # as the engine does where replicas count alone
            return loss if rhythm == "sync" else loss / world.size

        strategy.forward_backward(micro_step, 2 if has_data(strategy) else 0)
        norms.append(float(strategy.clip_grad_norm(0.2)))
        assert strategy.optimizer_step(lambda one: (one.step(), True)[1])
        losses.append(world.sum(sum(seen))[0])
        if step in watch:
            parts[step] = copied(state_shards(strategy))
    result = {
        "losses": losses,
        "norms": norms,
        "parts": parts,
        "state": memory_bytes(strategy),
        "cost": estimate_cost(strategy.name, shape, world.axes, Workload(), config).state,
        "serves": not has_data(strategy),
        "table_elements": sum(
            one.numel()
            for name, one in model.named_parameters()
            if name.startswith("tables.") and not one.is_meta
        ),
    }
    world.barrier()
    close_servers(strategy)
    return result


def alone(optimizer, **more):
    return train(
        Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu")),
        "single",
        optimizer,
        workers=1,
        **more,
    )


def close(ours, theirs, tolerance=1e-6):
    return all(
        abs(one - other) <= tolerance * abs(other) for one, other in zip(ours, theirs, strict=True)
    )


def same_weights(ours, theirs):
    assert set(ours.whole) == set(theirs.whole)
    return all(
        torch.allclose(one, theirs.whole[name], rtol=1e-5, atol=1e-6)
        for name, one in ours.whole.items()
    )


@pytest.mark.parametrize(
    ("optimizer", "workers", "servers", "dense"),
    [
        ("adagrad", 2, 2, "ddp"),
        ("sgd", 2, 1, "ddp"),
        ("adagrad", 2, 2, "server"),
        ("sgd", 3, 1, "server"),
    ],
)
def test_each_step_is_that_of_ddp(optimizer, workers, servers, dense):
    more = (6, None, 0, (2, 5), "sync", dense)
    found = run_ranks(
        train, workers + servers, "parameter_server", optimizer, workers, servers, *more
    )
    reference = alone(optimizer, watch=(2, 5))
    assert all(close(one["losses"], reference["losses"]) for one in found)
    assert all(close(one["norms"], reference["norms"], 1e-5) for one in found)
    # The state has the names, shapes and values that ddp's has; each row is written by one server.
    end = assemble([one["parts"][5] for one in found])
    assert same_weights(end, assemble([reference["parts"][5]]))
    # No table is on a worker, and no server has a whole one where there are two.
    assert all(one["table_elements"] == 0 for one in found)
    held = [
        sum(
            part.tensor.numel() for part in one["parts"][5] if part.name.startswith("model/tables.")
        )
        for one in found
    ]
    assert held[:workers] == [0] * workers
    assert sum(held[workers:]) == sum(TABLES) * DIM
    assert max(held[workers:]) <= sum(-(-rows // servers) for rows in TABLES) * DIM
    most = max(one["state"] for one in found)
    assert abs(most - found[0]["cost"]) <= 0.02 * most
    # nothing but buffers, of which there are none, is a worker's to write; both servers have a
    # share
    if dense == "server":
        assert [len(one["parts"][5]) for one in found[:workers]] == [0] * workers
        assert all(any("top" in part.name for part in one["parts"][5]) for one in found[workers:])
    if optimizer == "adagrad":
        _goes_on_from(assemble([one["parts"][2] for one in found]), found, end, reference, dense)


def _goes_on_from(middle, found, end, reference, dense):
    """The same layout to the bit, any other to rounding; and without servers."""
    again = run_ranks(
        train, 4, "parameter_server", "adagrad", 2, 2, 3, middle, 3, (5,), "sync", dense
    )
    whole = assemble([one["parts"][5] for one in again])
    assert all(torch.equal(one, end.whole[name]) for name, one in whole.whole.items())
    fewer = run_ranks(train, 2, "parameter_server", "adagrad", 1, 1, 3, middle, 3, (5,))
    assert close(fewer[0]["losses"], reference["losses"][3:])
    assert same_weights(assemble([one["parts"][5] for one in fewer]), end)
    assert close(
        alone("adagrad", steps=3, source=middle, first=3)["losses"], reference["losses"][3:]
    )


@pytest.mark.soak
def test_one_worker_alone_makes_the_same_steps_without_waiting():
    found = run_ranks(train, 3, "parameter_server", "adagrad", 1, 2, 6, None, 0, (2, 5), "bounded")
    reference = alone("adagrad", watch=(5,))
    assert all(close(one["losses"], reference["losses"]) for one in found)
    end = assemble([one["parts"][5] for one in found])
    assert same_weights(end, assemble([reference["parts"][5]]))
    assert sum(part.tensor.numel() for part in found[0]["parts"][5]) == 0  # all is on the servers
    most = max(one["state"] for one in found)
    assert abs(most - found[0]["cost"]) <= 0.02 * most
    middle = assemble([one["parts"][2] for one in found])
    again = run_ranks(train, 2, "parameter_server", "adagrad", 1, 1, 3, middle, 3, (5,), "async")
    assert close(again[0]["losses"], reference["losses"][3:])


def drift(world, rhythm, steps, far):
    """Two workers and a server. Worker 1 makes no third step before worker 0 has got ``far`` steps
    ahead."""
    world = Communicator(world.env, world.device, ParallelDims(data=2))
    strategy = make_strategy(
        "parameter_server", make_config("parameter_server", "sgd", 1, rhythm), world
    )
    torch.manual_seed(0)
    with model_init_context(strategy):
        model = ClickModel(2, TABLES, DIM, [6], [8])
    matrices = matrices_of(model)
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: build_optimizer(strategy.config.train_args, 0.05, named, matrices)
    )
    for step in range(steps):
        if step == 2 and world.rank == 1:
            # ends: worker 0 goes on until it is held or done
            while rpc.rpc_sync("rank2", lead) < far:
                pass

        def micro_step(number, module, step=step):
            dense, ids, starts, labels = share_of(
                batch_of(step), torch.arange(world.rank * 12, world.rank * 12 + 12)
            )
            loss = functional.binary_cross_entropy_with_logits(module(dense, ids, starts), labels)
            return loss / world.size

        strategy.forward_backward(micro_step, 1)
        strategy.clip_grad_norm(1.0)
        strategy.optimizer_step(lambda one: True)
    figures = report_metrics(strategy, None)
    world.barrier()
    close_servers(strategy)
    return figures["staleness"]


def lead():
    with _STORE.lock:
        return max(_STORE.clocks.values()) - min(_STORE.clocks.values()) if _STORE.furthest else 0


@pytest.mark.parametrize(
    ("rhythm", "far", "expected"), [("bounded", 3, {"bound": 2, "seen": 2}), ("async", 7, None)]
)
def test_staleness_is_bounded_and_measured(rhythm, far, expected):
    for found in run_ranks(drift, 3, rhythm, 12, far):
        if expected is not None:
            assert found == expected
        else:
            assert found["bound"] is None
            assert found["seen"] >= far


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adam", "row_wise_adagrad"])
def test_row_state_is_in_the_checkpoint(optimizer):
    found = run_ranks(train, 3, "parameter_server", optimizer, 1, 2, 4, None, 0, (1, 3))
    again = run_ranks(
        train,
        2,
        "parameter_server",
        optimizer,
        1,
        1,
        2,
        assemble([one["parts"][1] for one in found]),
        2,
        (3,),
    )
    # one worker: not even the rounding knows how many servers there are
    assert found[0]["losses"][2:] == again[0]["losses"]
    ours, theirs = (
        assemble([one["parts"][3] for one in again]),
        assemble([one["parts"][3] for one in found]),
    )
    assert set(ours.whole) == set(theirs.whole)
    assert all(
        torch.equal(one, theirs.whole[name]) for name, one in ours.whole.items() if "tables" in name
    )
    keys = {name.rpartition("/")[2] for name in ours.whole if name.startswith("optimizer/tables.0")}
    assert keys == ({"step", "exp_avg", "exp_avg_sq"} if optimizer == "adam" else {"row_sum"})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train_args": {"weight_decay": 0.1}}, "weight_decay"),
        ({"train_args": {"precision": "fp16-mixed"}}, "train_args.precision: fp16-mixed"),
        ({"train_args": {"gradient_checkpointing": True}}, "gradient_checkpointing"),
        ({"task": "sft"}, "`task: sft` is not supported"),
        (
            {"parameter_server": {"dense_placement": "ddp", "consistency": "bounded"}},
            "each worker waits for the slowest",
        ),
        (
            {"parameter_server": {"dense_placement": "ddp", "on_worker_failure": "continue"}},
            "process group",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(keys, words):
    config = Config.model_validate({"model": "m", "dataset": "d", "task": "recommend", **keys})
    with pytest.raises(ConfigError, match=words):
        check_strategy("parameter_server", config, ParallelDims(data=2))


@pytest.mark.slow
@pytest.mark.soak
def test_a_run_without_waiting_ends_with_a_whole_model(tmp_path: Path):
    words = [
        "model=builtin:dlrm", "task=recommend", "dataset=builtin:clicks#2000",
        "split_dataset_ratio=0.2", f"output_dir={tmp_path}/run", "parallel.mode=parameter_server",
        "parallel.device=cpu", "parallel.num_gpus=2", "parameter_server.consistency=bounded",
        "parameter_server.num_servers=2", "train_args.per_device_train_batch_size=16",
        "train_args.max_steps=12", "train_args.logging_steps=4",
    ]  # fmt: skip
    run(*words)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["status"], report["strategy"], report["steps"]) == (
        "done",
        "parameter_server",
        12,
    )
    assert report["staleness"]["bound"] == 4
    assert 0 <= report["staleness"]["seen"] <= 4
    assert 0 < report["final_eval_metrics"]["auc"] < report["final_eval_metrics"]["best_auc"]
    state = report["state_memory_bytes"]
    assert abs(state["measured"] - state["predicted"]) <= 0.02 * state["measured"]
    # from the distinct ids of some batches; those of a step vary
    traffic = report["traffic_bytes_per_step"]
    assert abs(traffic["measured"] - traffic["predicted"]) <= 0.1 * traffic["measured"]
    assert "bound" not in traffic
    model, _ = load_recommender(tmp_path / "run" / "model")
    with CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012") as reader:
        for name, one in model.named_parameters():
            assert torch.equal(reader.read(f"model/{name}", (0,) * one.dim(), one.shape), one)
