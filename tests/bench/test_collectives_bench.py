"""Test that `paceline bench collectives` measures every case, fits its model and rejects invalid
arguments."""

import json
from pathlib import Path

import pytest
from commands import parse, run

from paceline.bench.collectives import bus_bandwidth, fits, load, table
from paceline.commands.bench_collectives import make_options
from paceline.core.errors import ConfigError


@pytest.mark.soak
def test_command_measures_every_case(tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    args = (
        "collectives",
        "--ranks",
        "2,3",
        "--sizes",
        "1KB,40KB",
        "--algorithms",
        "native,ring,halving",
        "--json",
    )
    results = json.loads(run(*args, f"--output={page}", verb="bench").stdout)
    cases = [
        (timing["collective"], timing["algorithm"], timing["world_size"], timing["bytes"])
        for timing in results
    ]
    expected = [
        (collective, algorithm, ranks, size)
        for ranks in (2, 3)
        for size in (1024, 40960)
        for collective, algorithm in (
            ("all-reduce", "native"), ("all-reduce", "ring"), ("all-reduce", "halving"),
            ("broadcast", "native"), ("broadcast", "ring"),
        )
    ]  # fmt: skip
    assert sorted(cases) == sorted(expected)
    for timing in results:
        assert list(timing) == [
            "collective",
            "algorithm",
            "world_size",
            "bytes",
            "latency_s",
            "bus_bandwidth_bytes_s",
        ]
        assert timing["latency_s"] > 0
        factor = (
            2 * (timing["world_size"] - 1) / timing["world_size"]
            if timing["collective"] == "all-reduce"
            else 1
        )
        assert timing["bus_bandwidth_bytes_s"] == pytest.approx(
            factor * timing["bytes"] / timing["latency_s"]
        )
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 8  # two collectives, two world sizes, two plots each
    assert "src=" not in text
    assert "https://" not in text
    text = table(results)
    assert text.count(" ring ") >= 8
    assert "residual" in text
    assert len(fits(results)) == 10


def test_load_and_bus_bandwidth() -> None:
    assert load("all-reduce", "ring", 4, 4000) == (6, 6000)
    assert load("all-reduce", "naive", 4, 4000) == (3, 12000)
    assert load("all-reduce", "native", 4, 4000) == load("all-reduce", "ring", 4, 4000)
    assert bus_bandwidth("all-reduce", 4, 4000, 0.5) == 12000
    assert bus_bandwidth("broadcast", 4, 4000, 0.5) == 8000


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [
        (["colectives"], "collectives"),
        (["collectives", "--ranks", "1"], "2 to 16"),
        (["collectives", "--ranks", "two"], "2 to 16"),
        (["collectives", "--ranks", ","], "comma-separated"),
        (["collectives", "--sizes", "1XB"], "KB, MB or GB"),
        (["collectives", "--sizes", "0KB"], "4B to 1GB"),
        (["collectives", "--sizes", "9GB"], "4B to 1GB"),
        (["collectives", "--algorithms", "rnig"], "native, ring, tree, halving, naive"),
        (["collectives", "--output", "/no/such/folder/page.html"], "an existing folder"),
    ],
)
def test_rejects_invalid_arguments(tokens: list[str], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("bench", *tokens)
    assert allowed in str(caught.value)


def test_parses_sizes_and_ranks() -> None:
    args = parse("bench", "collectives", "--sizes", "1KB,64kb,1.5MB,25MiB,7,1M", "--ranks", "4,2,4")
    options = make_options(args)
    assert options.sizes == (4, 1024, 65536, 1 << 20, 1572864, 26214400)
    assert options.ranks == (2, 4)
    assert ("broadcast", "halving") not in options.cases
    assert ("all-reduce", "halving") in options.cases
