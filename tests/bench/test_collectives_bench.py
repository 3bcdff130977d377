"""`paceline bench collectives`: every case is measured, the model is the one that fits, wrong words
are refused."""

import json
from pathlib import Path

import pytest
from commands import parse, run

from paceline.bench.collectives import bus_bandwidth, fits, load, table
from paceline.commands.bench import make_options
from paceline.core.errors import ConfigError


@pytest.mark.soak
def test_the_command_measures_every_case(tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    words = (
        "collectives",
        "--ranks",
        "2,3",
        "--sizes",
        "1KB,40KB",
        "--algorithms",
        "native,ring,halving",
        "--json",
    )
    results = json.loads(run(*words, f"--output={page}", verb="bench").stdout)
    cases = [
        (one["collective"], one["algorithm"], one["world_size"], one["bytes"]) for one in results
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
    for one in results:
        assert list(one) == [
            "collective",
            "algorithm",
            "world_size",
            "bytes",
            "latency_s",
            "bus_bandwidth_bytes_s",
        ]
        assert one["latency_s"] > 0
        factor = (
            2 * (one["world_size"] - 1) / one["world_size"]
            if one["collective"] == "all-reduce"
            else 1
        )
        assert one["bus_bandwidth_bytes_s"] == pytest.approx(
            factor * one["bytes"] / one["latency_s"]
        )
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 8  # two collectives, two worlds, two plots each
    assert "src=" not in text
    assert "https://" not in text
    said = table(results)
    assert said.count(" ring ") >= 8
    assert "residual" in said
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
        (["collectives", "--ranks", ","], "several with commas"),
        (["collectives", "--sizes", "1XB"], "KB, MB or GB"),
        (["collectives", "--sizes", "0KB"], "4B to 1GB"),
        (["collectives", "--sizes", "9GB"], "4B to 1GB"),
        (["collectives", "--algorithms", "rnig"], "native, ring, tree, halving, naive"),
        (["collectives", "--output", "/no/such/folder/page.html"], "a folder that exists"),
    ],
)
def test_wrong_arguments(tokens: list[str], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("bench", *tokens)
    assert allowed in str(caught.value)


def test_sizes() -> None:
    args = parse("bench", "collectives", "--sizes", "1KB,64kb,1.5MB,25MiB,7,1M", "--ranks", "4,2,4")
    options = make_options(args)
    assert options.sizes == (4, 1024, 65536, 1 << 20, 1572864, 26214400)
    assert options.ranks == (2, 4)
    assert ("broadcast", "halving") not in options.cases
    assert ("all-reduce", "halving") in options.cases
