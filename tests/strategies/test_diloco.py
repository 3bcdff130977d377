"""`diloco` on real ranks: the definitions of Douillard et al. (2023, 2025), low-precision outer
gradients, and bitwise resume."""

import copy

import pytest
import torch
from local_runs import (
    Plain,
    compute_loss,
    flat_weights,
    gather_checkpoint,
    make_tokens,
    resume_differences,
    resume_strategy,
    set_up_strategy,
    train_step,
)
from ranks import run_ranks
from test_local_sgd import measure_costs, optimizer_groups
from torch import nn

from paceline.strategies.local_sgd.schedule import BLOCK, mean_traffic, row_bytes, share
from paceline.strategies.local_sgd.sync import CODECS, FlatParams, GroupMean

RESUME_CASES = [
    ({"sync_every": 4}, (2, 4)),
    (
        {"sync_every": 5, "fragment_sync_delay": 4, "num_fragments": 2, "outer_dtype": "int8"},
        (4, 8),
    ),
    ({"sync_every": 4, "fragment_sync_delay": 1, "warmup_steps": 3, "outer_dtype": "bf16"}, (2, 7)),
]


def run_on_three_ranks(world):
    resume_mismatches = [
        (local, name)
        for local, save_at in RESUME_CASES
        for name in resume_differences(world, "diloco", local, save_at, 11)
    ]
    errors = [
        compare_with_definition(world, local)
        for local in (
            {"sync_every": 3},
            {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.25},
        )
    ]
    costs = [
        measure_costs(world, local, "diloco")
        for local in (
            {"sync_every": 4, "outer_dtype": "int8", "fragment_sync_delay": 3},
            {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 3, "outer_dtype": "bf16"},
        )
    ]
    means = {dtype: measure_mean(world, dtype) for dtype in ("float32", "bf16", "int8")}
    world.barrier()
    return resume_mismatches, errors, costs, means


def compare_with_definition(world, local):
    """Return the largest difference of the weights from a reference: three models that this process
    trains, with torch's SGD for the outer steps."""
    strategy = set_up_strategy(
        world,
        "diloco",
        {**local, "outer_learning_rate": 0.5, "outer_momentum": 0.8},
        "sgd",
        net=Plain,
        learning_rate=0.2,
    )
    models = [copy.deepcopy(strategy.model) for _ in range(world.size)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None
    optimizers = [
        torch.optim.SGD(optimizer_groups(model), lr=0.2, momentum=0.9) for model in models
    ]
    outer = nn.Parameter(flat_weights(strategy).clone())
    outer_optimizer = torch.optim.SGD([outer], lr=0.5, momentum=0.8, nesterov=True)
    overlap, mix = local.get("fragment_sync_delay", 0), local.get("fragment_update_alpha", 0.0)
    largest_error, gradient = 0.0, None
    for step in range(1, 14):
        train_step(strategy, step - 1)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            share_of_rank = make_tokens(step - 1).view(world.size, -1)[rank]
            optimizer.zero_grad()
            (compute_loss(model, share_of_rank) / len(share_of_rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        flats = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
        if step % local["sync_every"] == 0:
            gradient = outer.detach() - torch.stack(flats).mean(0)
        if step > overlap and (step - overlap) % local["sync_every"] == 0:
            outer.grad = gradient
            outer_optimizer.step()
            flats = [mix * flat + (1 - mix) * outer.detach() for flat in flats]
            for model, flat in zip(models, flats, strict=True):
                nn.utils.vector_to_parameters(flat.clone(), model.parameters())
        largest_error = max(
            largest_error, float((flat_weights(strategy) - flats[world.rank]).abs().max())
        )
    return largest_error


def measure_mean(world, dtype):
    """Return the mean by the collective, the exact mean, the largest magnitude and the bytes sent
    for vectors of an odd size, and whether the mean of a vector with NaN is NaN."""
    vectors = [
        torch.randn(1003, generator=torch.Generator().manual_seed(rank))
        for rank in range(world.size)
    ]
    sent = world.traffic.total
    mean = GroupMean(vectors[world.rank].clone(), world, dtype).value()
    sent = world.traffic.total - sent
    mean_of_nan = GroupMean(
        torch.full((300,), float("nan") if world.rank == 1 else 1.0), world, dtype
    ).value()
    exact = torch.stack([vector.double() for vector in vectors]).mean(0)
    return (
        mean,
        exact,
        max(float(vector.abs().max()) for vector in vectors),
        sent,
        bool(mean_of_nan.isnan().all()),
    )


@pytest.mark.soak
def test_resume_definition_costs_and_means_on_three_ranks():
    results = run_ranks(run_on_three_ranks, 3)
    for resume_mismatches, errors, costs, means in results:
        assert not resume_mismatches
        assert max(errors) < 1e-5
        for state, state_measured, traffic, traffic_measured in costs:
            assert state == pytest.approx(state_measured, rel=0.02)
            assert traffic == pytest.approx(traffic_measured, rel=0.02)
        # Two roundings, of each vector and of their mean, by at most half a unit each: 2^-8 of the
        # magnitude in bf16, the largest magnitude / 127 in int8.
        for dtype, bound in (("float32", 1e-6), ("bf16", 2 * 2**-9), ("int8", 2 * 0.5 / 127)):
            mean, exact, largest, sent, is_nan = means[dtype]
            assert float((mean.double() - exact).abs().max()) <= bound * largest * 1.001
            assert torch.equal(mean, results[0][3][dtype][0])  # equal bits on all ranks
            assert sent == sum(mean_traffic(1003, 3, dtype).values())
            assert is_nan


def run_on_two_ranks(world):
    resume_mismatches = resume_differences(
        world, "diloco", {"sync_every": 3, "fragment_sync_delay": 2, "outer_dtype": "int8"}, (4,), 8
    )
    losses = {}
    for name, local in {
        "ddp": None,
        "every 5": {"sync_every": 5},
        "int8, delayed, streamed": {
            "sync_every": 5,
            "outer_dtype": "int8",
            "fragment_sync_delay": 2,
            "num_fragments": 2,
        },
    }.items():
        run = set_up_strategy(world, "ddp" if local is None else "diloco", local, net=Plain)
        losses[name] = [train_step(run, step) for step in range(60)]
    run = set_up_strategy(world, "diloco", {"sync_every": 3})
    for step in range(4):
        train_step(run, step)
    mean = torch.stack(world.gather_objects(flat_weights(run))).mean(0)
    single_worker = resume_strategy(
        world, "diloco", {"sync_every": 3, "workers": 1}, gather_checkpoint(run)
    )
    outer = {
        name: [torch.equal(*pair) for pair in pair_ranges(run, single_worker, name)]
        for name in run.outer_state()
    }
    world.barrier()
    return (
        resume_mismatches,
        losses,
        mean,
        flat_weights(single_worker),
        outer,
        [text for _, text in single_worker.notices],
    )


def pair_ranges(run, other, name):
    """Return each range of ``other``'s outer state together with the same range of that of ``run``,
    which has a single range."""
    (_, full), *_ = run.outer_state()[name]
    ranges = other.outer_state()[name]
    return [(values, full[start : start + values.numel()]) for start, values in ranges]


def test_convergence_and_change_of_workers_on_two_ranks():
    for resume_mismatches, losses, mean, single_worker, outer, notices in run_ranks(
        run_on_two_ranks, 2
    ):
        assert not resume_mismatches
        start, plain = losses["ddp"][0], sum(losses["ddp"][-5:]) / 5
        for name in ("every 5", "int8, delayed, streamed"):
            final_loss = sum(losses[name][-5:]) / 5
            assert final_loss < plain + 0.1 * (start - plain), (name, final_loss, plain, start)
        # A run with another number of workers starts from the mean and keeps the outer state.
        torch.testing.assert_close(single_worker, mean)
        assert all(all(ranges_equal) for ranges_equal in outer.values())
        assert "2 workers" in notices[-1]


def run_on_four_ranks(world):
    local = {
        "sync_every": 4,
        "workers": 2,
        "num_fragments": 3,
        "fragment_sync_delay": 2,
        "outer_dtype": "bf16",
    }
    resume_mismatches = resume_differences(world, "diloco", local, (3, 6), 9)
    costs = measure_costs(world, local, "diloco")
    world.barrier()
    return resume_mismatches, costs


@pytest.mark.soak
def test_two_workers_of_two_ranks_shard_the_outer_state():
    for resume_mismatches, (state, state_measured, traffic, traffic_measured) in run_ranks(
        run_on_four_ranks, 4
    ):
        assert not resume_mismatches
        assert state == pytest.approx(state_measured, rel=0.02)
        assert traffic == pytest.approx(traffic_measured, rel=0.02)


def test_flat_params_shares_and_codecs():
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(6.0), torch.arange(7.0, 12.0)]
    vector = FlatParams(tensors)
    assert vector.read(4, 9).tolist() == [4, 5, 6, 7, 8]
    vector.write(5, torch.tensor([50.0, 60.0, 70.0]))
    assert (tensors[0][1, 2], tensors[1], tensors[2][0]) == (50, 60, 70)
    assert [share(3, 10, 3, rank) for rank in range(3)] == [(3, 6), (6, 9), (9, 10)]
    rows = torch.randn(2, 2 * BLOCK) * torch.tensor([[1.0], [1000.0]])
    rows[0, :BLOCK] = 0
    codec = CODECS["int8"]
    messages = codec.encode(rows)
    assert messages.dtype == torch.uint8
    assert messages.shape == (2, row_bytes(2 * BLOCK, "int8"))
    scales = rows.view(2, 2, BLOCK).abs().amax(2, keepdim=True) / 127
    decoded = codec.decode(messages)
    errors = (decoded - rows).view(2, 2, BLOCK).abs()
    assert bool((errors <= scales * 0.5001).all())
    assert torch.equal(codec.decode(codec.encode(decoded)), decoded)
    bf16 = CODECS["bf16"]
    assert torch.equal(bf16.decode(bf16.encode(rows)), rows.bfloat16().float())
