"""Mixtures of sources: which source each position reads, and when an epoch ends."""

from itertools import pairwise

import numpy as np
import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.data.order.mixture import Mixture, WeightSchedule
from paceline.data.order.packed import PackedRows
from paceline.data.order.row_orders import MixedOrder
from paceline.data.order.rows import SampleRows

STOPPING = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")


def make_mixture(sizes=(30, 70, 20), weights=(1.0, 2.0, 1.0), stopping="first_exhausted", batch=8):
    return Mixture(sizes, WeightSchedule.of(weights), stopping, batch, seed=3)


def make_order(stopping="first_exhausted", lengths=None, batch=8, weights=(1.0, 2.0, 1.0)):
    mixture = make_mixture(stopping=stopping, batch=batch, weights=weights)
    starts = np.cumsum([0, *mixture.num_rows]).tolist()
    sources = [SampleRows(start, stop - start, 3, True) for start, stop in pairwise(starts)]
    steps = -(-mixture.epoch_rows() // batch)
    return MixedOrder(sources, mixture, starts[-1], steps, lengths)


@pytest.mark.parametrize("stopping", STOPPING)
def test_choice_does_not_depend_on_earlier_reads(stopping):
    reference = make_mixture(stopping=stopping).read(0, 50_000)
    for start, stop in [(49_990, 50_000), (16_380, 16_390), (0, 5)]:
        for read, expected in zip(
            make_mixture(stopping=stopping).read(start, stop), reference, strict=True
        ):
            assert np.array_equal(read, expected[start:stop])
    counts = make_mixture(stopping=stopping).counts(40_000)
    assert np.array_equal(counts, np.bincount(reference[0][:40_000], minlength=3))


def test_ordinals_count_choices_of_the_same_source():
    sources, ordinals = make_mixture().read(0, 40_000)
    for source in range(3):
        assert np.array_equal(ordinals[sources == source], np.arange((sources == source).sum()))


def test_shares_are_the_weights():
    counts = make_mixture().counts(200_000)
    assert np.allclose(counts / 200_000, [0.25, 0.5, 0.25], atol=0.005)


def test_weights_change_linearly_between_steps():
    schedule = WeightSchedule.of([{0: 0.9, 1000: 0.5}, {0: 0.1, 1000: 0.5}, 0.0])
    assert np.allclose(schedule.at(np.array([500, 5000])), [[0.7, 0.3, 0], [0.5, 0.5, 0]])
    mixture = Mixture((100, 100, 100), schedule, "first_exhausted", 64, seed=1)
    sources, _ = mixture.read(0, 64 * 2000)
    shares = [(sources[64 * at : 64 * (at + 100)] == 0).mean() for at in (0, 450, 950, 1900)]
    assert np.allclose(shares, [0.88, 0.7, 0.5, 0.5], atol=0.03)
    assert not (sources == 2).any()


def test_epoch_ends_when_a_source_or_every_source_is_exhausted():
    sources, ordinals = make_mixture().read(0, 1000)
    last_rows = [
        int(np.flatnonzero((sources == source) & (ordinals == size - 1))[0]) + 1
        for source, size in enumerate((30, 70, 20))
    ]
    assert make_mixture().epoch_rows() == min(last_rows)
    assert make_mixture(stopping="all_exhausted").epoch_rows() == max(last_rows)


def test_without_replacement_each_epoch_has_each_row_once():
    mixture = make_mixture(stopping="all_exhausted_without_replacement", weights=(8.0, 1.0, 1.0))
    assert mixture.epoch_rows() == 120
    for epoch in (0, 1, 300):  # the last one is in another chunk
        sources, _ = mixture.read(120 * epoch, 120 * (epoch + 1))
        assert np.bincount(sources).tolist() == [30, 70, 20]
        assert (sources[:30] == 0).mean() > 0.5


def test_source_with_weight_0_from_some_step_on_cannot_be_exhausted():
    weights = ({0: 1.0, 10: 0.0}, 1.0, 1.0)
    assert make_mixture(weights=weights).epoch_rows() > 0
    with raises_error(ConfigError, code="unused-source"):
        make_mixture((3000, 70, 20), weights, "all_exhausted").epoch_rows()


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("lengths", [None, np.arange(1, 121)])
def test_every_source_has_epochs_of_its_own(stopping, lengths):
    order = make_order(stopping, lengths)
    num_steps = 200
    keys = np.concatenate([order.global_batch(step) for step in range(num_steps)])
    assert len(keys) == 8 * num_steps  # every batch is full
    for start, stop in [(0, 30), (30, 100), (100, 120)]:
        of_source = keys[(keys[:, 1] >= start) & (keys[:, 1] < stop)]
        complete = len(of_source) // (stop - start) * (stop - start)
        epochs = of_source[:complete].reshape(-1, stop - start, 2)
        assert all(sorted(epoch[:, 1]) == list(range(start, stop)) for epoch in epochs)
        assert (np.diff(of_source[:, 0]) >= 0).all()
    counts = np.bincount(keys[:, 1], minlength=120)
    assert np.array_equal(order.times_read(num_steps), counts)
    for step in (0, 7):
        parts = np.concatenate(order.micro_batches(step, 3))
        assert sorted(parts[:, 1]) == sorted(order.global_batch(step)[:, 1])


def test_packed_rows_are_mixed_by_row():
    lengths = np.random.default_rng(0).integers(1, 65, 300)
    sources = [
        PackedRows(lengths[:200], 64, 0, 1, True),
        PackedRows(lengths[200:], 64, 200, 1, True),
    ]
    sizes = tuple(source.num_rows for source in sources)
    mixture = Mixture(sizes, WeightSchedule.of([1.0, 3.0]), "all_exhausted", 4, seed=1)
    order = MixedOrder(sources, mixture, 300, 50, None)
    for step in range(60):
        rows = order.rows(step)
        assert all(lengths[row[:, 1]].sum() <= 64 for row in rows)
        assert all(len({int(index) >= 200 for index in row[:, 1]}) == 1 for row in rows)
        micro_batches = order.micro_batches(step, 4)
        assert [len(part) for part in micro_batches] == [len(row) for row in rows]
