"""`local_sgd`: what Stich (2019) defines, on real ranks; exact when resumed; which settings are
rejected; what it costs."""

import copy
import json
import shutil

import pytest
import torch
from commands import digest, events, report, run, train
from local_runs import (
    Plain,
    config_of,
    loss_of,
    make,
    resume_differences,
    resumed,
    source_of,
    tokens_of,
    train_step,
    weights,
)
from ranks import run_ranks
from torch import nn

from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Workload
from paceline.parallel.local_sgd.schedule import SyncSchedule, num_workers
from paceline.parallel.protocols import traffic_period
from paceline.parallel.registry import check_steps, check_strategy, estimate_cost
from paceline.parallel.save_load import memory_bytes

BITWISE = [
    ({"sync_every": 4}, (2, 6)),
    ({"sync_every": 5, "fragment_sync_delay": 3, "num_fragments": 2, "warmup_steps": 2}, (1, 5, 8)),
    ({"sync_every": 3, "average_optimizer_state": True, "num_fragments": 2}, (5,)),
]


def three_ranks(world):
    wrong = [
        (local, name)
        for local, at in BITWISE
        for name in resume_differences(world, "local_sgd", local, at, 11)
    ]
    difference = compare_with_ddp(world)
    paths = {
        key: by_definition(world, local)
        for key, local in {
            "plain": {"sync_every": 3},
            "post-local": {"sync_every": 3, "warmup_steps": 4},
            "fragments": {"sync_every": 4, "num_fragments": 2},
            "overlap": {"sync_every": 4, "fragment_sync_delay": 2},
        }.items()
    }
    costs = [
        costs_of(world, local)
        for local in (
            {"sync_every": 4},
            {"sync_every": 4, "num_fragments": 3, "fragment_sync_delay": 2},
        )
    ]
    world.barrier()
    return wrong, difference, paths, costs


def compare_with_ddp(world):
    """Return the largest difference of the weights over ten steps of SGD with momentum: if it is
    synchronized at each step, it is `ddp`."""
    runs = [
        make(world, mode, {"sync_every": 1}, optim="sgd", net=Plain, clip=0.0)
        for mode in ("ddp", "local_sgd")
    ]
    worst = 0.0
    for step in range(10):
        for strategy in runs:
            train_step(strategy, step)
        worst = max(worst, float((weights(runs[0]) - weights(runs[1])).abs().max()))
    return worst


def by_definition(world, local):
    """Return the largest difference from three models that this process trains and averages as
    defined in the papers, and how far those differ from each other."""
    ours = make(world, "local_sgd", local, "sgd", net=Plain, rate=0.2)
    models = [copy.deepcopy(ours.model) for _ in range(world.size)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None
    optimizers = [torch.optim.SGD(decayed(model), lr=0.2, momentum=0.9) for model in models]
    period, warmup = local["sync_every"], local.get("warmup_steps", 0)
    fragments, overlap = local.get("num_fragments", 1), local.get("fragment_sync_delay", 0)
    size, pending, worst, spread = weights(ours).numel(), [], 0.0, 0.0
    for step in range(1, 14):
        train_step(ours, step - 1)
        tokens = tokens_of(step - 1)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            share = tokens if step <= warmup else tokens.view(world.size, -1)[rank]
            optimizer.zero_grad()
            (loss_of(model, share) / len(share)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        flats = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
        mean = torch.stack(flats).mean(0)
        for due, low, high, corrections in pending:
            if due == step:
                for flat, correction in zip(flats, corrections, strict=True):
                    flat[low:high] += correction
        for number in range(fragments):
            low, high = size * number // fragments, size * (number + 1) // fragments
            at = period * (number + 1) // fragments
            if step > warmup and (step - warmup) % period == at % period:
                if overlap:
                    pending.append(
                        (step + overlap, low, high, [(mean - flat)[low:high] for flat in flats])
                    )
                else:
                    for flat in flats:
                        flat[low:high] = mean[low:high]
        for model, flat in zip(models, flats, strict=True):
            nn.utils.vector_to_parameters(flat, model.parameters())
        worst = max(worst, float((weights(ours) - flats[world.rank]).abs().max()))
        spread = max(spread, float((flats[0] - flats[1]).abs().max()))
    return worst, spread


def decayed(model):
    matrices = [each for each in model.parameters() if each.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() < 2]},
    ]


def costs_of(world, local, mode="local_sgd"):
    strategy = make(world, mode, local, net=Plain)
    sent = []
    for step in range(12):
        before = world.traffic.total
        train_step(strategy, step)
        sent.append(world.traffic.total - before)
    cost = estimate_cost(strategy.name, strategy.shape, world.axes, Workload(), strategy.config)
    period = traffic_period(strategy)
    counts = 2 * 8  # the loss of each step, added up by the test
    return (
        cost.state,
        memory_bytes(strategy),
        cost.traffic_per_step,
        sum(sent[-period:]) / period - counts,
    )


@pytest.mark.soak
def test_three_ranks():
    for wrong, difference, paths, costs in run_ranks(three_ranks, 3):
        assert not wrong
        assert difference < 1e-6
        for worst, spread in paths.values():
            assert worst < 1e-5 < 1e-2 < spread
        for state, state_measured, traffic, traffic_measured in costs:
            assert state == pytest.approx(state_measured, rel=0.02)
            assert traffic == pytest.approx(traffic_measured, rel=0.02)


def two_by_two(world):
    local = {"sync_every": 3, "workers": 2}
    differences = resume_differences(
        world, "local_sgd", {**local, "fragment_sync_delay": 2, "num_fragments": 2}, (4,), 8
    )
    ours = make(world, "local_sgd", local)
    paths = []
    for step in range(6):
        train_step(ours, step)
        paths.append(weights(ours))
    costs = costs_of(world, local)
    train_step(ours, 6)
    checkpoint = source_of(ours)
    mean = torch.stack(world.gather_objects(weights(ours))).mean(0)
    before = weights(ours)
    with ours.consolidated():
        evaluated = weights(ours)
    after = weights(ours)
    others = {}
    for name, other in (
        ("ddp", resumed(world, "ddp", {}, checkpoint)),
        ("four workers", resumed(world, "local_sgd", {"sync_every": 3, "workers": 4}, checkpoint)),
        ("diloco", resumed(world, "diloco", local, checkpoint)),
    ):
        others[name] = (
            weights(other),
            getattr(other, "steps_done", None),
            [text for _, text in other.notices],
        )
    world.barrier()
    unchanged = torch.equal(before, after)
    return differences, paths, costs, mean, evaluated, unchanged, before, others


@pytest.mark.soak
def test_two_workers_of_two_ranks():
    results = run_ranks(two_by_two, 4)
    assert not any(differences for differences, *_ in results)
    paths = [result[1] for result in results]
    for step in range(6):
        at = [path[step] for path in paths]
        assert torch.equal(at[0], at[1])  # the ranks of a worker are replicas
        assert torch.equal(at[2], at[3])
        assert torch.equal(at[0], at[2]) is (step in (2, 5))
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


def test_schedule():
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


def test_workers_are_machines_or_ranks():
    settings = config_of("local_sgd").local_sgd
    assert num_workers(settings, RankEnv(0, 8, 0, 8)) == 8
    assert num_workers(settings, RankEnv(0, 8, 0, 4)) == 2
    assert num_workers(settings, RankEnv(0, 8, 0, 3)) == 8
    assert num_workers(config_of("local_sgd", {"workers": 4}).local_sgd, RankEnv(0, 8, 0, 4)) == 4


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
def test_rejected(mode, local, train_args, texts):
    with pytest.raises(ConfigError) as caught:
        check_strategy(mode, config_of(mode, local, **train_args), ParallelDims(data=4))
    for text in texts:
        assert text in caught.value.paragraph()


def test_rejected_if_the_epochs_have_fewer_steps():
    with pytest.raises(ConfigError, match="more than the run's 12 steps"):
        check_steps("diloco", config_of("diloco", {"sync_every": 13}), 12)


def test_one_rank_is_a_worker():
    world = Communicator(RankEnv(), torch.device("cpu"))
    for mode in ("local_sgd", "diloco"):
        strategy = make(
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
def test_it_is_single_if_synchronized_at_each_step(tmp_path):
    """Four ranks, two per worker, shares of equal size, and SGD: the trainer's counts divide the
    loss of each worker correctly."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "{model: 'builtin:mlp', task: classify, dataset: 'builtin:digits', parallel: {device: cpu},"
        " local_sgd: {sync_every: 1, workers: 2}, train_args:"
        " {per_device_train_batch_size: 16, optim:"
        " sgd, max_grad_norm: 0, learning_rate: 0.1}}"
    )
    done = run(
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
    modes = json.loads(done.stdout)["modes"]
    assert [(mode["mode"], mode["ok"]) for mode in modes] == [("local_sgd", True)]


@pytest.mark.slow
@pytest.mark.soak
def test_a_run_that_resumes_in_the_middle_of_a_period(tmp_path):
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
    full, half = tmp_path / "full", tmp_path / "half"
    train(full, *args)
    shutil.copytree(full, half)
    shutil.rmtree(half / "checkpoints" / "step-00000008")
    (half / "report.json").unlink()
    train(half, *args)
    assert report(half)["resumed_from_step"] == 5
    assert digest(half) == digest(full)
    assert events(half, "eval")[-1]["loss"] == events(full, "eval")[-1]["loss"]
    result = report(full)
    assert result["traffic_bytes_per_step"]["measured"] == pytest.approx(
        result["traffic_bytes_per_step"]["predicted"], rel=0.02
    )
    assert result["state_memory_bytes"]["measured"] == pytest.approx(
        result["state_memory_bytes"]["predicted"], rel=0.02
    )
    assert result["communication"]["synchronisations"] == 1
    assert [event["step"] for event in events(full, "step")] == [1, 3, 6, 8]
    losses = [event["loss"] for event in events(full, "step")]
    assert max(losses) < 1.1 * min(losses)  # counts of another step than the loss would show
    args = [arg for arg in args if not arg.startswith(("parallel.mode", "train_args.max_steps"))]
    ended = train(
        half, *args, "parallel.mode=ddp", "train_args.max_steps=9", "--allow-config-change"
    )
    assert "the mean of their parameters" in ended.stderr
