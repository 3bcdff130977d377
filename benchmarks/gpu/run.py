"""Run the GPU benchmark: one command, one table, eight minutes. It needs no network.

python benchmarks/gpu/run.py FOLDER --output OUT [--deadline-s 470] [--simulated] [--only SECTION,…]

FOLDER is what `prepare.py` has written. Each result is a line of OUT/results.jsonl as soon as it is
known; OUT/table.md is written last. The exit code is 0 only if no correctness case failed or timed
out. --simulated runs the correctness cases on CUDA devices that are simulated on the CPU.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

from cases import Result, Section
from pool import Pool, Settings
from table import make_table

ROOT = Path(__file__).resolve().parents[2]
FOLDER_OF_SECTIONS = Path(__file__).resolve().parent
SIMULATED = ROOT / "tests" / "simulated_cuda"
#: Ranks that run at the same time on a GPU, and on the CPU.
NUM_SLOTS, NUM_SIMULATED_SLOTS = 6, 2
#: Time that is left for the table and for ending the processes.
TABLE_S = 3.0


def main() -> int:
    started_at = time.monotonic()
    args = _arguments()
    output = args.output.resolve()
    _clear(output)
    sections = _chosen_sections(args)
    settings = Settings(
        args.folder.resolve(),
        output,
        NUM_SIMULATED_SLOTS if args.simulated else NUM_SLOTS,
        args.simulated,
        _environment(args, output),
        device="cuda" if args.cases is None else "none",
    )
    results: list[Result] = []
    with open(output / "results.jsonl", "w", encoding="utf-8", buffering=1) as file:

        def report(result: Result) -> None:
            results.append(result)
            file.write(json.dumps(result.line) + "\n")
            print(
                f"{time.monotonic() - started_at:6.1f} s  {result.status:<8}"
                f" {result.section}: {result.name}  {result.reason}",
                flush=True,
            )

        with Pool(settings, report, started_at + args.deadline_s - TABLE_S) as pool:
            pool.run(sections)
    card = next((result.card for result in results if result.card), "no device")
    headline = f"GPU benchmark on {card}" + (" (simulated on the CPU)" if args.simulated else "")
    (output / "table.md").write_text(make_table(results, headline), encoding="utf-8")
    shutil.rmtree(output / "scratch", ignore_errors=True)
    print(f"wrote {output / 'table.md'} after {time.monotonic() - started_at:.0f} s", flush=True)
    return int(any(result.makes_run_fail for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder that prepare.py has written")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--deadline-s", type=float, help="seconds until the table (default 470, simulated 1,800)"
    )
    parser.add_argument(
        "--simulated", action="store_true", help="simulate the device: correctness only"
    )
    parser.add_argument("--only", help="comma-separated names of sections")
    # A file with other SECTIONS, whose processes import nothing in advance: for tests.
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.deadline_s is None:
        args.deadline_s = 1800.0 if args.simulated else 470.0
    if args.deadline_s <= TABLE_S:
        parser.error(f"--deadline-s must be more than {TABLE_S:g}, which the table may take")
    if args.cases is None and not (args.folder / "prepared.json").is_file():
        parser.error(
            f"{args.folder} has no prepared.json: run `python benchmarks/gpu/prepare.py"
            f" {args.folder}` first, on any machine with a network"
        )
    return args


def _clear(output: Path) -> None:
    """Remove what an earlier benchmark has written into a folder, and nothing else."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("scratch", "logs", "packages", "cache", "models"):
        shutil.rmtree(output / name, ignore_errors=True)
    (output / "table.md").unlink(missing_ok=True)


def _chosen_sections(args: argparse.Namespace) -> list[Section]:
    if args.cases is not None:
        spec = importlib.util.spec_from_file_location(args.cases.stem, args.cases)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sections: list[Section] = module.SECTIONS
    else:
        from sections import make_sections

        sections = make_sections(args.folder, args.simulated)
    if args.only is None:
        return sections
    names = args.only.split(",")
    unknown = sorted(set(names) - {section.name for section in sections})
    if unknown:
        sys.exit(
            f"error: unknown sections: {', '.join(unknown)}. Choose from:"
            f" {', '.join(section.name for section in sections)}"
        )
    return [section for section in sections if section.name in names]


def _environment(args: argparse.Namespace, output: Path) -> dict[str, str]:
    """Return the environment of the processes: no network, caches of their own, and Paceline, the
    sections and unpacked wheels on the path."""
    path = [str(ROOT / "src"), str(FOLDER_OF_SECTIONS), str(SIMULATED)]
    if args.simulated:
        path.insert(0, str(SIMULATED / "preload"))
    if args.cases is not None:
        path.append(str(args.cases.resolve().parent))
    else:
        from wheels import unpack_missing

        path += unpack_missing(args.folder / "wheels", output / "packages")
        shutil.copytree(args.folder / "cache", output / "cache", dirs_exist_ok=True)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
        "XDG_CACHE_HOME": str(output / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
        # Ranks on one GPU, or on simulated devices, communicate through this backend of the tests.
        "PACELINE_TEST_BACKEND": "hostnccl",
        **({"OMP_NUM_THREADS": "1"} if args.simulated else {}),
    }


if __name__ == "__main__":
    sys.exit(main())
