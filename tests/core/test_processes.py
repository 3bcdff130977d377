"""Test which signals end a process."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import signal, sys, time
from paceline.core.processes import end_by_starter_alone
end_by_starter_alone(signal.SIGTERM)
print("ready", flush=True)
for line in sys.stdin:
    print("alive", flush=True)
"""


@pytest.mark.skipif(
    not hasattr(signal, "sigwaitinfo"), reason="the system does not report the sender of a signal"
)
def test_only_a_signal_of_the_parent_ends_the_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        subprocess.run(
            [sys.executable, "-c", f"import os; os.kill({child.pid}, {int(signal.SIGTERM)})"],
            check=True,
        )
        time.sleep(0.2)
        child.stdin.write("ping\n")
        child.stdin.flush()
        assert child.stdout.readline() == "alive\n"
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(timeout=10) == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.communicate()
