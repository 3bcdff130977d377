"""`parallel.balance`: shares of the micro-batches by speed, and the settings that are rejected."""

from typing import Any

import pytest
from pydantic import ValidationError
from raised import raises_error

from paceline.config.derive import derive
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counts_text, weighted_shares
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.balance import (
    equal_notice,
    is_divisible,
    rank_weights,
    shares_by_speed,
    step_seconds,
)
from paceline.parallel.registry import check_strategy


def make_config(balance: Any = "speed", **settings: Any) -> Config:
    parallel = {"balance": balance, **settings.pop("parallel", {})}
    return Config(model="m", dataset="d", parallel=parallel, **settings)


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (4, [3, 1], [3, 1]),
        (8, [1, 1, 1, 1], [2, 2, 2, 2]),
        (6, [0.1, 0.1, 0.1], [2, 2, 2]),
        (4, [1000, 1], [3, 1]),
        (5, [1e9, 1, 1, 1], [2, 1, 1, 1]),
        (7, [2, 2, 1], [3, 3, 1]),
        (5, [1, 1], [3, 2]),
    ],
)
def test_weighted_shares_use_largest_remainder(
    total: int, weights: list[float], expected: list[int]
) -> None:
    assert weighted_shares(total, weights) == expected


@pytest.mark.parametrize("total", [3, 4, 7, 64])
@pytest.mark.parametrize("weights", [[1.0, 2.5, 0.3], [5, 1e-6, 1e-6], [1, 1, 1]])
def test_shares_add_up_and_leave_no_rank_idle(total: int, weights: list[float]) -> None:
    shares = weighted_shares(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1


def test_balancing_halves_step_time_with_one_slow_rank() -> None:
    seconds = [1.0, 3.0]
    shares = shares_by_speed(8, seconds)
    assert shares == [6, 2]
    assert step_seconds([4, 4], seconds) / step_seconds(shares, seconds) == 2.0


def test_counts_text_groups_equal_shares() -> None:
    assert counts_text([6, 2]) == "6+2"
    assert counts_text([3] * 8 + [1] * 8) == "8 × 3 + 8 × 1"


def test_host_weights_apply_to_all_ranks_of_the_host() -> None:
    assert rank_weights(make_config([3, 1]), [0, 1, 2, 0]) == [3, 3, 3, 1]
    assert rank_weights(make_config([4, 3, 2, 1]), [0, 1, 0, 1]) == [4, 3, 2, 1]
    with raises_error(ConfigError, code="wrong-number-of-weights"):
        rank_weights(make_config([1, 1, 2]), [0, 1, 0, 1])


@pytest.mark.parametrize("balance", ["fast", [], [1, 0], [-1, 2], [float("inf"), 1], "1:2"])
def test_rejects_invalid_weights(balance: Any) -> None:
    with pytest.raises(ValidationError):
        make_config(balance)


@pytest.mark.parametrize(
    ("mode", "axes", "reason"),
    [
        ("zero2", ParallelDims(shard=2), "reduces gradients in every micro-batch"),
        ("zero3", ParallelDims(shard=2), "gathers weights in every micro-batch"),
        ("deepspeed", ParallelDims(data=2), "same number of micro-batches"),
        ("local_sgd", ParallelDims(data=2), "counts equally in the average"),
        ("diloco", ParallelDims(data=2), "counts equally in the average"),
        ("hybrid", ParallelDims(data=2, tensor=2), "communicate in every micro-batch"),
        ("pipeline", ParallelDims(pipeline=2), "communicate in every micro-batch"),
        ("dp", ParallelDims(data=2), "lockstep"),
    ],
)
def test_rejects_unsupported_strategies(mode: str, axes: ParallelDims, reason: str) -> None:
    with pytest.raises(ConfigError) as error_info:
        check_strategy(mode, make_config(parallel={"mode": mode}), axes)
    text = error_info.value.paragraph()
    assert f"`parallel.balance: speed` is not supported with `parallel.mode: {mode}`" in text
    assert reason in text


@pytest.mark.parametrize(
    ("balance", "settings", "error"),
    [
        (
            "speed",
            {"compression": {"method": "signsgd"}},
            ("balance-with-signsgd", "parallel.balance"),
        ),
        (
            "speed",
            {"compression": {"method": "topk"}, "train_args": {"optim": "adamw"}},
            ("balance-with-local-moments", "parallel.balance"),
        ),
        ([3, 1, 1], {}, ("wrong-number-of-weights", "")),
        (
            [3, 1],
            {"parallel": {"nnodes": "1:2"}},
            ("balance-with-changing-hosts", "parallel.balance"),
        ),
    ],
)
def test_rejects_conflicting_settings(
    balance: Any, settings: dict[str, Any], error: tuple[str, str]
) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy("ddp", make_config(balance, **settings), ParallelDims(data=2))


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@pytest.mark.parametrize("balance", ["speed", [3, 1]])
def test_data_parallel_strategies_are_supported(mode: str, balance: Any) -> None:
    check_strategy(mode, make_config(balance), ParallelDims(data=2))
    check_strategy(
        "ddp", make_config(balance, compression={"method": "powersgd"}), ParallelDims(data=2)
    )


def notice_for(replicas: int, accumulation: int, balance: Any = "speed") -> tuple[str, str] | None:
    settings = make_config(balance, train_args={"gradient_accumulation_steps": accumulation})
    return equal_notice(
        settings,
        derive(
            settings,
            world_size=replicas,
            rows_per_epoch=lambda _: 100,
            num_eval=0,
            default_learning_rate=1e-3,
        ),
    )


def test_warns_about_too_few_micro_batches() -> None:
    level, text = notice_for(2, 1) or ("", "")
    assert level == "warning"
    assert (
        "`parallel.balance: speed` has no effect: it needs at least 4 micro-batches per step on 2"
        " ranks" in text
    )
    assert "gradient_accumulation_steps: 2" in text
    assert "at least 16 micro-batches" in (notice_for(8, 1, [1] * 8) or ("", ""))[1]
    assert (notice_for(1, 8) or ("", ""))[0] == "info"
    assert notice_for(2, 2) is None
    assert notice_for(2, 1, "equal") is None
    assert [is_divisible(2, count) for count in (2, 4)] == [False, True]
    assert [is_divisible(4, count) for count in (4, 8)] == [False, True]
    assert is_divisible(3, 6)
