"""A new mode is one folder and one line in the registry: `late_mode` is put into a copy of the
package as `paceline/strategies/late_ddp`, and used as any other mode."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

FOLDER = Path(__file__).parent / "late_mode"
RUN = (
    "model=builtin:qwen2-micro", "dataset=builtin:python-docs#64", "parallel.device=cpu",
    "parallel.num_gpus=2", "max_length=64", "train_args.precision=32", "train_args.packing=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that has the copy of the package, to import it from."""
    folder = tmp_path_factory.mktemp("with-new-mode")
    copied = folder / "paceline"
    ignored = shutil.ignore_patterns("__pycache__", "static")
    shutil.copytree(Path(paceline.__file__).parent, copied, ignore=ignored)
    shutil.copytree(FOLDER, copied / "strategies" / "late_ddp", ignore=ignored)
    registry = copied / "parallel" / "registry.py"
    line = '    "ddp.spec:DDP",\n'
    text = registry.read_text(encoding="utf-8")
    assert text.count(line) == 1
    registry.write_text(text.replace(line, line + '    "late_ddp.spec:SPEC",\n'), encoding="utf-8")
    return folder


def run(package: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=400,
    )


def train(package: Path, cwd: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "paceline", "sft", *RUN, "parallel.mode=late_ddp", *settings)
    return run(package, cwd, *command)


def test_is_planned(package: Path, tmp_path: Path) -> None:
    done = run(package, tmp_path, "-m", "paceline", "plan", *RUN, "--json")
    assert done.returncode == 0, done.stderr
    names = [mode["mode"] for mode in json.loads(done.stdout)["modes"]]
    assert "late_ddp" in names


def test_is_listed_in_the_table_of_the_docs(package: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "strategies.md"
    page.write_text("<!-- support: begin -->\n<!-- support: end -->\n", encoding="utf-8")
    done = run(package, tmp_path, "-m", "paceline.parallel.support_table")
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "| `late_ddp` | yes |" in text
    assert "- `train_args.optim: lion` is not supported with `late_ddp`" in text


def test_limits_are_checked(package: Path, tmp_path: Path) -> None:
    done = train(package, tmp_path, "max_steps=2", "train_args.optim=lion", "output_dir=refused")
    assert done.returncode == 2
    assert "`train_args.optim: lion` is not supported" in done.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_is_verified_trained_and_resumed(package: Path, tmp_path: Path) -> None:
    command = ("-m", "paceline", "verify", *RUN, "--modes", "ddp,late_ddp", "--world-size", "2")
    verified = run(package, tmp_path, *command, "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    certified = {mode["mode"]: mode["ok"] for mode in json.loads(verified.stdout)["modes"]}
    assert certified == {"ddp": True, "late_ddp": True}

    args = ("train_args.save_steps=2", "train_args.lr_scheduler_type=constant")
    assert train(package, tmp_path, "max_steps=2", "output_dir=run", *args).returncode == 0
    longer = ("max_steps=4", "output_dir=run", "--allow-config-change")
    resumed = train(package, tmp_path, *longer, *args)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step 2 of 4" in resumed.stderr
    assert train(package, tmp_path, "max_steps=4", "output_dir=whole", *args).returncode == 0
    assert digest(package, tmp_path, "run") == digest(package, tmp_path, "whole")


def digest(package: Path, cwd: Path, name: str) -> str:
    checkpoint = f"{name}/checkpoints/step-00000004"
    done = run(package, cwd, "-m", "paceline", "inspect", checkpoint, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["digest"]
