"""Compressors against their definitions, on fixed tensors and real ranks: values, residuals and
bytes sent."""

import math
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks

from paceline.config.schema import Config
from paceline.config.schema.compression import CHAINS, Compression
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.parallel.state import SECOND_MOMENT
from paceline.strategies.reducers.compression.base import slot_view
from paceline.strategies.reducers.compression.codecs import CODECS
from paceline.strategies.reducers.compression.local_adam import DirectionOptimizer, LocalAdam
from paceline.strategies.reducers.compression.powersgd import orthonormal
from paceline.strategies.reducers.compression.quantize import pack_bits, unpack_bits
from paceline.strategies.reducers.compression.reducer import make_compressor
from paceline.strategies.reducers.compression.sizes import (
    FORMATS,
    BucketShape,
    TensorSlot,
    kept_bytes,
    matrix_of,
    num_chosen,
    sent_bytes,
)
from paceline.strategies.reducers.compression.sparsify import largest

#: Two matrices, a vector and a scalar, with padding between them.
SLOTS = (
    TensorSlot("a", 0, (12, 10)),
    TensorSlot("v", 128, (7,)),
    TensorSlot("b", 144, (9, 2, 4)),
    TensorSlot("s", 224, ()),
)
BUCKET = BucketShape(0, 240, SLOTS)
METHODS = ["bf16", "fp16", "int8", "topk", "randomk", "powersgd", "signsgd"]
METHODS += [[first, second] for first, seconds in CHAINS.items() for second in seconds]
SETTINGS = {"ratio": 0.1, "rank": 2}


def make_gradients(rank, step):
    """Return the gradients of a rank: values in the slots, zeros between them."""
    flat = torch.zeros(BUCKET.size)
    noise = torch.randn(BUCKET.size, generator=torch.Generator().manual_seed(100 * step + rank))
    for slot in SLOTS:
        slot_view(slot, flat).copy_(slot_view(slot, noise))
    return flat


def reduce_with_each_method(world):
    """Return, by method and for each of three steps, the sum, the residual before and after, the
    bytes counted and the bytes predicted."""
    results = {}
    for method in METHODS:
        settings = Compression(method=method, **SETTINGS)
        compressor = make_compressor(settings, 3)
        state = compressor.initial_state(BUCKET, world.device)
        steps = []
        for step in range(3):
            flat = make_gradients(world.rank, step)
            before = {kind: flat.clone() for kind, flat in state.flats.items()}
            sent = dict(world.traffic.bytes_by_collective)
            compressor.reduce(flat, state, world, step)
            counted = {
                key: size - sent.get(key, 0)
                for key, size in world.traffic.bytes_by_collective.items()
            }
            after = {kind: flat.clone() for kind, flat in state.flats.items()}
            steps.append(
                (
                    flat,
                    before,
                    after,
                    {k: v for k, v in counted.items() if v},
                    sent_bytes(compressor.settings, BUCKET, world.size),
                )
            )
        assert sum(tensor.nbytes for tensor in state.all_tensors()) == kept_bytes(
            Config.model_validate(
                {
                    "model": "m",
                    "dataset": "d",
                    "compression": settings,
                    "train_args": {"optim": "adafactor"},  # no local moments
                }
            ),
            BUCKET,
        )
        results[str(method)] = steps
    world.barrier()
    return results


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return run_ranks(reduce_with_each_method, request.param)


def test_all_ranks_get_equal_bits_and_send_the_predicted_bytes(results):
    for method in map(str, METHODS):
        for step in range(3):
            first = results[0][method][step]
            assert first[3] == first[4], method
            for other in results[1:]:
                assert torch.equal(first[0], other[method][step][0]), method
            padding = first[0].clone()
            for slot in SLOTS:
                slot_view(slot, padding).zero_()
            assert not padding.any(), method


def test_results_and_residuals_add_up_to_the_gradients(results):
    """Over all ranks, the results and the residuals after a step add up to the gradients and the
    residuals before it."""
    for method in METHODS:
        if method in ("bf16", "fp16", "int8", "signsgd"):
            assert not results[0][str(method)][0][1], method  # these methods have no state
            continue
        for step in range(3):
            out = results[0][str(method)][step][0].double()
            before = sum(rank[str(method)][step][1]["residual"].double() for rank in results)
            after = sum(rank[str(method)][step][2]["residual"].double() for rank in results)
            total = sum(make_gradients(rank, step).double() for rank in range(len(results)))
            torch.testing.assert_close(
                out + after,
                total + before,
                rtol=0,
                atol=2e-5,
                msg=lambda text, m=method: f"{m}: {text}",
            )


def test_cast_compressors_sum_to_their_precision(results):
    total = sum(make_gradients(rank, 0) for rank in range(len(results)))
    largest_value = max(float(make_gradients(rank, 0).abs().max()) for rank in range(len(results)))
    for method, allowed in (("bf16", 2**-8), ("fp16", 2**-10), ("int8", 1 / 127)):
        error = (results[0][method][0][0] - total).abs().max()
        # the rounding of each rank, and that of the sum
        assert 0 < error <= (len(results) * largest_value + float(total.abs().max())) * allowed, (
            method
        )


def test_topk_sends_the_largest_values_of_each_rank(results):
    count = math.ceil(0.1 * BUCKET.numel)
    expected, residuals = torch.zeros(BUCKET.size), []
    for rank in range(len(results)):
        values = make_gradients(rank, 0)
        chosen = values.abs().topk(count).indices
        expected[chosen] += values[chosen]
        residuals.append(values.index_fill(0, chosen, 0.0))
    assert (expected < 0).any()
    torch.testing.assert_close(results[0]["topk"][0][0], expected, rtol=0, atol=1e-6)
    for result, residual in zip(results, residuals, strict=True):
        assert torch.equal(result["topk"][0][2]["residual"], residual)


def test_randomk_sends_the_same_indices_on_all_ranks_and_new_ones_each_step(results):
    count, seen = math.ceil(0.1 * BUCKET.numel), []
    for step in range(3):
        indices = results[0]["randomk"][step][0].nonzero().view(-1)
        assert len(indices) == count
        uncompressed = sum(
            make_gradients(rank, step) + result["randomk"][step][1]["residual"]
            for rank, result in enumerate(results)
        )
        torch.testing.assert_close(
            results[0]["randomk"][step][0][indices], uncompressed[indices], rtol=0, atol=1e-5
        )
        seen.append(indices)
    assert not torch.equal(seen[0], seen[1])


def test_powersgd_projects_the_sum(results):
    """With orthonormal P the result is P Pᵀ M: it has the configured rank, and the residual is
    orthogonal to it."""
    for step in range(3):
        out = results[0]["powersgd"][step][0]
        uncompressed = sum(
            make_gradients(rank, step) + result["powersgd"][step][1]["residual"]
            for rank, result in enumerate(results)
        )
        for slot, rank in ((SLOTS[0], 2), (SLOTS[2], 2)):
            rows = slot.shape[0]
            matrix = slot_view(slot, out).reshape(rows, -1)
            total = slot_view(slot, uncompressed).reshape(rows, -1)
            assert torch.linalg.matrix_rank(matrix, rtol=1e-4) == rank
            assert float(((total - matrix) * matrix).sum().abs()) < 1e-3
        for slot in (SLOTS[1], SLOTS[3]):  # vectors are sent in full
            torch.testing.assert_close(
                slot_view(slot, out), slot_view(slot, uncompressed), rtol=0, atol=1e-5
            )


def test_signsgd_is_a_majority_vote(results):
    votes = sum(make_gradients(rank, 0).sign() for rank in range(len(results)))
    size = sum(
        float(make_gradients(rank, 0).abs().sum()) / BUCKET.numel for rank in range(len(results))
    )
    torch.testing.assert_close(results[0]["signsgd"][0][0], votes.sign() * size)
    if len(results) % 2 == 0:
        # in a tie the result is zero
        assert (results[0]["signsgd"][0][0][:120] == 0).any()


# -- single functions
def test_largest_is_exact_with_and_without_sampling():
    for seed, numel, count in (
        (0, 500_000, 5000),
        (1, 500_000, 1),
        (2, 300, 7),
        (3, 200_000, 150_000),
    ):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3
        indices = largest(values.abs(), count)
        assert torch.equal(indices, values.abs().topk(count).indices.sort().values)
    values = torch.zeros(500_000)
    values[123_457] = -3.0
    # nearly all of one magnitude: no threshold from the sample, and still an exact result
    assert 123_457 in largest(values.abs(), 10)
    values[77] = float("nan")
    assert 77 in largest(values.abs(), 10)


def roundtrip(name, values, seed=0):
    """Return the values after encoding and decoding."""
    codec = CODECS[name]
    return codec.decode(codec.encode(values[None], torch.Generator().manual_seed(seed)))[0]


def test_int8_is_unbiased_and_preserves_non_finite_values():
    values = torch.linspace(-1, 1, 64)
    samples = torch.stack([roundtrip("int8", values, seed) for seed in range(4000)])
    # five standard errors of rounding to steps of 1/127, whose deviation is at most half a step
    assert float((samples.mean(0) - values).abs().max()) < 5 * 0.5 / 127 / math.sqrt(4000)
    assert float((samples[0] - values).abs().max()) <= 1 / 127 + 1e-7
    for non_finite in (math.nan, math.inf):
        assert not roundtrip("int8", torch.tensor([1.0, non_finite, 0.0, 0.0])).isfinite().all()
    assert not roundtrip("int8", torch.zeros(8)).any()


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 1e6, 1e30])
def test_fp16_keeps_small_and_large_gradients(size):
    values = torch.tensor([1.0, -0.3, 1e-3, 0.0]) * size
    torch.testing.assert_close(roundtrip("fp16", values), values, rtol=2**-10, atol=0)


@pytest.mark.parametrize(("name", "precision"), [("bf16", 2**-8), ("fp16", 2**-10), ("int8", 0.1)])
def test_encoded_messages_have_the_predicted_size(name, precision):
    codec, rows = CODECS[name], torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    messages = codec.encode(rows, torch.Generator().manual_seed(1))
    width, header = FORMATS[name]
    assert messages.shape == (3, header + 8 * width)
    decoded = codec.decode(messages)
    torch.testing.assert_close(decoded, rows, rtol=precision, atol=0.05 if name == "int8" else 0)
    assert torch.equal(codec.decode(messages[1:2]), decoded[1:2])


def test_packed_bits_matrix_shapes_and_orthonormalization():
    bits = torch.rand(37, generator=torch.Generator().manual_seed(0)) > 0.5
    assert len(pack_bits(bits)) == 5
    assert torch.equal(unpack_bits(pack_bits(bits), 37).bool(), bits)
    assert matrix_of((64, 4, 8), 4) == (64, 32, 4)
    assert matrix_of((64,), 4) is None
    assert matrix_of((4, 4), 4) is None  # P and Q would be larger
    orthonormal_columns = orthonormal(
        torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    )
    torch.testing.assert_close(
        orthonormal_columns.t() @ orthonormal_columns, torch.eye(3), rtol=0, atol=1e-6
    )
    degenerate = orthonormal(torch.ones(5, 2))
    assert degenerate[:, 0].norm() > 0
    assert not degenerate[:, 1].any()


def test_powersgd_recovers_after_a_zero_gradient():
    world = Communicator(RankEnv(), torch.device("cpu"))
    compressor = make_compressor(Compression(method="powersgd", rank=2), 0)
    state = compressor.initial_state(BUCKET, world.device)
    compressor.reduce(torch.zeros(BUCKET.size), state, world, 0)
    flat = torch.zeros(BUCKET.size)
    # only in the last row, to which a factor that has become zero would be blind
    slot_view(SLOTS[0], flat)[-1] = 1.0
    compressor.reduce(flat, state, world, 1)
    torch.testing.assert_close(slot_view(SLOTS[0], flat)[-1], torch.ones(10))


def test_warmup_decreases_the_ratio_geometrically():
    settings = Compression(method="topk", ratio=0.01, warmup_steps=4)
    bucket = BucketShape(0, 10_000, (TensorSlot("w", 0, (10_000,)),))
    counts = [num_chosen(settings, bucket, step) for step in range(6)]
    assert counts[0] == 2500
    assert counts[4:] == [100, 100]
    ratios = [after / before for before, after in pairwise(counts[:5])]
    assert max(ratios) - min(ratios) < 0.01


def test_local_adam_with_equal_gradients_matches_adamw():
    """With a third of the gradient on each of three ranks, applying the sum of their directions is
    a step of torch's AdamW."""
    shape = BucketShape(0, 16, (TensorSlot("w", 0, (10,)),))
    theirs, ours = (torch.nn.Parameter(torch.linspace(-1, 1, 10)) for _ in range(2))
    adam = torch.optim.AdamW([theirs], lr=0.1, betas=(0.0, 0.99), weight_decay=0.1)
    apply = DirectionOptimizer([{"params": [ours], "lr": 0.1, "weight_decay": 0.1}])
    local, device = LocalAdam(0.99, 1e-8), torch.device("cpu")
    state = make_compressor(Compression(method="topk"), 0).initial_state(shape, device)
    local.add_state(state, device)
    for step in range(4):
        gradient = torch.randn(16, generator=torch.Generator().manual_seed(step))
        theirs.grad = gradient[:10].clone()
        share = gradient / 3
        local.direct(share, state, step + 1, 3)
        ours.grad = 3 * share[:10]
        adam.step()
        apply.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_topk_weights_directions_by_root_of_gradient_magnitude():
    world, shape = (
        Communicator(RankEnv(), torch.device("cpu")),
        BucketShape(0, 16, (TensorSlot("w", 0, (4,)),)),
    )
    compressor = make_compressor(Compression(method="topk", ratio=0.25), 0)
    state = compressor.initial_state(shape, world.device)
    state.flats[SECOND_MOMENT] = torch.zeros(16)
    # the square roots of the gradient's magnitude are 0.1, 2, 0.01 and 1
    state.flats[SECOND_MOMENT][:4] = torch.tensor([1e-4, 16.0, 1e-8, 1.0])
    flat = torch.zeros(16)
    flat[:4] = torch.tensor([5.0, -1.0, 9.0, 1.5])
    compressor.reduce(flat, state, world, 0)
    assert flat[:4].tolist() == [0.0, -1.0, 0.0, 0.0]
    assert state.flats["residual"][:4].tolist() == [5.0, 0.0, 9.0, 1.5]
