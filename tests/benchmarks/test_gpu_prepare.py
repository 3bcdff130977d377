"""Test what the GPU benchmark takes along: one CUDA library of bitsandbytes, the packages that an
image lacks, and a folder that is small enough. And that a rank of torchrun can train without
saving, as the benchmark does."""

import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from benchmark_modules import import_benchmark
from commands import MICRO

prepare, wheel_tools = import_benchmark("prepare", "gpu"), import_benchmark("wheels", "gpu")


def write_wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
    return path


def test_one_cuda_library_of_bitsandbytes_is_kept(tmp_path: Path) -> None:
    kept = ["bitsandbytes/__init__.py", "bitsandbytes/libbitsandbytes_cpu.so"]
    kept.append(f"bitsandbytes/{wheel_tools.BITSANDBYTES_LIBRARY}")
    others = ["bitsandbytes/libbitsandbytes_cuda118.so", "bitsandbytes/libbitsandbytes_rocm62.so"]
    wheel = write_wheel(tmp_path / "all.whl", *kept, *others)
    wheel_tools.drop_other_libraries(wheel, tmp_path / "one.whl")
    with zipfile.ZipFile(tmp_path / "one.whl") as result:
        assert result.namelist() == kept
        assert result.read(kept[0]) == kept[0].encode()
    without = write_wheel(tmp_path / "none.whl", *others)
    with pytest.raises(ValueError, match=wheel_tools.BITSANDBYTES_LIBRARY):
        wheel_tools.drop_other_libraries(without, tmp_path / "two.whl")


def test_only_missing_packages_are_unpacked(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels / "torch-0.1-py3-none-any.whl", "torch/__init__.py")
    write_wheel(wheels / "no_such_package-1.0-py3-none-any.whl", "no_such_package/__init__.py")
    (folder,) = wheel_tools.unpack_missing(wheels, tmp_path / "packages")
    assert [path.name for path in Path(folder).iterdir()] == ["no_such_package"]


def test_folder_that_is_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / "wheel", "wb") as file:
        file.truncate(prepare.MAX_SIZE_BYTES - 1)
    assert prepare.check_size(tmp_path) == 0
    (tmp_path / "one-byte").write_text("x")
    assert prepare.check_size(tmp_path) == 1
    assert "must be below 60 MiB. To fix" in capsys.readouterr().err


TRAIN = """
import sys, time
from paceline.api import run
from paceline.config.load import load_config

result = run(load_config(None, sys.argv[1:]), time.time(), saves_state=False)
"""


@pytest.mark.slow
def test_rank_of_torchrun_trains_without_saving(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *MICRO, "max_steps=2", "parallel.num_gpus=1",
         f"output_dir={tmp_path / 'run'}"],
        capture_output=True, text=True, timeout=300, env=os.environ | ranks,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "report.json").is_file()
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    assert not (tmp_path / "run" / "model").exists()
