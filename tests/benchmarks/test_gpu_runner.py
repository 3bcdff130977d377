"""Test the runner of the GPU benchmark with planted cases: a failing or hanging case does not stop
the next one, and every case has a result, also at the deadline."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.py"
PLANTED = Path(__file__).with_name("planted_cases.py")


def run_planted(
    folder: Path, *args: str, cases: Path = PLANTED
) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Run the cases of a file; return the exit code, and the results by section and name."""
    done = subprocess.run(
        [sys.executable, str(RUN), str(folder), "--output", str(folder / "out"),
         "--cases", str(cases), *args],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PLANTED_PID_FILE": str(folder / "pid")},
    )  # fmt: skip
    assert (folder / "out" / "table.md").is_file(), done.stderr[-3000:]
    lines = (folder / "out" / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    return done.returncode, {(each["section"], each["name"]): each for each in results}


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_failing_and_hanging_cases_do_not_stop_the_next(tmp_path: Path) -> None:
    code, results = run_planted(tmp_path, "--deadline-s", "100")
    assert code == 1
    assert {name: each["status"] for (section, name), each in results.items()
            if section != "limited"} == {
        "good": "ok", "bad": "failed", "hanging": "timeout", "crashing": "failed",
        "skipping": "skipped", "excluded": "skipped", "sum": "ok", "one fails": "failed",
        "measured": "ok", "slow": "failed", "good again": "ok",
    }  # fmt: skip
    reasons = {name: each["reason"] for (_, name), each in results.items()}
    assert "planted failure" in reasons["bad"]
    assert "limit of 1 s" in reasons["hanging"]
    assert "ended with code 7" in reasons["crashing"]
    assert (reasons["skipping"], reasons["excluded"]) == ("planted reason", "known in advance")
    assert "rank 1: ValueError: planted failure of a rank" in reasons["one fails"]
    assert results["ranks", "sum"]["figures"]["sum"] == 3
    assert results["last", "good again"]["figures"]["value"] == 2
    for each in results.values():
        assert set(each) == {
            "section", "name", "status", "seconds", "card", "figures", "reason"
        }  # fmt: skip
        assert (each["status"] == "ok") == (each["reason"] == "")
    assert has_ended(int((tmp_path / "pid").read_text()))
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| hanging | timeout |" in table


def test_section_with_a_limit_reports_the_cases_that_it_did_not_start(tmp_path: Path) -> None:
    _, results = run_planted(tmp_path, "--only", "limited")
    statuses = {name: each["status"] for (_, name), each in results.items()}
    assert (statuses["sleep 0"], statuses["sleep 1"]) == ("ok", "ok")
    assert (statuses["alone"], statuses["late"]) == ("timeout", "timeout")
    assert "section's limit of 1 s" in results["limited", "late"]["reason"]


def test_only_correctness_decides_the_exit_code(tmp_path: Path) -> None:
    code, results = run_planted(tmp_path, "--only", "last")
    assert results["last", "slow"]["status"] == "failed"
    assert code == 0


def test_every_case_has_a_result_at_the_deadline(tmp_path: Path) -> None:
    cases = tmp_path / "slow_cases.py"
    cases.write_text(
        "from cases import Case, Section\n"
        "SLEEP = {'seconds': 600}\n"
        f"import sys; sys.path.append({str(PLANTED.parent)!r})\n"
        "from planted_cases import overlaps\n"
        "SECTIONS = [Section('one', 600, [Case(str(number), 'slow_cases:overlaps', SLEEP,"
        " limit_s=600) for number in range(9)])]\n"
    )
    code, results = run_planted(tmp_path, "--deadline-s", "7", cases=cases)
    assert code == 1
    assert len(results) == 9
    assert {each["status"] for each in results.values()} == {"timeout"}
    reasons = {each["reason"] for each in results.values()}
    assert reasons == {
        "ended at the deadline of the benchmark",
        "not started before the deadline of the benchmark",
    }


def test_folder_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), str(tmp_path), "--output", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "has no prepared.json: run `python benchmarks/gpu/prepare.py" in done.stderr
    assert not (tmp_path / "out").exists()
