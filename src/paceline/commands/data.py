"""`paceline data count` and `paceline data stats`: the words of the command line checked, the work
done, the result shown."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, ConfigError, nearest
from paceline.core.files import Scratch, human_bytes
from paceline.core.formatting import counted
from paceline.data.count.job import (
    LEAST_MEMORY_BYTES,
    CountResult,
    CountSpec,
    combined,
    count_rank,
    write_table,
)
from paceline.data.count.runs import merged, rows

ACTIONS = ("count", "stats", "preview")
COUNT_VALUES = {
    "ranks": int, "by": str, "tokenizer": str, "output": str, "top": int, "memory": str, "engine": str, "errors": str,
    "field": str,
}  # fmt: skip
MAX_RANKS = 64
MAX_TOP = 100_000
_ENGINES, _BY, _ERRORS = ("local", "ray"), ("words", "tokens"), ("strict", "replace")
_PREFIX = "paceline-count-"  # of the folder for what does not fit into memory
#: nothing waits this long for words: a rank that dies is noticed at once, and a long file is no
#: failure
_NO_LIMIT_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Request:
    """A count that was asked for. ``output``: where the table goes, or None."""

    job: CountSpec
    ranks: int
    engine: str
    output: Path | None


def check_action(words: list[str]) -> str:
    """The first word after `data`.

    Raises:
        ConfigError: it is none of :data:`ACTIONS`.
    """
    given = words[0] if words else ""
    if given not in ACTIONS:
        near = nearest(given, ACTIONS) or "count"
        raise ConfigError(
            f"`paceline data {given}`".replace(" `", "`") + " is nothing to do",
            allowed=(
                "paceline data count FILE…, paceline data stats|preview CONFIG.yaml [key=value …]"
            ),
            fix=f"type `paceline data {near} …`",
        )
    return given


def make_request(files: list[str], values: dict[str, Any]) -> Request:
    """Check the words of the command line.

    Raises:
        ConfigError: a file that cannot be counted, an unknown flag, a number out of range, a table
            that could not be written.
    """
    for word in files:
        if word.startswith("--"):
            flags = [f"--{name}" for name in COUNT_VALUES]
            near = nearest(word.partition("=")[0], [*flags, "--json"])
            fix = f"did you mean `{near}`?" if near else "see docs/how-to/data.md"
            raise ConfigError(
                f"`data count` has no flag `{word}`", allowed=", ".join([*flags, "--json"]), fix=fix
            )
    if not files:
        raise ConfigError(
            "no file is given", allowed="paceline data count FILE…", fix="name the files to count"
        )
    ranks = _in_range("ranks", values.get("ranks", _cores()), 1, MAX_RANKS)
    by, engine = (
        _one_of("by", values.get("by", "words"), _BY),
        _one_of("engine", values.get("engine", "local"), _ENGINES),
    )
    errors = _one_of("errors", values.get("errors", "strict"), _ERRORS)
    top = _in_range("top", values.get("top", 10), 0, MAX_TOP)
    if values.get("field") == "":
        raise ConfigError(
            "`--field` has no value", fix="name the key that holds the text, as `--field text`"
        )
    found = tuple(_file(Path(word)) for word in files)
    output = _output(values["output"], found) if "output" in values else None
    if engine == "ray":
        from paceline.data.count.ray_engine import check_ray

        check_ray()
    job = CountSpec(
        files=found,
        by=by,  # type: ignore[arg-type]
        tokenizer=_tokenizer(by, values.get("tokenizer")),
        field=values.get("field"),
        errors=errors,  # type: ignore[arg-type]
        memory_bytes=_memory(values["memory"]) if "memory" in values else CountSpec.memory_bytes,
        top=top,
        keep_table=output is not None,
    )
    return Request(job, ranks, engine, output)


def _cores() -> int:
    found = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(found, 8)


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ConfigError(f"`--{name} {value}` is out of range", allowed=f"{low} to {high:,}")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        fix = f"did you mean `{nearest(value, known) or known[0]}`?"
        raise ConfigError(f"`--{name} {value}` is not known", allowed=", ".join(known), fix=fix)
    return value


def _memory(text: str) -> int:
    from paceline.planner.hardware import parse_size

    try:
        return parse_size(text, "--memory")
    except ConfigError as error:
        least = human_bytes(LEAST_MEMORY_BYTES)
        raise ConfigError(
            error.what,
            allowed=f"a size of {least} or more for each rank, as 256MB or 1GiB",
            fix="write e.g. `--memory 256MB`",
        ) from error


def _file(path: Path) -> tuple[Path, int]:
    path = path.expanduser()
    if path.is_dir():
        raise ConfigError(
            f"`{path}` is a folder", allowed="files", fix=f"name the files in it, as {path}/*.txt"
        )
    if not path.exists():
        beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        raise ConfigError(
            f"there is no file `{path}`",
            fix=f"did you mean `{path.parent / near}`?" if near else "check the path",
        )
    if not path.is_file():
        raise ConfigError(
            f"`{path}` is no plain file",
            allowed="files on a disk, which several ranks can read at once",
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(f"`{path}` may not be read", fix="give yourself the right to read it")
    return path, path.stat().st_size


def _output(text: str, files: tuple[tuple[Path, int], ...]) -> Path:
    path = Path(text).expanduser()
    if (
        not text
        or path.is_dir()
        or not path.absolute().parent.is_dir()
        or not os.access(path.absolute().parent, os.W_OK)
    ):
        raise ConfigError(
            f"`--output {text}` cannot be written",
            allowed="a file in a folder that exists",
            fix="name a TSV file",
        )
    if path.exists() and any(path.samefile(one) for one, _ in files):
        raise ConfigError(
            f"`--output {path}` is one of the files to count", fix="name another file"
        )
    return path


def _tokenizer(by: str, given: str | None) -> Path | None:
    if by == "words":
        if given is not None:
            raise ConfigError(
                "`--tokenizer` has no part in counting words",
                fix="add `--by tokens`, or leave it out",
            )
        return None
    if not given:
        raise ConfigError(
            "`--by tokens` needs a tokenizer",
            allowed="a folder, a hub id, or builtin:qwen2-tiny",
            fix="give one as `--tokenizer DIR`",
        )
    from paceline.data.text.tokenizer import find_tokenizer, load_tokenizer
    from paceline.models.builtin import resolve_model

    folder = find_tokenizer(resolve_model(given))
    load_tokenizer(folder)
    return folder


def count(request: Request, as_json: bool) -> int:
    """Count, print, write the table. Returns the exit code."""
    job = request.job
    size = sum(one for _, one in job.files)
    where = (
        counted(request.ranks, "rank")
        if request.engine == "local"
        else f"Ray, {request.ranks} CPUs"
    )
    print(
        f"counting {job.by}: {human_bytes(size)} in {counted(len(job.files), 'file')}, {where}",
        file=sys.stderr,
        flush=True,
    )
    started = time.perf_counter()
    try:
        with _terminable():
            found = _run(request)
    except KeyboardInterrupt:
        print("\nstopped; every process is ended, nothing was written", file=sys.stderr)
        return EXIT_SIGINT
    except _Terminated:
        print("stopped; every process is ended, nothing was written", file=sys.stderr)
        return EXIT_SIGTERM
    result = {
        "total": found.total,
        "distinct": found.distinct,
        "top": [list(one) for one in found.top],
        "by": job.by,
        "engine": request.engine,
        "ranks": request.ranks,
        "files": len(job.files),
        "size_bytes": size,
        "memory_bytes": job.memory_bytes,
        "spills": found.spills,
        "spilled_bytes": found.spilled_bytes,
        "shuffled_bytes": found.shuffled_bytes if request.engine == "local" else None,
        "replaced": found.replaced,
        "seconds": {name: round(value, 3) for name, value in found.seconds.items()},
        "wall_s": round(time.perf_counter() - started, 3),
        "output": str(request.output) if request.output else None,
    }
    _say(result)
    if as_json:
        print(json.dumps(result))
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        print(table(result))
    return EXIT_DONE


def _say(result: dict[str, Any]) -> None:
    """What the person should know beside the counts."""
    if result["spills"]:
        memory, size = human_bytes(result["memory_bytes"]), human_bytes(result["spilled_bytes"])
        print(
            f"{result['spills']:,} full tables were spilled to disk, {size} in all ({memory} a"
            " rank)",
            file=sys.stderr,
        )
    if result["replaced"]:
        print(
            f"warning: {result['replaced']:,} stretches of bytes that are not UTF-8 counted as"
            " U+FFFD",
            file=sys.stderr,
        )
    if result["output"]:
        print(f"written: {result['output']}", file=sys.stderr)


def _run(request: Request) -> CountResult:
    if request.engine == "ray":
        from paceline.data.count.ray_engine import count_on_ray

        return count_on_ray(request.job, request.ranks, request.output)
    from paceline.launch.rank_pool import run_on_ranks, warm_up

    # Ranks are ended before the folder is removed: what a killed rank still writes has nowhere to
    # go otherwise.
    with Scratch(_PREFIX) as folder:
        warm_up(["paceline.data.count.shuffle", "paceline.data.count.job"])
        job = replace(request.job, folder=folder)
        parts: list[CountResult] = run_on_ranks(
            count_rank, request.ranks, job, timeout_s=_NO_LIMIT_S, collective_timeout_s=_NO_LIMIT_S
        )
        if request.output is not None:
            found = [one.table for one in parts if one.table is not None]
            write_table(
                request.output, merged([rows(one, 0, one.stat().st_size, 1 << 18) for one in found])
            )
        return combined(parts, job.top)


class _Terminated(BaseException):
    """SIGTERM, as an exception: so that what was begun is cleared away."""


@contextmanager
def _terminable() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: the caller's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(result: dict[str, Any]) -> str:
    """The figures for a person: the most frequent words with their share."""
    noun = result["by"].removesuffix("s")
    lines = [
        f"{counted(result['total'], noun)}, {result['distinct']:,} distinct, in"
        f" {result['wall_s']:.1f} s"
    ]
    if result["top"]:
        width = max(len(f"{result['top'][0][1]:,}"), 5)
        lines += ["", f"  {'count':>{width}}  {'share':>7}  {noun}"]
    for word, number in result["top"]:
        lines.append(f"  {number:>{width},}  {100 * number / result['total']:6.2f}%  {shown(word)}")
    return "\n".join(lines)


def shown(word: str, longest: int = 60) -> str:
    """A word that does nothing to the terminal: characters that do not print are escaped, a long
    one is cut."""
    text = "".join(
        one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode()
        for one in word[:longest]
    )
    return text + ("…" if len(word) > longest else "")
