"""`paceline data count`: count the words or tokens of files."""

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
from typing import Any

from paceline.commands.options import (
    Choice,
    InvalidValue,
    OptionParser,
    OutputFile,
    Text,
    WholeNumber,
)
from paceline.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, ConfigError, did_you_mean
from paceline.core.files import human_bytes
from paceline.core.formatting import counted, printable
from paceline.data.count.job import LEAST_MEMORY_BYTES, CountResult, CountSpec, count_locally

logger = logging.getLogger(__name__)

_MAX_RANKS = 64
_MAX_DEFAULT_RANKS = 8
_MAX_TOP = 100_000
_ENGINES, _UNITS, _ERROR_HANDLERS = ("local", "ray"), ("words", "tokens"), ("strict", "replace")


@dataclass(frozen=True)
class CountOptions:
    """A count. ``output``: where the whole table is written, if it is."""

    spec: CountSpec
    ranks: int
    engine: str
    output: Path | None


@dataclass(frozen=True)
class MemorySize:
    """Memory for each rank, in bytes."""

    allowed: str = (
        f"a size of {human_bytes(LEAST_MEMORY_BYTES)} or more for each rank, as 256MB or 1GiB"
    )

    def __call__(self, text: str) -> int:
        from paceline.planner.hardware import parse_size

        try:
            return parse_size(text, "--memory-per-rank")
        except ConfigError as error:
            raise ConfigError(
                error.what, allowed=self.allowed, fix="write e.g. `--memory-per-rank 256MB`"
            ) from error


@dataclass(frozen=True)
class InputFile:
    """A readable file on a disk: its path and its size in bytes."""

    allowed: str = "a text file, or JSON lines with --field"

    def __call__(self, text: str) -> tuple[Path, int]:
        path = Path(text).expanduser()
        if path.is_dir():
            raise InvalidValue(
                "is a folder", allowed="files", fix=f"name the files in it, as {path}/*.txt"
            )
        if not path.exists():
            siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ConfigError(
                f"there is no file `{path}`",
                fix=did_you_mean(path.name, siblings, "check the path", f"`{path.parent / '{}'}`"),
            )
        if not path.is_file():
            raise InvalidValue(
                "is no plain file", allowed="files on a disk, which several ranks can read at once"
            )
        if not os.access(path, os.R_OK):
            raise InvalidValue("cannot be read", fix="give yourself the right to read it")
        return path, path.stat().st_size


def add_arguments(parser: OptionParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=InputFile(), metavar="FILE", help="files whose text is counted"
    )
    parser.add_argument(
        "--ranks",
        type=WholeNumber(1, _MAX_RANKS),
        default=_num_cores(),
        metavar="N",
        help="number of processes, or of CPUs with Ray",
    )
    parser.add_argument(
        "--unit", type=Choice(_UNITS), default="words", metavar="UNIT", help="what is counted"
    )
    parser.add_argument(
        "--tokenizer",
        type=Text("a folder, a hub id, or builtin:qwen2-tiny"),
        metavar="DIR",
        help="tokenizer, with --unit tokens",
    )
    parser.add_argument(
        "--output", type=OutputFile("a TSV file"), metavar="FILE", help="table of all counts"
    )
    parser.add_argument(
        "--top",
        type=WholeNumber(0, _MAX_TOP),
        default=10,
        metavar="N",
        help="most frequent words that are printed",
    )
    parser.add_argument(
        "--memory-per-rank",
        type=MemorySize(),
        metavar="SIZE",
        help=f"memory of a rank; default: {CountSpec.memory_bytes // 10**6}MB",
    )
    parser.add_argument(
        "--engine", type=Choice(_ENGINES), default="local", metavar="NAME", help="what runs it"
    )
    parser.add_argument(
        "--decode-errors",
        type=Choice(_ERROR_HANDLERS),
        default="strict",
        metavar="HOW",
        help="bytes that are not UTF-8 are an error, or are replaced",
    )
    parser.add_argument(
        "--field",
        type=Text("a key", may_be_empty=False),
        metavar="KEY",
        help="the files are JSON lines, and this key of each line holds the text",
    )
    parser.example = "paceline data count corpus/*.txt --ranks 4 --output words.tsv"


def run(args: Namespace) -> int:
    """Count, print the result, and write the table."""
    options = make_options(args)
    spec = options.spec
    size_bytes = sum(size for _, size in spec.files)
    where = (
        counted(options.ranks, "rank")
        if options.engine == "local"
        else f"Ray, {options.ranks} CPUs"
    )
    logger.info(
        f"counting {spec.by}: {human_bytes(size_bytes)} in {counted(len(spec.files), 'file')},"
        f" {where}"
    )
    started = time.perf_counter()
    try:
        with _sigterm_as_exception():
            result = _count(options)
    except KeyboardInterrupt:
        print("\nstopped; every process is ended, nothing was written", file=sys.stderr)
        return EXIT_SIGINT
    except _Terminated:
        print("stopped; every process is ended, nothing was written", file=sys.stderr)
        return EXIT_SIGTERM
    summary = _summary(options, result, size_bytes, time.perf_counter() - started)
    _print_notices(summary)
    if args.json:
        print(json.dumps(summary))
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        print(table(summary))
    return EXIT_DONE


def make_options(args: Namespace) -> CountOptions:
    """Check the options together.

    Raises:
        ConfigError: no file, an option without the other that it needs, a table in place of a file
            that is counted, or no Ray.
    """
    if not args.files:
        raise ConfigError(
            "no file is given", allowed="paceline data count FILE…", fix="name the files to count"
        )
    output = args.output
    if output is not None and output.exists():
        for path, _ in args.files:
            if output.samefile(path):
                raise ConfigError(
                    f"`--output {output}` is one of the files to count", fix="name another file"
                )
    if args.engine == "ray":
        from paceline.data.count.ray_engine import check_ray

        check_ray()
    spec = CountSpec(
        files=tuple(args.files),
        by=args.unit,
        tokenizer=_tokenizer_folder(args.unit, args.tokenizer),
        field=args.field,
        errors=args.decode_errors,
        memory_bytes=CountSpec.memory_bytes
        if args.memory_per_rank is None
        else args.memory_per_rank,
        top=args.top,
    )
    return CountOptions(spec, args.ranks, args.engine, output)


def _num_cores() -> int:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, _MAX_DEFAULT_RANKS)


def _tokenizer_folder(by: str, tokenizer: str | None) -> Path | None:
    if by == "words":
        if tokenizer is not None:
            raise ConfigError(
                "`--tokenizer` is not used to count words",
                fix="add `--unit tokens`, or leave it out",
            )
        return None
    if not tokenizer:
        raise ConfigError(
            "`--unit tokens` needs a tokenizer",
            allowed="a folder, a hub id, or builtin:qwen2-tiny",
            fix="give one as `--tokenizer DIR`",
        )
    from paceline.data.text.tokenizer import find_tokenizer, load_tokenizer
    from paceline.models.builtin import resolve_model

    folder = find_tokenizer(resolve_model(tokenizer))
    load_tokenizer(folder)
    return folder


def _count(options: CountOptions) -> CountResult:
    if options.engine == "ray":
        from paceline.data.count.ray_engine import count_on_ray

        return count_on_ray(options.spec, options.ranks, options.output)
    return count_locally(options.spec, options.ranks, options.output)


def _summary(
    options: CountOptions, result: CountResult, size_bytes: int, wall_s: float
) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "total": result.total,
        "distinct": result.distinct,
        "top": [list(entry) for entry in result.top],
        "by": options.spec.by,
        "engine": options.engine,
        "ranks": options.ranks,
        "files": len(options.spec.files),
        "size_bytes": size_bytes,
        "memory_bytes": options.spec.memory_bytes,
        "spills": result.spills,
        "spilled_bytes": result.spilled_bytes,
        "shuffled_bytes": result.shuffled_bytes if options.engine == "local" else None,
        "replaced": result.replaced,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "wall_s": round(wall_s, 3),
        "output": str(options.output) if options.output else None,
    }


def _print_notices(summary: dict[str, Any]) -> None:
    """Print what the user should know beside the counts."""
    if summary["spills"]:
        memory, size = human_bytes(summary["memory_bytes"]), human_bytes(summary["spilled_bytes"])
        logger.info(
            f"{summary['spills']:,} full tables were spilled to disk, {size} in all ({memory} a"
            " rank)"
        )
    if summary["replaced"]:
        logger.warning(
            f"{summary['replaced']:,} stretches of bytes that are not UTF-8 counted as U+FFFD"
        )
    if summary["output"]:
        logger.info(f"written: {summary['output']}")


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that temporary files are removed."""


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Terminated

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: signals are the caller's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def table(summary: dict[str, Any]) -> str:
    """The most frequent words with their shares."""
    noun = summary["by"].removesuffix("s")
    lines = [
        f"{counted(summary['total'], noun)}, {summary['distinct']:,} distinct, in"
        f" {summary['wall_s']:.1f} s"
    ]
    if summary["top"]:
        width = max(len(f"{summary['top'][0][1]:,}"), 5)
        lines += ["", f"  {'count':>{width}}  {'share':>7}  {noun}"]
    for word, count in summary["top"]:
        share = 100 * count / summary["total"]
        lines.append(f"  {count:>{width},}  {share:6.2f}%  {printable(word)}")
    return "\n".join(lines)
