"""Simulated CUDA devices for the tests of this folder."""

import pytest
from command_server import SERVERS, CommandServer
from cpu_reference import Reference, make_reference
from device_runs import VARIABLES
from simulated import VALUES
from simulation_cache import build_libraries, compile_shared
from stream_order.deferring import SOURCE as DEFERRING
from stream_order.tracing import OBSERVER


@pytest.fixture(scope="session", autouse=True)
def simulated_cuda(pytestconfig: pytest.Config) -> None:
    """Compile the simulation, unless an earlier session has compiled it."""
    from paceline.simulation.cuda import SHIM

    compile_shared(pytestconfig, lambda: build_libraries(SHIM, VALUES, OBSERVER, DEFERRING))
    SERVERS.append(CommandServer(VARIABLES))


@pytest.fixture(scope="session")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a function that returns the losses of a strategy on the CPU device."""
    return make_reference(lambda: tmp_path_factory.mktemp("cpu") / "run")
