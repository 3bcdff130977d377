"""Prepare the GPU benchmark on a machine without a GPU.

python benchmarks/gpu/prepare.py FOLDER [--no-wheels]

Writes the configs, the losses and digests of float32 runs on the CPU, the data, token caches, and
wheels for what the image of the GPU machine lacks. The folder is below 60 MiB. Copy it together
with the repository, and do not commit it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import Case, Result, Section
from configs import complete, one_rank_trainings, several_rank_trainings
from pool import Pool, Settings
from wheels import download_wheels

ROOT = Path(__file__).resolve().parents[2]
MAX_SIZE_BYTES = 60 * 2**20
DEADLINE_S = 1800.0
#: Samples of the small configs; rows of the speed runs, each longer than the rows of a batch.
NUM_SAMPLES, NUM_LONG_ROWS, LONG_ROW_TURNS = 240, 96, 60


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--no-wheels", action="store_true", help="download no wheels")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty. To fix: name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)]),
    }
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("prepare_data.py")), str(folder)],
        check=True,
        env=environment,
    )
    trainings = _write_configs(folder)
    failed = _record_references(folder, trainings, environment)
    if failed:
        print(f"error: references failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    missing: dict[str, str] = {}
    if not args.no_wheels:
        missing = download_wheels(folder / "wheels", ROOT / "constraints.txt")
        for name, reason in missing.items():
            print(f"missing wheel: {name}: {reason}", flush=True)
    (folder / "prepared.json").write_text(
        json.dumps({"missing_wheels": missing, "has_wheels": not args.no_wheels}, indent=2) + "\n"
    )
    return check_size(folder)


def _write_configs(folder: Path) -> list[dict[str, Any]]:
    """Write ``configs.json``, and return its content."""
    content = [
        {
            **asdict(each),
            "complete": complete(each.settings, each.num_ranks),
            "reference_key": json.dumps([each.reference, each.reference_ranks], sort_keys=True),
        }
        for each in (*one_rank_trainings(), *several_rank_trainings())
    ]
    (folder / "configs.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def _record_references(
    folder: Path, trainings: list[dict[str, Any]], environment: dict[str, str]
) -> list[str]:
    """Train each reference once, and write ``references.json``. Return the names of those that
    failed."""
    by_key = {each["reference_key"]: each for each in trainings}
    cases = [
        Case(
            key,
            "sections.losses:record",
            {"settings": complete(each["reference"], each["reference_ranks"])},
            num_ranks=each["reference_ranks"],
            limit_s=300,
        )
        for key, each in by_key.items()
    ]
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        print(f"reference {result.name}: {result.status} {result.reason}", flush=True)

    work = folder / "work"
    settings = Settings(folder, work, 2, False, environment, device="cpu")
    with Pool(settings, report, time.monotonic() + DEADLINE_S) as pool:
        pool.run([Section("references", DEADLINE_S, cases)])
    failed = [result.name for result in results if result.status != "ok"]
    if not failed:
        shutil.rmtree(work)
    references = {result.name: result.figures for result in results}
    (folder / "references.json").write_text(json.dumps(references, indent=1) + "\n")
    return failed


def check_size(folder: Path) -> int:
    """Print the size of the folder; return 1 if it is too large."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB", flush=True)
    if size >= MAX_SIZE_BYTES:
        print(
            f"error: the folder must be below {MAX_SIZE_BYTES / 2**20:.0f} MiB. To fix: pass"
            " --no-wheels, or remove a wheel that the image has",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
