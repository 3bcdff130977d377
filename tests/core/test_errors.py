"""Errors are one paragraph: what, what is allowed, how to fix it."""

import pickle

import pytest

from paceline.core.errors import (
    ConfigError,
    FaultError,
    PacelineError,
    ReportedError,
    RunError,
    StoppedError,
    nearest,
)
from paceline.core.formatting import counted


def test_the_paragraph() -> None:
    error = ConfigError("`rank: 0` is out of range ", allowed="1 or more", fix="write `rank: 8`")
    assert (
        error.paragraph()
        == str(error)
        == "`rank: 0` is out of range. Allowed: 1 or more. To fix: write `rank: 8`."
    )
    assert RunError("It ended").paragraph() == "It ended."
    assert RunError("Why?", fix="do this:").paragraph() == "Why? To fix: do this:"


@pytest.mark.parametrize(("kind", "code"), [(PacelineError, 1), (RunError, 1), (ConfigError, 2)])
def test_exit_codes_and_the_way_between_processes(kind: type[PacelineError], code: int) -> None:
    error = kind("what", allowed="this", fix="that")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.exit_code == code
    assert (again.what, again.allowed, again.fix) == ("what", "this", "that")
    assert str(again) == str(error)


def test_errors_with_further_arguments_pickle() -> None:
    fault = pickle.loads(pickle.dumps(FaultError("rank 1 hangs", fix="restart it", ranks=[1])))
    assert (fault.ranks, fault.fix) == ([1], "restart it")
    for kind, code in ((ReportedError, 7), (StoppedError, 130)):
        error = kind("rank 1: it failed", code)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (again.exit_code, again.paragraph()) == (code, error.paragraph())


def test_nearest() -> None:
    assert nearest("modle", ["model", "dataset"]) == "model"
    assert nearest("xyz", ["model"]) is None
    assert nearest("modle", ["model"], cutoff=0.95) is None


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2000, "2,000 steps")])
def test_counted(number: int, text: str) -> None:
    assert counted(number, "step") == text
