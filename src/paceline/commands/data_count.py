"""`paceline data count`: count the words or tokens of files."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.commands.options import (
    AnyText,
    Choice,
    Integer,
    InvalidValue,
    OptionParser,
    OutputFile,
)
from paceline.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, ConfigError, did_you_mean
from paceline.core.files import human_bytes
from paceline.core.formatting import counted, printable
from paceline.data.count.limits import DEFAULT_MEMORY_BYTES, MIN_MEMORY_BYTES
from paceline.distributed.devices import cpu_cores

if TYPE_CHECKING:
    from paceline.data.count.job import CountResult, CountSpec

logger = logging.getLogger(__name__)

_MAX_RANKS = 64
_MAX_DEFAULT_RANKS = 8
_MAX_TOP = 100_000
_ENGINES, _UNITS, _ERROR_HANDLERS = ("local", "ray"), ("words", "tokens"), ("strict", "replace")


@dataclass(frozen=True)
class MemorySize:
    """Memory of each rank, in bytes."""

    allowed: str = (
        f"a size of {human_bytes(MIN_MEMORY_BYTES)} or more for each rank, as 256MB or 1GiB"
    )

    def __call__(self, text: str) -> int:
        from paceline.planner.machine.hardware import parse_size

        try:
            return parse_size(text, "--memory-per-rank")
        except ConfigError as error:
            raise ConfigError(
                error.what,
                code="invalid-memory-size",
                allowed=self.allowed,
                fix="use e.g. `--memory-per-rank 256MB`",
            ) from error


@dataclass(frozen=True)
class InputFile:
    """A readable regular file: its path and its size in bytes."""

    allowed: str = "a text file, or JSON lines with --field"

    def __call__(self, text: str) -> tuple[Path, int]:
        path = Path(text).expanduser()
        if path.is_dir():
            raise InvalidValue(
                "is a folder", allowed="files", fix=f"name the files in it, e.g. {path}/*.txt"
            )
        if not path.exists():
            siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ConfigError(
                "file not found: `{path}`",
                code="missing-input-file",
                fix=did_you_mean(path.name, siblings, "check the path", f"`{path.parent / '{}'}`"),
                path=path,
            )
        if not path.is_file():
            raise InvalidValue(
                "is not a regular file", allowed="files on a disk, which several ranks can read"
            )
        if not os.access(path, os.R_OK):
            raise InvalidValue("cannot be read: permission denied", fix=f"run `chmod u+r {path}`")
        return path, path.stat().st_size


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("files", InputFile(), "FILE", "files to count in", nargs="*")
    parser.add_option(
        "--ranks",
        Integer(1, _MAX_RANKS),
        "N",
        "number of processes; with Ray, of CPUs",
        default=min(cpu_cores(), _MAX_DEFAULT_RANKS),
    )
    parser.add_option("--unit", Choice(_UNITS), "UNIT", "what to count", default="words")
    parser.add_option(
        "--tokenizer",
        AnyText("a folder, a hub id, or builtin:qwen2-tiny"),
        "DIR",
        "tokenizer for --unit tokens",
    )
    parser.add_option(
        "--output", OutputFile("a TSV file"), "FILE", "TSV file with all counts to write"
    )
    parser.add_option(
        "--top",
        Integer(0, _MAX_TOP),
        "N",
        "how many of the most frequent words to print",
        default=10,
    )
    parser.add_option(
        "--memory-per-rank",
        MemorySize(),
        "SIZE",
        f"memory of each rank (default: {DEFAULT_MEMORY_BYTES // 10**6}MB)",
    )
    parser.add_option("--engine", Choice(_ENGINES), "NAME", "engine that counts", default="local")
    parser.add_option(
        "--decode-errors",
        Choice(_ERROR_HANDLERS),
        "HOW",
        "whether invalid UTF-8 is an error or is replaced",
        default="strict",
    )
    parser.add_option(
        "--field",
        AnyText("a key", may_be_empty=False),
        "KEY",
        "key of the text in files of JSON lines",
    )
    parser.example = "paceline data count corpus/*.txt --ranks 4 --output words.tsv"


def run(args: Namespace) -> int:
    """Count, print the result, and write the table."""
    spec = make_spec(args)
    logger.info(
        "counting %s: %s in %s, %s",
        spec.by,
        human_bytes(sum(size for _, size in spec.files)),
        counted(len(spec.files), "file"),
        counted(args.ranks, "rank" if args.engine == "local" else "Ray CPU"),
    )
    started = time.perf_counter()
    try:
        with _sigterm_as_exception():
            result = _count(spec, args)
    except KeyboardInterrupt:
        print("\nstopped; all processes have ended, nothing was written", file=sys.stderr)
        return EXIT_SIGINT
    except _Terminated:
        print("stopped; all processes have ended, nothing was written", file=sys.stderr)
        return EXIT_SIGTERM
    summary = _summary(spec, args, result, time.perf_counter() - started)
    _print_notices(summary)
    if args.json:
        print(json.dumps(summary))
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        print(table(summary))
    return EXIT_DONE


def make_spec(args: Namespace) -> CountSpec:
    """Check the options against each other.

    Raises:
        ConfigError: there is no file, an option lacks another one, the output is one of the files,
            or Ray is not installed.
    """
    if not args.files:
        raise ConfigError(
            "`paceline data count` needs a file",
            code="no-files-to-count",
            allowed="paceline data count FILE…",
            fix="name the files to count",
        )
    output = args.output
    if output is not None and output.exists():
        for path, _ in args.files:
            if output.samefile(path):
                raise ConfigError(
                    "`--output {output}` is one of the files to count",
                    code="output-is-an-input",
                    fix="name another file",
                    output=output,
                )
    if args.engine == "ray":
        from paceline.data.count.ray_engine import check_ray

        check_ray()
    from paceline.data.count.job import CountSpec

    return CountSpec(
        files=tuple(args.files),
        by=args.unit,
        tokenizer=_tokenizer_folder(args.unit, args.tokenizer),
        field=args.field,
        errors=args.decode_errors,
        memory_bytes=args.memory_per_rank or DEFAULT_MEMORY_BYTES,
        top=args.top,
    )


def _tokenizer_folder(unit: str, tokenizer: str | None) -> Path | None:
    if unit == "words":
        if tokenizer is not None:
            raise ConfigError(
                "`--tokenizer` is not supported with `--unit words`",
                code="tokenizer-without-unit",
                fix="add `--unit tokens`, or omit it",
            )
        return None
    if not tokenizer:
        raise ConfigError(
            "`--unit tokens` needs a tokenizer",
            code="missing-tokenizer",
            allowed="a folder, a hub id, or builtin:qwen2-tiny",
            fix="set `--tokenizer DIR`",
        )
    from paceline.data.text.tokenizer import find_tokenizer, load_tokenizer
    from paceline.models.builtin import resolve_model

    folder = find_tokenizer(resolve_model(tokenizer))
    load_tokenizer(folder)
    return folder


def _count(spec: CountSpec, args: Namespace) -> CountResult:
    if args.engine == "ray":
        from paceline.data.count.ray_engine import count_on_ray

        return count_on_ray(spec, args.ranks, args.output)
    from paceline.data.count.job import count_locally

    return count_locally(spec, args.ranks, args.output)


class CountSummary(TypedDict):
    """What `--json` prints."""

    total: int
    distinct: int
    top: list[tuple[str, int]]
    by: str
    engine: str
    ranks: int
    files: int
    size_bytes: int
    memory_bytes: int
    spills: int
    spilled_bytes: int
    shuffled_bytes: int | None
    replaced: int
    seconds: dict[str, float]
    wall_s: float
    output: str | None


def _summary(spec: CountSpec, args: Namespace, result: CountResult, wall_s: float) -> CountSummary:
    return {
        "total": result.total,
        "distinct": result.distinct,
        "top": list(result.top),
        "by": spec.by,
        "engine": args.engine,
        "ranks": args.ranks,
        "files": len(spec.files),
        "size_bytes": sum(size for _, size in spec.files),
        "memory_bytes": spec.memory_bytes,
        "spills": result.spills,
        "spilled_bytes": result.spilled_bytes,
        "shuffled_bytes": result.shuffled_bytes if args.engine == "local" else None,
        "replaced": result.replaced,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "wall_s": round(wall_s, 3),
        "output": str(args.output) if args.output else None,
    }


def _print_notices(summary: CountSummary) -> None:
    """Log what the user should know besides the counts."""
    if summary["spills"]:
        logger.info(
            f"{summary['spills']:,} full tables were spilled to disk,"
            f" {human_bytes(summary['spilled_bytes'])} in total"
            f" (memory per rank: {human_bytes(summary['memory_bytes'])})"
        )
    if summary["replaced"]:
        logger.warning(
            f"{summary['replaced']:,} sequences of invalid UTF-8 were replaced by U+FFFD"
        )
    if summary["output"]:
        logger.info("wrote %s", summary["output"])


class _Terminated(BaseException):
    """SIGTERM as an exception, so that temporary files are removed."""


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Terminated

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread, so the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def table(summary: CountSummary) -> str:
    """Return the most frequent words with their shares."""
    noun = summary["by"].removesuffix("s")
    lines = [
        f"{counted(summary['total'], noun)}, {summary['distinct']:,} distinct, in"
        f" {summary['wall_s']:.1f} s"
    ]
    if summary["top"]:
        width = max(len(f"{summary['top'][0][1]:,}"), 5)
        lines += ["", f"  {'count':>{width}}  {'share':>7}  {noun}"]
    for text, count in summary["top"]:
        share = 100 * count / summary["total"]
        lines.append(f"  {count:>{width},}  {share:6.2f}%  {printable(text)}")
    return "\n".join(lines)
