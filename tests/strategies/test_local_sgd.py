"""`local_sgd` on real ranks: the definition of Stich (2019), bitwise resume, costs, and rejected
settings."""

import copy
import json
import shutil

import pytest
import torch
from commands import digest, events, report, run, train
from local_runs import (
    Plain,
    compute_loss,
    flat_weights,
    gather_checkpoint,
    make_config,
    make_tokens,
    resume_differences,
    resume_strategy,
    set_up_strategy,
    train_step,
)
from raised import raises_error
from ranks import run_ranks
from torch import nn

from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Workload
from paceline.parallel.registry import check_steps, check_strategy, estimate_cost
from paceline.parallel.save_load import memory_bytes
from paceline.strategies.local_sgd.schedule import SyncSchedule, num_workers

RESUME_CASES = [
    ({"sync_every": 4}, (2, 6)),
    ({"sync_every": 5, "fragment_sync_delay": 3, "num_fragments": 2, "warmup_steps": 2}, (1, 5, 8)),
    ({"sync_every": 3, "average_optimizer_state": True, "num_fragments": 2}, (5,)),
]


def run_on_three_ranks(world):
    resume_mismatches = [
        (local, name)
        for local, save_at in RESUME_CASES
        for name in resume_differences(world, "local_sgd", local, save_at, 11)
    ]
    difference = compare_with_ddp(world)
    errors = {
        key: compare_with_definition(world, local)
        for key, local in {
            "plain": {"sync_every": 3},
            "post-local": {"sync_every": 3, "warmup_steps": 4},
            "fragments": {"sync_every": 4, "num_fragments": 2},
            "overlap": {"sync_every": 4, "fragment_sync_delay": 2},
        }.items()
    }
    costs = [
        measure_costs(world, local)
        for local in (
            {"sync_every": 4},
            {"sync_every": 4, "num_fragments": 3, "fragment_sync_delay": 2},
        )
    ]
    world.barrier()
    return resume_mismatches, difference, errors, costs


def compare_with_ddp(world):
    """Return the largest difference of the weights from those of `ddp` over ten steps of SGD with
    momentum, synchronized at each step."""
    runs = [
        set_up_strategy(world, mode, {"sync_every": 1}, optim="sgd", net=Plain, clip=0.0)
        for mode in ("ddp", "local_sgd")
    ]
    largest_error = 0.0
    for step in range(10):
        for strategy in runs:
            train_step(strategy, step)
        largest_error = max(
            largest_error, float((flat_weights(runs[0]) - flat_weights(runs[1])).abs().max())
        )
    return largest_error


def compare_with_definition(world, local):
    """Return the largest difference of the weights from a reference, three models that this process
    trains and averages as the papers define, and the largest difference between those models."""
    strategy = set_up_strategy(world, "local_sgd", local, "sgd", net=Plain, learning_rate=0.2)
    models = [copy.deepcopy(strategy.model) for _ in range(world.size)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None
    optimizers = [
        torch.optim.SGD(optimizer_groups(model), lr=0.2, momentum=0.9) for model in models
    ]
    period, warmup = local["sync_every"], local.get("warmup_steps", 0)
    fragments, overlap = local.get("num_fragments", 1), local.get("fragment_sync_delay", 0)
    size, pending, largest_error, spread = flat_weights(strategy).numel(), [], 0.0, 0.0
    for step in range(1, 14):
        train_step(strategy, step - 1)
        tokens = make_tokens(step - 1)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            share = tokens if step <= warmup else tokens.view(world.size, -1)[rank]
            optimizer.zero_grad()
            (compute_loss(model, share) / len(share)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        flats = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
        mean = torch.stack(flats).mean(0)
        for due_step, start, end, corrections in pending:
            if due_step == step:
                for flat, correction in zip(flats, corrections, strict=True):
                    flat[start:end] += correction
        for number in range(fragments):
            start, end = size * number // fragments, size * (number + 1) // fragments
            sync_offset = period * (number + 1) // fragments
            if step > warmup and (step - warmup) % period == sync_offset % period:
                if overlap:
                    pending.append(
                        (step + overlap, start, end, [(mean - flat)[start:end] for flat in flats])
                    )
                else:
                    for flat in flats:
                        flat[start:end] = mean[start:end]
        for model, flat in zip(models, flats, strict=True):
            nn.utils.vector_to_parameters(flat, model.parameters())
        largest_error = max(
            largest_error, float((flat_weights(strategy) - flats[world.rank]).abs().max())
        )
        spread = max(spread, float((flats[0] - flats[1]).abs().max()))
    return largest_error, spread


def optimizer_groups(model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() < 2]},
    ]


def measure_costs(world, local, mode="local_sgd"):
    strategy = set_up_strategy(world, mode, local, net=Plain)
    sent = []
    for step in range(12):
        before = world.traffic.total
        train_step(strategy, step)
        sent.append(world.traffic.total - before)
    cost = estimate_cost(strategy.name, strategy.shape, world.axes, Workload(), strategy.config)
    period = strategy.traffic_period
    counts = 2 * 8  # the sum of each step's loss, which the test itself sends
    return (
        cost.state,
        memory_bytes(strategy),
        cost.traffic_per_step,
        sum(sent[-period:]) / period - counts,
    )


@pytest.mark.soak
def test_resume_definition_and_costs_on_three_ranks():
    for resume_mismatches, difference, errors, costs in run_ranks(run_on_three_ranks, 3):
        assert not resume_mismatches
        assert difference < 1e-6
        for largest_error, spread in errors.values():
            assert largest_error < 1e-5 < 1e-2 < spread
        for state, state_measured, traffic, traffic_measured in costs:
            assert state == pytest.approx(state_measured, rel=0.02)
            assert traffic == pytest.approx(traffic_measured, rel=0.02)


def run_two_workers_of_two_ranks(world):
    local = {"sync_every": 3, "workers": 2}
    differences = resume_differences(
        world, "local_sgd", {**local, "fragment_sync_delay": 2, "num_fragments": 2}, (4,), 8
    )
    strategy = set_up_strategy(world, "local_sgd", local)
    weights_by_step = []
    for step in range(6):
        train_step(strategy, step)
        weights_by_step.append(flat_weights(strategy))
    costs = measure_costs(world, local)
    train_step(strategy, 6)
    checkpoint = gather_checkpoint(strategy)
    mean = torch.stack(world.gather_objects(flat_weights(strategy))).mean(0)
    before = flat_weights(strategy)
    with strategy.consolidated():
        evaluated = flat_weights(strategy)
    after = flat_weights(strategy)
    others = {}
    for name, other in (
        ("ddp", resume_strategy(world, "ddp", {}, checkpoint)),
        (
            "four workers",
            resume_strategy(world, "local_sgd", {"sync_every": 3, "workers": 4}, checkpoint),
        ),
        ("diloco", resume_strategy(world, "diloco", local, checkpoint)),
    ):
        others[name] = (
            flat_weights(other),
            getattr(other, "steps_done", None),
            [text for _, text in other.notices],
        )
    world.barrier()
    unchanged = torch.equal(before, after)
    return differences, weights_by_step, costs, mean, evaluated, unchanged, before, others


@pytest.mark.soak
def test_two_workers_of_two_ranks_are_replicas_until_synchronized():
    results = run_ranks(run_two_workers_of_two_ranks, 4)
    assert not any(differences for differences, *_ in results)
    weights_by_step = [result[1] for result in results]
    for step in range(6):
        weights_of_ranks = [path[step] for path in weights_by_step]
        assert torch.equal(
            weights_of_ranks[0], weights_of_ranks[1]
        )  # the ranks of a worker are replicas
        assert torch.equal(weights_of_ranks[2], weights_of_ranks[3])
        assert torch.equal(weights_of_ranks[0], weights_of_ranks[2]) is (step in (2, 5))
    for _, _, costs, mean, evaluated, unchanged, local, others in results:
        state, state_measured, traffic, traffic_measured = costs
        assert state == pytest.approx(state_measured, rel=0.02)
        assert traffic == pytest.approx(traffic_measured, rel=0.02)
        torch.testing.assert_close(evaluated, mean)
        assert unchanged
        torch.testing.assert_close(others["ddp"][0], mean)
        torch.testing.assert_close(others["four workers"][0], mean)
        assert others["four workers"][1] == 7
        assert "2 workers" in others["four workers"][2][-1]
        assert "dropped" in others["four workers"][2][-1]
        # With the same number of workers, each continues from its weights.
        assert torch.equal(others["diloco"][0], local)


def test_sync_schedule():
    schedule = SyncSchedule(period=6, fragments=3, delay=4, warmup=5)
    started = {step: schedule.starting_at(step) for step in range(1, 24)}
    assert {step: fragments for step, fragments in started.items() if fragments} == {
        7: [0],
        9: [1],
        11: [2],
        13: [0],
        15: [1],
        17: [2],
        19: [0],
        21: [1],
        23: [2],
    }
    assert [step for step in range(20) if schedule.completing_at(step)] == [11, 13, 15, 17, 19]
    assert schedule.pending_at(11) == [(1, 2), (2, 0)]
    assert [step for step in range(12) if schedule.halfway_at(step) == [0]] == [9]
    assert [step for step in range(9) if SyncSchedule(3, warmup=1).is_synchronized(step)] == [
        0,
        1,
        4,
        7,
    ]
    assert not any(SyncSchedule(3, delay=1).is_synchronized(step) for step in range(1, 9))
    assert [SyncSchedule(7, 4).starting_at(step) for step in range(1, 8)] == [
        [0],
        [],
        [1],
        [],
        [2],
        [],
        [3],
    ]


def test_worker_is_a_host_or_a_rank():
    settings = make_config("local_sgd").local_sgd
    assert num_workers(settings, RankEnv(0, 8, 0, 8)) == 8
    assert num_workers(settings, RankEnv(0, 8, 0, 4)) == 2
    assert num_workers(settings, RankEnv(0, 8, 0, 3)) == 8
    assert num_workers(make_config("local_sgd", {"workers": 4}).local_sgd, RankEnv(0, 8, 0, 4)) == 4


@pytest.mark.parametrize(
    ("mode", "local", "train_args", "texts"),
    [
        ("local_sgd", {"sync_every": 50}, {"max_steps": 40}, ["50", "40 steps", "1 to 40"]),
        (
            "diloco",
            {"sync_every": 20, "warmup_steps": 30},
            {"max_steps": 40},
            ["warm-up", "1 to 10"],
        ),
        ("local_sgd", {"workers": 3}, {}, ["does not divide", "1, 2, 4"]),
        ("diloco", {"sync_every": 4, "num_fragments": 5}, {}, ["num_fragments: 5", "1 to 4"]),
        (
            "diloco",
            {"sync_every": 4, "fragment_sync_delay": 4},
            {},
            ["fragment_sync_delay: 4", "0 to 3"],
        ),
        ("local_sgd", {"outer_dtype": "int8"}, {}, ["outer_dtype", "diloco"]),
        ("diloco", {"average_optimizer_state": True}, {}, ["average_optimizer_state", "local_sgd"]),
        (
            "local_sgd",
            {"average_optimizer_state": True, "fragment_sync_delay": 2},
            {},
            ["negative"],
        ),
        ("local_sgd", {"average_optimizer_state": True}, {"optim": "adafactor"}, ["factored"]),
    ],
)
def test_rejects_unsupported_settings(mode, local, train_args, texts):
    with pytest.raises(ConfigError) as caught:
        check_strategy(mode, make_config(mode, local, **train_args), ParallelDims(data=4))
    for text in texts:
        assert text in caught.value.paragraph()


def test_rejects_period_longer_than_the_epochs():
    with raises_error(ConfigError, code="too-few-steps"):
        check_steps("diloco", make_config("diloco", {"sync_every": 13}), 12)


def test_single_rank_sends_nothing():
    world = Communicator(RankEnv(), torch.device("cpu"))
    for mode in ("local_sgd", "diloco"):
        strategy = set_up_strategy(
            world,
            mode,
            {"sync_every": 2, "outer_dtype": "int8" if mode == "diloco" else "float32"},
            net=Plain,
        )
        assert train_step(strategy, 0) > train_step(strategy, 0) > 0
        assert (
            estimate_cost(
                strategy.name, strategy.shape, ParallelDims(), Workload(), strategy.config
            ).traffic_per_step
            == 0
        )


@pytest.mark.soak
def test_synchronizing_at_each_step_matches_single(tmp_path):
    """With SGD and shares of equal size on four ranks, two per worker, the run matches `single` if
    the trainer divides the loss of each worker by the right count."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "{model: 'builtin:mlp', task: classify, dataset: 'builtin:digits', parallel: {device: cpu},"
        " local_sgd: {sync_every: 1, workers: 2}, train_args:"
        " {per_device_train_batch_size: 16, optim:"
        " sgd, max_grad_norm: 0, learning_rate: 0.1}}"
    )
    process = run(
        str(file),
        "--world-size",
        "4",
        "--modes",
        "local_sgd",
        "--steps",
        "5",
        "--json",
        verb="verify",
    )
    modes = json.loads(process.stdout)["modes"]
    assert [(mode["mode"], mode["ok"]) for mode in modes] == [("local_sgd", True)]


@pytest.mark.slow
@pytest.mark.soak
def test_resume_in_the_middle_of_a_period_is_exact(tmp_path):
    args = [
        "parallel.mode=local_sgd",
        "parallel.num_gpus=2",
        "local_sgd.sync_every=4",
        "local_sgd.fragment_sync_delay=2",
    ]
    args += [
        "train_args.max_steps=8",
        "train_args.logging_steps=3",
        "train_args.eval_steps=6",
        "split_dataset_ratio=0.1",
    ]
    args += ["train_args.save_steps=5"]
    uninterrupted, interrupted = tmp_path / "uninterrupted", tmp_path / "interrupted"
    train(uninterrupted, *args)
    shutil.copytree(uninterrupted, interrupted)
    shutil.rmtree(interrupted / "checkpoints" / "step-00000008")
    (interrupted / "report.json").unlink()
    train(interrupted, *args)
    assert report(interrupted)["resumed_from_step"] == 5
    assert digest(interrupted) == digest(uninterrupted)
    assert events(interrupted, "eval")[-1]["loss"] == events(uninterrupted, "eval")[-1]["loss"]
    result = report(uninterrupted)
    assert result["traffic_bytes_per_step"]["measured"] == pytest.approx(
        result["traffic_bytes_per_step"]["predicted"], rel=0.02
    )
    assert result["state_memory_bytes"]["measured"] == pytest.approx(
        result["state_memory_bytes"]["predicted"], rel=0.02
    )
    assert result["communication"]["synchronisations"] == 1
    assert [event["step"] for event in events(uninterrupted, "step")] == [1, 3, 6, 8]
    losses = [event["loss"] for event in events(uninterrupted, "step")]
    # fails if the counts are those of another step than the loss
    assert max(losses) < 1.1 * min(losses)
    args = [arg for arg in args if not arg.startswith(("parallel.mode", "train_args.max_steps"))]
    ended = train(
        interrupted, *args, "parallel.mode=ddp", "train_args.max_steps=9", "--allow-config-change"
    )
    assert "the mean of their parameters" in ended.stderr
