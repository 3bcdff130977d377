"""The correctness of the GPU benchmark on simulated devices, from an empty folder to the table, and
the code that measures speed with a small model on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
pytestmark = [pytest.mark.slow, pytest.mark.soak]


def run_script(name: str, *args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, str(GPU / name), *args],
        capture_output=True, text=True, timeout=timeout_s, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "prepared"
    done = run_script("prepare.py", str(folder), "--no-wheels", timeout_s=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_prepared_references_train(prepared: Path) -> None:
    references = json.loads((prepared / "references.json").read_text())
    configs = json.loads((prepared / "configs.json").read_text())
    assert {config["reference_key"] for config in configs} == references.keys()
    for reference in references.values():
        assert len(reference["digest"]) == 64
        assert reference["losses"][-1] < reference["losses"][0]


@pytest.mark.alone
def test_all_correctness_passes_on_simulated_devices(prepared: Path, tmp_path: Path) -> None:
    done = run_script(
        "run.py", str(prepared), "--output", str(tmp_path), "--simulated", timeout_s=2400
    )
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    results: list[dict[str, Any]] = [json.loads(line) for line in lines]
    bad = {
        (each["section"], each["name"]): each["reason"]
        for each in results
        if each["status"] in ("failed", "timeout")
    }
    assert bad == {}, done.stdout[-2000:]
    assert done.returncode == 0
    for section in ("losses", "waits", "resume", "ranks", "kernels"):
        assert any(each["section"] == section and each["status"] == "ok" for each in results)
    assert all(
        each["reason"].startswith(("needs a GPU", "the package"))
        for each in results
        if each["status"] == "skipped"
    )
    assert "simulated" in (tmp_path / "table.md").read_text().splitlines()[0]


def test_reference_that_differs_fails_the_benchmark(prepared: Path, tmp_path: Path) -> None:
    references = json.loads((prepared / "references.json").read_text())
    wrong = tmp_path / "prepared"
    wrong.mkdir()
    for path in prepared.iterdir():
        (wrong / path.name).symlink_to(path)
    (wrong / "references.json").unlink()
    (wrong / "configs.json").unlink()
    configs = json.loads((prepared / "configs.json").read_text())
    (wrong / "configs.json").write_text(json.dumps(configs[:1]))
    for reference in references.values():
        reference["losses"][-1] *= 1.01
    (wrong / "references.json").write_text(json.dumps(references))
    done = run_script(
        "run.py", str(wrong), "--output", str(tmp_path / "out"), "--simulated", "--only", "losses",
        timeout_s=600,
    )  # fmt: skip
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [each["name"] for each in results] == ["reference on this CPU", configs[0]["name"]]
    for each in results:
        assert each["status"] == "failed"
        assert "a loss differs from the CPU's by more than 0.001" in each["reason"]
    assert done.returncode == 1


SPEED = """
import json, sys
from pathlib import Path
from context import Context
from sections import speed

model, prepared, scratch = map(Path, sys.argv[1:])
work = {"config_file": str(model), "batch_rows": 2, "row_tokens": 64}
for lora in (False, True):
    for name, make, arguments in (
        ("paceline", speed.time_paceline, {"settings": {}}),
        ("loop", speed.time_loop, {"is_compiled": False}),
    ):
        folder = scratch / f"{name}-{lora}"
        folder.mkdir()
        context = Context(prepared, folder, 0, 1, is_simulated=True)
        figures = make(context, {**work, "lora": lora}, **arguments)
        print(json.dumps({"name": name, "lora": lora, **figures}))
"""


def test_contenders_train_on_the_same_tokens(prepared: Path, tmp_path: Path) -> None:
    from paceline.models.builtin import resolve_model

    model = resolve_model("builtin:qwen2-micro")
    path = [
        ROOT / "tests" / "simulated_cuda" / "preload", GPU, ROOT / "src", ROOT / "tests",
        ROOT / "tests" / "simulated_cuda",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", SPEED, model, str(prepared), str(tmp_path)],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert [line["name"] for line in lines] == ["paceline", "loop"] * 2
    for ours, loop in (lines[:2], lines[2:]):
        assert ours["losses"][0] == pytest.approx(loop["losses"][0], rel=1e-2)
        for line in (ours, loop):
            assert line["step_s"] > 0
            assert line["tokens_s"] == pytest.approx(128 / line["step_s"])
