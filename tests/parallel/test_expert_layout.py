"""The ranks that divide the experts: their groups, the layouts, and what is refused."""

from typing import get_args

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.config.schema.train_args_sections import OptimizerName
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import EXPERT, EXPERT_COPIES, ParallelDims
from paceline.parallel.limits.experts import EXPERTS
from paceline.parallel.registry import check_strategy, layout
from paceline.verify.modes import make_mode


def test_groups_are_adjacent_ranks() -> None:
    dims = ParallelDims(data=2, shard=4, expert=4)
    assert dims.size == 8
    assert dims.subgroups((EXPERT,)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dims.subgroups((EXPERT_COPIES,)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert "expert" not in dims.coordinates(5)
    assert dims.text() == "data 2 × shard 4 × expert 4"


def test_layouts() -> None:
    assert layout(Parallel(expert=2), 4).axes == ParallelDims(data=4, expert=2)
    sharded = layout(Parallel(shard=4, expert=2), 4)
    assert (sharded.strategy, sharded.axes) == ("hybrid", ParallelDims(shard=4, expert=2))
    assert layout(Parallel(expert=1), 4).axes == ParallelDims(data=4)
    config = Config(model="m", dataset=["d"])
    mode = make_mode("data4-expert2", config, 4)
    assert mode.layout.axes == ParallelDims(data=4, expert=2)
    assert make_mode("ddp", config.model_copy(update={"parallel": mode.parallel}), 4)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"mode": "zero3", "expert": 2}, "expert-with-mode"),
        ({"mode": "tensor", "expert": 2}, "expert-with-mode"),
        ({"tensor": 2, "expert": 2}, "expert-with-axis"),
        ({"pipeline": 2, "expert": 2}, "expert-with-axis"),
        ({"expert": 3}, "expert-does-not-divide-ranks"),
        ({"shard": 4, "expert": 8}, "expert-does-not-divide-ranks"),
    ],
)
def test_other_layouts_are_refused(settings: dict[str, str | int], code: str) -> None:
    with raises_error(ConfigError, code=code):
        layout(Parallel.model_validate(settings), 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"train_args": {"torch_compile": True}},
        {"train_args": {"optim": "muon"}},
        {"compression": {"method": "topk"}},
        {"parallel": {"all_reduce_algorithm": "ring"}},
    ],
)
def test_other_settings_are_refused(settings: dict[str, dict[str, str | bool]]) -> None:
    config = Config.model_validate({"model": "m", "dataset": ["d"], **settings})
    with raises_error(ConfigError, code="not-supported"):
        check_strategy("hybrid", config, ParallelDims(data=4, expert=2))


def test_error_names_every_optimizer_that_works() -> None:
    limit = next(each for each in EXPERTS if each.setting == "train_args.optim")
    assert limit.allowed is not None
    assert set(limit.allowed.split(", ")) | {"muon", "adafactor"} == set(get_args(OptimizerName))
    assert "adamw_8bit" in limit.allowed
