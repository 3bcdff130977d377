"""Test that each planted fault is found, and that the same run without the fault ends well."""

from pathlib import Path

import pytest
from commands import losses, report
from device_runs import WITH_NCCL, train_on
from nccl_orders import LOGS, OrderError, compare_orders, read_logs
from planted import NCCL_FAULTS, STREAM_FAULTS, VARIABLE
from stream_order.checker import Finding
from stream_order.tracing import VARIABLE as CHECKED
from stream_order.tracing import read_findings

pytestmark = pytest.mark.slow

#: Those of the quick set, one of each kind.
QUICK = ("gradients are not waited for", "a sum of numbers in host memory")


def run_with_nccl(folder: Path, *args: str, fault: str | None, expect: int) -> str:
    """Train; return standard error."""
    (folder / "logs").mkdir()
    variables = {**WITH_NCCL, LOGS: str(folder / "logs")}
    if fault is not None:
        variables[VARIABLE] = fault
    settings = (*args, "recovery.max_restarts=0")
    return train_on("cuda", folder / "run", *settings, variables=variables, expect=expect)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in NCCL_FAULTS],
)
def test_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    fault = NCCL_FAULTS[name]
    text = run_with_nccl(tmp_path, *fault.args, fault=name, expect=int(fault.fails))
    try:
        compare_orders(read_logs(tmp_path / "logs"))
    except OrderError as error:
        text += str(error)
    if fault.finding is not None:
        assert fault.finding in text
    else:
        train_on("cuda", tmp_path / "correct", *fault.args, variables=WITH_NCCL)
        assert losses(tmp_path / "run") != pytest.approx(losses(tmp_path / "correct"), rel=1e-3)


#: A fault of each run.
_FAULT_OF_RUN = {fault.args: name for name, fault in NCCL_FAULTS.items()}


@pytest.mark.soak
@pytest.mark.parametrize("name", _FAULT_OF_RUN.values())
def test_run_without_the_fault(name: str, tmp_path: Path) -> None:
    run_with_nccl(tmp_path, *NCCL_FAULTS[name].args, fault=None, expect=0)
    compare_orders(read_logs(tmp_path / "logs"))
    assert report(tmp_path / "run")["status"] == "done"


# -- faults that the checker of streams finds
QUICK_STREAM_FAULTS = (
    "an update does not wait for the optimizer's state",
    "activations are freed while they are copied",
)
#: A fault of each run.
_STREAM_FAULT_OF_RUN = {fault.args: name for name, fault in STREAM_FAULTS.items() if fault.args}


def findings_of(folder: Path, *args: str, fault: str | None) -> list[Finding]:
    """Train, and return what the checker of streams finds. The run itself ends well."""
    (folder / "findings").mkdir()
    variables = {**WITH_NCCL, CHECKED: str(folder / "findings")}
    if fault is not None:
        variables[VARIABLE] = fault
    train_on("cuda", folder / "run", *args, variables=variables)
    return read_findings(folder / "findings")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_STREAM_FAULTS else pytest.param(name, marks=pytest.mark.soak)
        for name, fault in STREAM_FAULTS.items()
        if fault.args is not None
    ],
)
def test_planted_fault_of_streams_is_found(name: str, tmp_path: Path) -> None:
    fault = STREAM_FAULTS[name]
    assert fault.args is not None
    findings = findings_of(tmp_path, *fault.args, fault=name)
    assert [each for each in findings if each.kind == fault.kind and fault.site in str(each)], (
        "\n".join(map(str, findings))
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", _STREAM_FAULT_OF_RUN.values())
def test_nothing_is_found_without_the_fault(name: str, tmp_path: Path) -> None:
    args = STREAM_FAULTS[name].args
    assert args is not None
    assert findings_of(tmp_path, *args, fault=None) == []
