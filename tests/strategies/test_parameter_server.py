"""`parameter_server`: the same steps as ddp, tables divided among servers, resume in other layouts,
and bounded staleness."""

import json
from pathlib import Path

import pytest
import torch
from commands import run
from raised import raises_error
from ranks import run_ranks
from server_config import make_config
from states import assemble, copy_shards
from torch.distributed import rpc
from torch.nn import functional

from paceline.checkpoint.store import CheckpointReader
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.devices import Devices
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.launch.passes.draft import Draft, Host
from paceline.launch.passes.layout import choose_layout, set_accumulation
from paceline.launch.plan import plan
from paceline.models.recommend import ClickModel, load_recommender
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes
from paceline.parallel.strategy import make_strategy
from paceline.strategies.parameter_server.asynchronous import _STORE
from paceline.train.optimizers.build import build_optimizer, matrices_of

TABLES, DIM, ROWS = (5000, 7, 2), 4, 24


def make_batch(step):
    """Return a global batch. Its ids follow a power law, so that ranks have rows in common."""
    generator = torch.Generator().manual_seed(step)
    ids = [((torch.rand(ROWS, generator=generator) ** 6) * size).long() for size in TABLES]
    return (
        torch.randn(ROWS, 2, generator=generator),
        ids,
        torch.randint(0, 2, (ROWS,), generator=generator).float(),
    )


def select_share(batch, rows):
    dense, ids, labels = batch
    starts = [torch.arange(len(rows) + 1) for _ in ids]
    return dense[rows], [column[rows] for column in ids], starts, labels[rows]


def train(
    world,
    mode,
    optimizer,
    workers,
    servers=1,
    steps=6,
    source=None,
    first_step=0,
    save_after=(),
    consistency="sync",
    dense="auto",
):
    """Train and return, among others, the losses of the global batch and the shards that this rank
    writes into a checkpoint after each step of ``save_after``."""
    world = Communicator(world.env, world.device, ParallelDims(data=workers))
    config = make_config(mode, optimizer, servers, consistency, dense)
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(0)
    with strategy.model_init_context():
        model = ClickModel(2, TABLES, DIM, [6], [8])
    shape, matrices = outline(model, config), matrices_of(model)
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, 0.05, named, matrices)
    )
    if source is not None:
        load_state(strategy, source)
    losses, norms, shards = [], [], {}
    for step in range(first_step, first_step + steps):
        batch = make_batch(step)
        seen = []

        def micro_step(number, module, batch=batch, seen=seen):
            size = ROWS // (2 * workers)
            start = (strategy.replica * 2 + number) * size
            dense, ids, starts, labels = select_share(batch, torch.arange(start, start + size))
            loss = (
                functional.binary_cross_entropy_with_logits(
                    module(dense, ids, starts), labels, reduction="sum"
                )
                / ROWS
            )
            seen.append(float(loss.detach()))
            # like the trainer in modes in which each replica divides by its local count
            return loss if consistency == "sync" else loss / world.size

        strategy.forward_backward(micro_step, 2 if strategy.has_data else 0)
        norms.append(float(strategy.clip_grad_norm(0.2)))
        assert strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
        losses.append(world.sum(sum(seen))[0])
        if step in save_after:
            shards[step] = copy_shards(strategy.state_shards())
    result = {
        "losses": losses,
        "norms": norms,
        "shards": shards,
        "state": memory_bytes(strategy),
        "cost": estimate_cost(strategy.name, shape, world.axes, Workload(), config).state,
        "serves": not strategy.has_data,
        "table_elements": sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if name.startswith("tables.") and not parameter.is_meta
        ),
    }
    world.barrier()
    strategy.close()
    return result


def train_on_one_rank(optimizer, **options):
    world = Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))
    return train(world, "single", optimizer, workers=1, **options)


@pytest.mark.parametrize(
    ("device", "outer", "error"),
    [
        ("mps", None, ("not-supported", "parallel.mode")),
        ("cuda", RankEnv(0, 3, 0, 3), ("not-supported", "parallel.mode")),
    ],
)
def test_devices_that_are_not_supported(device, outer, error):
    config = make_config("parameter_server", "adagrad", 1)
    draft = Draft(Loaded(config), 0.0, outer=outer, host=Host(Devices(device, 2)))
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        plan(draft, first=choose_layout, last=set_accumulation)


def are_close(ours, theirs, tolerance=1e-6):
    return all(
        abs(our - their) <= tolerance * abs(their) for our, their in zip(ours, theirs, strict=True)
    )


def assemble_step(results, step):
    """Return the checkpoint of all ranks after a step."""
    return assemble([result["shards"][step] for result in results])


def have_same_weights(ours, theirs):
    assert set(ours.full) == set(theirs.full)
    return all(
        torch.allclose(tensor, theirs.full[name], rtol=1e-5, atol=1e-6)
        for name, tensor in ours.full.items()
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
def test_steps_match_ddp(optimizer, workers, servers, dense):
    options = (6, None, 0, (2, 5), "sync", dense)
    results = run_ranks(
        train, workers + servers, "parameter_server", optimizer, workers, servers, *options
    )
    reference = train_on_one_rank(optimizer, save_after=(2, 5))
    assert all(are_close(result["losses"], reference["losses"]) for result in results)
    assert all(are_close(result["norms"], reference["norms"], 1e-5) for result in results)
    # The state equals that of ddp in names, shapes and values; one server writes each row.
    end = assemble_step(results, 5)
    assert have_same_weights(end, assemble([reference["shards"][5]]))
    # Workers hold no rows of the tables; with two servers, each holds half of the rows.
    assert all(result["table_elements"] == 0 for result in results)
    elements = [
        sum(
            shard.tensor.numel()
            for shard in result["shards"][5]
            if shard.name.startswith("model/tables.")
        )
        for result in results
    ]
    assert elements[:workers] == [0] * workers
    assert sum(elements[workers:]) == sum(TABLES) * DIM
    assert max(elements[workers:]) <= sum(-(-rows // servers) for rows in TABLES) * DIM
    max_state = max(result["state"] for result in results)
    assert abs(max_state - results[0]["cost"]) <= 0.02 * max_state
    # A worker writes only buffers, of which this model has none; both servers write a share.
    if dense == "server":
        assert not any(result["shards"][5] for result in results[:workers])
        for result in results[workers:]:
            assert any("top" in shard.name for shard in result["shards"][5])
    if optimizer == "adagrad":
        check_resumed_runs(assemble_step(results, 2), end, reference, dense)


def check_resumed_runs(middle, end, reference, dense):
    """Check that resuming is exact to the bit in the same layout, and up to rounding in another
    layout and without servers."""
    resumed_results = run_ranks(
        train, 4, "parameter_server", "adagrad", 2, 2, 3, middle, 3, (5,), "sync", dense
    )
    resumed = assemble_step(resumed_results, 5)
    assert all(torch.equal(tensor, end.full[name]) for name, tensor in resumed.full.items())
    resumed_with_fewer = run_ranks(
        train, 2, "parameter_server", "adagrad", 1, 1, 3, middle, 3, (5,)
    )
    assert are_close(resumed_with_fewer[0]["losses"], reference["losses"][3:])
    assert have_same_weights(assemble_step(resumed_with_fewer, 5), end)
    assert are_close(
        train_on_one_rank("adagrad", steps=3, source=middle, first_step=3)["losses"],
        reference["losses"][3:],
    )


@pytest.mark.soak
def test_single_asynchronous_worker_matches_one_rank():
    results = run_ranks(
        train, 3, "parameter_server", "adagrad", 1, 2, 6, None, 0, (2, 5), "bounded"
    )
    reference = train_on_one_rank("adagrad", save_after=(5,))
    assert all(are_close(result["losses"], reference["losses"]) for result in results)
    assert have_same_weights(assemble_step(results, 5), assemble([reference["shards"][5]]))
    # All parameters are on the servers.
    assert sum(shard.tensor.numel() for shard in results[0]["shards"][5]) == 0
    max_state = max(result["state"] for result in results)
    assert abs(max_state - results[0]["cost"]) <= 0.02 * max_state
    middle = assemble_step(results, 2)
    resumed_results = run_ranks(
        train, 2, "parameter_server", "adagrad", 1, 1, 3, middle, 3, (5,), "async"
    )
    assert are_close(resumed_results[0]["losses"], reference["losses"][3:])


def measure_staleness(world, consistency, steps, lead):
    """Train on two workers and a server. Worker 1 waits before its third step until worker 0 is
    ``lead`` steps ahead."""
    world = Communicator(world.env, world.device, ParallelDims(data=2))
    strategy = make_strategy(
        "parameter_server", make_config("parameter_server", "sgd", 1, consistency), world
    )
    torch.manual_seed(0)
    with strategy.model_init_context():
        model = ClickModel(2, TABLES, DIM, [6], [8])
    matrices = matrices_of(model)
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: build_optimizer(strategy.config.train_args, 0.05, named, matrices)
    )
    for step in range(steps):
        if step == 2 and world.rank == 1:
            # Worker 0 continues until it has to wait or has finished, so this loop ends.
            while rpc.rpc_sync("rank2", measure_lead) < lead:
                pass

        def micro_step(number, module, step=step):
            dense, ids, starts, labels = select_share(
                make_batch(step), torch.arange(world.rank * 12, world.rank * 12 + 12)
            )
            loss = functional.binary_cross_entropy_with_logits(module(dense, ids, starts), labels)
            return loss / world.size

        strategy.forward_backward(micro_step, 1)
        strategy.clip_grad_norm(1.0)
        strategy.optimizer_step(lambda optimizer: True)
    metrics = strategy.report_metrics(None)
    world.barrier()
    strategy.close()
    return metrics["staleness"]


def measure_lead():
    with _STORE.lock:
        return max(_STORE.clocks.values()) - min(_STORE.clocks.values()) if _STORE.max_lead else 0


@pytest.mark.parametrize(
    ("consistency", "lead", "expected"),
    [("bounded", 3, {"bound": 2, "seen": 2}), ("async", 7, None)],
)
def test_staleness_is_measured_and_bounded(consistency, lead, expected):
    for staleness in run_ranks(measure_staleness, 3, consistency, 12, lead):
        if expected is not None:
            assert staleness == expected
        else:
            assert staleness["bound"] is None
            assert staleness["seen"] >= lead


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adam", "row_wise_adagrad"])
def test_checkpoint_has_optimizer_state_of_rows(optimizer):
    results = run_ranks(train, 3, "parameter_server", optimizer, 1, 2, 4, None, 0, (1, 3))
    middle = assemble_step(results, 1)
    resumed_results = run_ranks(train, 2, "parameter_server", optimizer, 1, 1, 2, middle, 2, (3,))
    # With one worker, the results do not depend on the number of servers, not even in rounding.
    assert results[0]["losses"][2:] == resumed_results[0]["losses"]
    ours, theirs = assemble_step(resumed_results, 3), assemble_step(results, 3)
    assert set(ours.full) == set(theirs.full)
    assert all(
        torch.equal(tensor, theirs.full[name])
        for name, tensor in ours.full.items()
        if "tables" in name
    )
    keys = {name.rpartition("/")[2] for name in ours.full if name.startswith("optimizer/tables.0")}
    assert keys == ({"step", "exp_avg", "exp_avg_sq"} if optimizer == "adam" else {"row_sum"})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"train_args": {"weight_decay": 0.1}}, ("not-supported", "train_args.weight_decay")),
        ({"train_args": {"precision": "fp16-mixed"}}, ("not-supported", "train_args.precision")),
        (
            {"train_args": {"gradient_checkpointing": True}},
            ("not-supported", "train_args.gradient_checkpointing"),
        ),
        ({"task": "sft"}, ("not-supported", "task")),
        (
            {"parameter_server": {"dense_placement": "ddp", "consistency": "bounded"}},
            ("not-supported", "parameter_server.dense_placement"),
        ),
        (
            {"parameter_server": {"dense_placement": "ddp", "on_worker_failure": "continue"}},
            ("not-supported", "parameter_server.dense_placement"),
        ),
    ],
)
def test_rejects_unsupported_settings(settings, error):
    config = Config.model_validate({"model": "m", "dataset": "d", "task": "recommend", **settings})
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy("parameter_server", config, ParallelDims(data=2))


@pytest.mark.slow
@pytest.mark.soak
def test_asynchronous_run_exports_full_model(tmp_path: Path):
    args = [
        "model=builtin:dlrm", "task=recommend", "dataset=builtin:clicks#2000",
        "split_dataset_ratio=0.2", f"output_dir={tmp_path}/run", "parallel.mode=parameter_server",
        "parallel.device=cpu", "parallel.num_gpus=2", "parameter_server.consistency=bounded",
        "parameter_server.num_servers=2", "train_args.per_device_train_batch_size=16",
        "train_args.max_steps=12", "train_args.logging_steps=4",
    ]  # fmt: skip
    run(*args)
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
    # predicted from the distinct ids of some batches; their number varies from step to step
    traffic = report["traffic_bytes_per_step"]
    assert abs(traffic["measured"] - traffic["predicted"]) <= 0.1 * traffic["measured"]
    assert "bound" not in traffic
    model, _ = load_recommender(tmp_path / "run" / "model")
    with CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012") as reader:
        for name, parameter in model.named_parameters():
            stored = reader.read(f"model/{name}", (0,) * parameter.dim(), parameter.shape)
            assert torch.equal(stored, parameter)
