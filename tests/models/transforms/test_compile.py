"""Compiled blocks: the same names and losses, and no compilation for rows of other lengths."""

import pytest
import torch
from raised import raises_error
from torch import nn
from torch._dynamo.callback import callback_handler

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.timing.progress import PROGRESS
from paceline.models.transforms.compile import compile_blocks
from paceline.models.transforms.compile_check import check_compile
from paceline.parallel.registry import check_strategy


def make_config(mode: str = "ddp", **train_args: object) -> Config:
    return Config(
        model="m",
        dataset="d",
        parallel={"mode": mode},
        train_args={"torch_compile": True, **train_args},
    )


def test_names_of_parameters_do_not_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = list(model.state_dict())
    compile_blocks(model, TrainArgs(torch_compile=True))
    assert list(model.state_dict()) == names


def test_progress_is_in_the_phase_of_compilation_meanwhile() -> None:
    """The watchdog allows more time for it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compile_blocks(model, TrainArgs(torch_compile=True, torch_compile_backend="eager"))
    phases: list[str] = []

    def note(_: object) -> None:
        phases.append(PROGRESS.phase)

    callback_handler.register_start_callback(note)
    try:
        with PROGRESS.during("forward"):
            model(torch.ones(2, 4))
            phases.append(PROGRESS.phase)
    finally:
        callback_handler.remove_start_callback(note)
    assert set(phases[:-1]) == {"compilation"}
    assert phases[-1] == "forward"


def test_refused_with_selective_checkpointing_and_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raises_error(
        ConfigError, code="compile-with-selective-checkpointing", naming="train_args.torch_compile"
    ):
        check_compile(make_config(gradient_checkpointing="selective"), "cpu")
    check_compile(make_config(gradient_checkpointing="full"), "cpu")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with raises_error(ConfigError, code="missing-compiler"):
        check_compile(make_config(), "cpu")


@pytest.mark.parametrize(
    ("mode", "dims"),
    [
        ("dp", ParallelDims(data=2)),
        ("pipeline", ParallelDims(pipeline=2)),
        ("tensor", ParallelDims(tensor=2)),
        ("local_sgd", ParallelDims(data=2)),
    ],
)
def test_modes_that_do_not_support_it(mode: str, dims: ParallelDims) -> None:
    with raises_error(ConfigError, code="not-supported", naming="train_args.torch_compile"):
        check_strategy(mode, make_config(mode), dims)
