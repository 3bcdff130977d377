"""Format numbers, sizes and durations as text; split integers into shares deterministically."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby, pairwise
from typing import Any

from paceline.core.files import human_bytes
from paceline.core.report import DataFigures, PackingFigures, PeakRate, SourceFigures


def edges(total: int, parts: int) -> list[int]:
    """Return where each of ``parts`` consecutive shares of ``range(total)`` begins, and the end:
    ``8, 3`` → ``[0, 3, 6, 8]``.

    Sizes differ by at most one, and the larger shares are spread evenly: if ``k`` divides
    ``parts``, the values at multiples of ``k`` are ``edges(total, parts // k)``.
    """
    return [-(-total * part // parts) for part in range(parts + 1)]


def shares(total: int, parts: int) -> list[int]:
    """Return the sizes of the shares of :func:`edges`: ``8, 3`` → ``[3, 3, 2]``."""
    return [end - start for start, end in pairwise(edges(total, parts))]


def shares_text(total: int, parts: int) -> str:
    """Format the sizes of the shares as ``3+3+2``, or of many parts as ``2 × 3 + 62 × 2``."""
    return counts_text(sorted(shares(total, parts), reverse=True))


def weighted_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by the largest-remainder method, with at least 1
    per share.

    ``4, [3, 1]`` → ``[3, 1]``. Ties go to the lower index, so the result is the same on every rank.

    Args:
        total: number of items, at least ``len(weights)``.
        weights: positive numbers.
    """
    sum_of_weights = sum(weights)
    quotas = [total * weight / sum_of_weights for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(
        range(len(weights)), key=lambda index: (counts[index] - quotas[index], index)
    )
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    while 0 in counts:
        largest = max(range(len(counts)), key=lambda index: (counts[index], -index))
        counts[largest] -= 1
        counts[counts.index(0)] += 1
    return counts


def counts_text(counts: Sequence[int]) -> str:
    """Format counts in rank order as ``3+1``. If there are more than eight, runs of equal counts
    are abbreviated: ``8 × 3 + 8 × 1``."""
    if len(counts) <= 8:
        return "+".join(map(str, counts))
    return " + ".join(f"{len(list(run))} × {count}" for count, run in groupby(counts))


UNKNOWN = "–"


def number(value: Any) -> float | None:
    """Return a value of an event as a float, or None if it is unknown. The strings "nan", "inf" and
    "-inf" become those floats."""
    if value is None or isinstance(value, bool | dict | list):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def finite(value: Any) -> float | None:
    """Return a value of an event as a float, or None if it is unknown or not finite."""
    figure = number(value)
    return figure if figure is not None and math.isfinite(figure) else None


def _of_finite(format_figure: Callable[[float], str]) -> Callable[[Any], str]:
    """Wrap a formatter of finite numbers so that it returns :data:`UNKNOWN` for any other value."""

    @wraps(format_figure)
    def format_value(value: Any) -> str:
        figure = finite(value)
        return UNKNOWN if figure is None else format_figure(figure)

    return format_value


def loss(value: Any) -> str:
    """Format a loss: ``12.35``, ``1.2346``, ``0.01235``, ``1.20e-05``, ``nan``."""
    figure = number(value)
    if figure is None:
        return UNKNOWN
    if not math.isfinite(figure):
        return str(figure)
    size = abs(figure)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{figure:.2e}"
    return f"{figure:.2f}" if size >= 10 else f"{figure:.4f}"


def rate(value: Any) -> str:
    """Format a learning rate: ``1e-4``, ``2.5e-5``."""
    figure = number(value)
    if figure is None:
        return UNKNOWN
    if figure == 0 or 1e-3 < abs(figure) < 1e3 or not math.isfinite(figure):
        return f"{figure:.3g}"
    digits, exponent = f"{figure:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def short_time(seconds: float) -> str:
    """Return a time of at most seven characters: ``12 ms``, ``1.3 s``, ``24 min``, ``3.1 h``."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (99.5, "s", 1.0), (5970.0, "min", 60.0)):
        if seconds < limit:
            figure = f"{seconds / size:.0f}" if unit == "min" else significant(seconds / size)
            return f"{figure} {unit}"
    return f"{significant(seconds / 3600)} h"


def significant(figure: float, digits: int = 3) -> str:
    """Format a number with this many significant digits, without an exponent if it is large:
    ``0.123``, ``12.3``, ``1,230``."""
    return f"{float(f'{figure:.{digits}g}'):,.15g}"


@_of_finite
def count(figure: float) -> str:
    """Format a number with thousands separators: ``12,345``."""
    return f"{figure:,.0f}" if figure == int(figure) else significant(figure)


@_of_finite
def short_count(figure: float) -> str:
    """Format a number in few characters, for a progress line: ``950``, ``12.3k``, ``4.57M``."""
    for unit in ("", "k", "M", "B"):
        if abs(figure) < 999.5:
            return f"{figure:.3g}{unit}"
        figure /= 1000
    return f"{figure:.3g}T"


@_of_finite
def duration(seconds: float) -> str:
    """Format seconds: ``0.42 s``, ``12.3 s``, ``2 min 05 s``, ``3 h 07 min``, ``2 d 4 h``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


@_of_finite
def short_duration(seconds: float) -> str:
    """Format the seconds of a step or a message: ``0.12 ms``, ``12 ms``, ``2.8 s``; from one minute
    on as :func:`duration` does."""
    if abs(seconds) >= 59.95:
        return duration(seconds)
    figure, unit = (seconds, "s") if abs(seconds) >= 0.9995 else (seconds * 1e3, "ms")
    return f"{figure:.0f} {unit}" if abs(figure) >= 9.95 else f"{figure:.2g} {unit}"


@_of_finite
def percent(share: float) -> str:
    """Format a share: ``97 %``, ``3.2 %``."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


@_of_finite
def bit_rate(bytes_per_s: float) -> str:
    """Format a bandwidth in bits per second: ``94 Mbit/s``."""
    rate, unit = 8 * bytes_per_s / 1e3, "kbit/s"
    for larger_unit in ("Mbit/s", "Gbit/s"):
        if rate >= 1e3:
            rate, unit = rate / 1e3, larger_unit
    return f"{rate:.0f} {unit}" if rate >= 9.95 else f"{rate:.2g} {unit}"


def clock(value: Any) -> str:
    """Format seconds as on a clock, for a progress line: ``1:05``, ``3:07:09``."""
    seconds = finite(value)
    if seconds is None:
        return "--:--"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"


@_of_finite
def size(size_bytes: float) -> str:
    """Format a size in bytes: ``1.5 GiB``."""
    return human_bytes(size_bytes)


@_of_finite
def ranks(world_size: float) -> str:
    """Format a number of ranks: ``1 rank``, ``4 ranks``."""
    return counted(round(world_size), "rank")


def rank_names(ranks: Sequence[int]) -> str:
    """Format a list of ranks: ``rank 1``, ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def clean(text: Any) -> str:
    """Return ``text`` without control characters, so that the contents of a config or a dataset
    cannot control the terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else " " if char == "\t" else "\ufffd"
        for char in str(text)
    )


def max_over_ranks(memory_bytes: Any) -> float | None:
    """Return the maximum of ``memory_bytes``, which has one value per rank or is a single value."""
    values = memory_bytes if isinstance(memory_bytes, list | tuple) else [memory_bytes]
    known = [figure for value in values if (figure := finite(value)) is not None]
    return max(known, default=None)


def flops(rate: Any, utilization: Any = None) -> str | None:
    """Format FLOPs per second and the model FLOPs utilization: ``312.4 TFLOP/s (MFU 31.6 %)``.
    None if the rate is unknown."""
    flops_s, share = finite(rate), finite(utilization)
    if flops_s is None:
        return None
    unit, scale = ("TFLOP/s", 1e12) if flops_s >= 1e11 else ("GFLOP/s", 1e9)
    text = f"{flops_s / scale:.1f} {unit}"
    return text if share is None else f"{text} (MFU {100 * share:.1f} %)"


def peak_line(peak: PeakRate) -> str:
    """Describe a peak rate: ``989.0 TFLOP/s, H100-SXM5-80GB (source: …)``."""
    return f"{flops(peak['flops_s'])}, {peak['device']} (source: {peak['source']})"


def data_line(data: DataFigures) -> str:
    """Summarize the data of a run: ``90 read, 85 kept, 4 truncated, 5 dropped (3 empty, 2 too
    long), 7 turns without loss``."""
    if data.get("tokens") is not None and not data.get("read"):
        return "streamed"
    dropped = data.get("dropped") or {}
    reasons = dropped if isinstance(dropped, dict) else {}
    total = sum(reasons.values()) if isinstance(dropped, dict) else dropped
    parts = [f"{count(data.get('read'))} read", f"{count(data.get('kept'))} kept"]
    if data.get("truncated") is not None:
        parts.append(f"{count(data['truncated'])} truncated")
    named = ", ".join(
        f"{count(num_rows)} {clean(reason)}" for reason, num_rows in reasons.items() if num_rows
    )
    parts.append(f"{count(total)} dropped" + (f" ({named})" if named else ""))
    if data.get("excluded_turns"):
        parts.append(f"{count(data['excluded_turns'])} turns without loss")
    return ", ".join(parts)


def sources_line(sources: Sequence[SourceFigures]) -> str:
    """Summarize several sources: ``a.jsonl 70.0 % of the rows (1,200 samples), …``."""
    return ", ".join(map(_source_text, sources))


def _source_text(source: SourceFigures) -> str:
    text = clean(source["name"])
    if "share" in source:
        text += f" {100 * source['share']:.1f} % of the rows"
    for noun, number in (("sample", source.get("samples")), ("row", source.get("rows"))):
        text += "" if number is None else f" ({counted(number, noun)})"
    return text


def packing_line(packing: PackingFigures) -> str:
    """Summarize packed rows: ``bfd: 1,190 rows of at most 1,024 tokens, 96.7 % filled``."""
    rows = counted(sum(packing["rows"]), "row") if "rows" in packing else "rows"
    text = f"{packing['strategy']}: {rows} of at most {packing['capacity']:,} tokens"
    return text + (f", {100 * packing['fill']:.1f} % filled" if "fill" in packing else "")


def counted(number: float | None, noun: str) -> str:
    """Format a number with its noun: ``1 sample``, ``2,000 samples``, ``0.385 epochs``."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def printable(text: str, max_chars: int = 60) -> str:
    """Return ``text`` with non-printable characters escaped, truncated to ``max_chars``."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text[:max_chars]
    )
    return shown + ("…" if len(text) > max_chars else "")
