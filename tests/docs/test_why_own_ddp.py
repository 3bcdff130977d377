"""The page "Why Paceline has its own DDP" shows what its program prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.slow
def test_torch_ddp_rounds_differently_after_a_restart() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    completed = subprocess.run(
        [*torchrun, "--nproc-per-node", "4", str(ROOT / "examples" / "ddp_restart.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    assert "wrapped again at step 4: equal bits False" in completed.stdout
    page = (ROOT / "docs" / "why-own-ddp.md").read_text(encoding="utf-8")
    assert f"```text\n{completed.stdout}```" in page
