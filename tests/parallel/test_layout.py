"""From the `parallel` section of a config to the device mesh, and errors for sizes that do not
fit."""

import re
import subprocess
import sys
from typing import Any

import pytest
from raised import raises_error

from paceline.config.diff import OTHER_TRAINING
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.limits.idle import notices_of_idle_axes
from paceline.parallel.registry import STRATEGIES, get_spec, layout, load_object, mode_of
from paceline.parallel.strategy import Strategy


@pytest.mark.parametrize(
    ("settings", "devices", "strategy", "axes"),
    [
        ({}, 1, "single", ParallelDims()),
        ({}, 3, "ddp", ParallelDims(data=3)),
        ({"mode": "ddp"}, 2, "ddp", ParallelDims(data=2)),
        ({"mode": "single"}, 1, "single", ParallelDims()),
        ({"mode": "fsdp"}, 4, "zero3", ParallelDims(shard=4)),
        ({"mode": "zero2", "data": 2}, 4, "zero2", ParallelDims(data=2, shard=2)),
        ({"mode": "tensor"}, 4, "tensor", ParallelDims(tensor=4)),
        ({"mode": "tensor", "tensor": 2, "data": 2}, 4, "tensor", ParallelDims(data=2, tensor=2)),
        ({"mode": "tensor", "tensor": 2}, 4, "tensor", ParallelDims(data=2, tensor=2)),
        ({"mode": "zero3", "shard": 2}, 4, "zero3", ParallelDims(data=2, shard=2)),
        ({"mode": "pipeline"}, 4, "pipeline", ParallelDims(pipeline=4)),
        ({"tensor": 2}, 4, "hybrid", ParallelDims(data=2, tensor=2)),
        ({"mode": "cp"}, 4, "context", ParallelDims(context=4)),
        ({"mode": "context", "context": 2}, 4, "context", ParallelDims(data=2, context=2)),
        ({"context": 2}, 4, "hybrid", ParallelDims(data=2, context=2)),
        ({"mode": "ddp", "context": 2}, 4, "ddp", ParallelDims(data=2, context=2)),
        ({"mode": "zero3", "context": 2}, 4, "zero3", ParallelDims(shard=2, context=2)),
        ({"mode": "zero2", "context": 4}, 4, "zero2", ParallelDims(context=4)),
        ({"mode": "tensor", "context": 2}, 4, "tensor", ParallelDims(tensor=2, context=2)),
        ({"mode": "pipeline", "context": 2}, 4, "pipeline", ParallelDims(pipeline=2, context=2)),
        (
            {"data": 2, "shard": 1, "tensor": 2, "pipeline": 1},
            4,
            "hybrid",
            ParallelDims(data=2, tensor=2),
        ),
        (
            {"shard": 2, "tensor": 2, "pipeline": 2},
            8,
            "hybrid",
            ParallelDims(shard=2, tensor=2, pipeline=2),
        ),
    ],
)
def test_layout_of_settings(
    settings: dict[str, Any], devices: int, strategy: str, axes: ParallelDims
) -> None:
    result = layout(Parallel(**settings), devices)
    assert (result.strategy, result.axes, result.num_processes) == (strategy, axes, devices)


def test_dp_has_one_process() -> None:
    result = layout(Parallel(mode="dp"), 4)
    assert (result.num_processes, result.world_size, result.axes.replicas) == (1, 4, 4)


@pytest.mark.parametrize(
    ("settings", "devices", "fragments"),
    [
        ({"tensor": 3}, 4, ["`parallel.tensor: 3`", "4 ranks", "1, 2, 4"]),
        (
            {"data": 2, "tensor": 4},
            4,
            ["`parallel.data: 2`", "`parallel.tensor: 4`", "num_gpus: 8"],
        ),
        ({"mode": "tensor", "tensor": 3}, 4, ["`parallel.tensor: 3`", "4 ranks"]),
        (
            {"mode": "ddp", "tensor": 2},
            4,
            ["`parallel.mode: ddp`: it has no such dimension", "`parallel.data`", "hybrid"],
        ),
        ({"mode": "zero2", "pipeline": 2}, 4, ["has no such dimension", "`parallel.shard`"]),
        ({"mode": "ddp", "data": 2}, 4, ["`parallel.data: 2`", "4 ranks"]),
        ({"mode": "zero1", "context": 2}, 4, ["`parallel.context: 2`", "no such dimension"]),
        ({"mode": "deepspeed", "context": 2}, 4, ["`parallel.context: 2`", "no such dimension"]),
    ],
)
def test_rejects_sizes_that_do_not_fit(
    settings: dict[str, Any], devices: int, fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(Parallel(**settings), devices)
    for fragment in fragments:
        assert fragment in caught.value.paragraph()


@pytest.mark.parametrize(
    ("settings", "devices", "advice"),
    [
        ({"tensor": 3}, 4, "set `parallel.num_gpus: 3`, or leave out `parallel.tensor`"),
        (
            {"mode": "tensor", "data": 3},
            4,
            "set `parallel.num_gpus: 3`, or leave out `parallel.data`",
        ),
        (
            {"mode": "pipeline", "pipeline": 4, "data": 4},
            4,
            "set `parallel.num_gpus: 16`, or leave out `parallel.data` or `parallel.pipeline`",
        ),
        ({"data": 2, "tensor": 4}, 4, "set `parallel.num_gpus: 8`, or leave out `parallel.data`"),
        ({"data": 3, "tensor": 3}, 4, "set `parallel.num_gpus: 9`"),
        (
            {"tensor": 3, "nnodes": 2},
            8,
            "set `parallel.num_gpus: 3`, or leave out `parallel.tensor`",
        ),
        ({"data": 1, "tensor": 3, "nnodes": 2}, 4, "change the sizes, or `parallel.nnodes`"),
        ({"mode": "single"}, 2, "set `parallel.num_gpus: 1`"),
    ],
)
def test_advice_names_only_axes_that_are_set(
    settings: dict[str, Any], devices: int, advice: str
) -> None:
    with raises_error(ConfigError, code="axes-do-not-fit-ranks") as caught:
        layout(Parallel(**settings), devices)
    assert caught.value.fix == advice
    parallel = Parallel(**settings)
    hosts = parallel.hosts[1]
    for number in re.findall(r"num_gpus: (\d+)", advice):
        layout(parallel, int(number) * hosts)
    for axis in re.findall(r"`parallel.(data|tensor|pipeline)`", advice):
        layout(parallel.model_copy(update={axis: None}), devices)


def test_registered_modes_and_strategy_specs() -> None:
    assert mode_of(Parallel()) == "auto"
    assert mode_of(Parallel(mode="fsdp")) == "zero3"
    with raises_error(ConfigError, code="unknown-mode"):
        mode_of(Parallel(mode="zero4"))
    for spec in STRATEGIES.values():
        assert Strategy in load_object(spec.implementation).__mro__
        for function in (spec.cost_model, spec.check_sizes, spec.check_steps):
            assert function is None or callable(load_object(function))
    with raises_error(ConfigError, code="missing-module"):
        get_spec("no_such_package:SPEC")
    with raises_error(ConfigError, code="not-a-strategy"):
        get_spec("collections:OrderedDict")
    with raises_error(ConfigError, code="missing-user-file"):
        get_spec("./no_such_file.py:SPEC")


def test_registry_does_not_import_torch() -> None:
    code = "import sys, paceline.parallel.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_does_not_choose_modes_that_change_training() -> None:
    not_chosen = {name for name, spec in STRATEGIES.items() if not spec.capabilities.chosen_by_auto}
    assert not_chosen == {"dp", "deepspeed", *OTHER_TRAINING}


@pytest.mark.parametrize(
    ("settings", "axis"),
    [
        ({"context_method": "gather"}, "context"),
        ({"sequence_parallel": True}, "tensor"),
        ({"tensor_plan": {"layers.*.mlp.up_proj": "colwise"}}, "tensor"),
        ({"pipeline_schedule": "gpipe"}, "pipeline"),
        ({"stages_per_rank": 4}, "pipeline"),
    ],
)
def test_settings_of_an_axis_have_an_effect_only_with_it(
    settings: dict[str, Any], axis: str
) -> None:
    parallel = Parallel(**settings)
    notices = list(notices_of_idle_axes(parallel, ParallelDims(data=2)))
    assert [notice.values["axis"] for notice in notices] == [axis]
    assert not list(notices_of_idle_axes(parallel, ParallelDims(**{axis: 2})))
