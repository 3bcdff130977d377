"""Counting of words and tokens: the map, shuffle and reduce phases, compared with Python."""

import gzip
import json
import multiprocessing
import random
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, RunError
from paceline.data.count.job import CountSpec, count_locally, tables, write_table
from paceline.data.count.runs import Spills, encode
from paceline.data.count.shards import ReadOptions, ScanStats, plan_shards, read_texts, white_space
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import builtin_tokenizer

SPACES = [chr(code) for code in range(0x110000) if chr(code).isspace()]
LETTERS = [
    "a",
    "b",
    "é",
    "中",
    "😀",
    "\u200b",
    "\ufeff",
    "\x00",
    "\x01",
    "\x08",
    "\ufffd",
    "\u0301",
    '"',
    "\\",
]


def random_text(seed: int, length: int, spaces: float = 0.3) -> str:
    generator = random.Random(seed)
    return "".join(
        generator.choice(SPACES if generator.random() < spaces else LETTERS) for _ in range(length)
    )


def save(path: Path, text: str | bytes) -> tuple[Path, int]:
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(raw)
    return path, len(raw)


def write_corpus(folder: Path) -> tuple[list[tuple[Path, int]], Counter[str]]:
    """Write files that are difficult to divide into shards; return them and their word counts."""
    contents = [
        random_text(1, 6000), "", random_text(2, 3), "no line end", "one giant line " * 500,
        "\u3000".join("中文" * 200),
        Path(json.__file__).read_text(encoding="utf-8"), "\n\n \u2028",
    ]  # fmt: skip
    files = [save(folder / f"{number}.txt", text) for number, text in enumerate(contents)]
    return files, Counter(token for text in contents for token in text.split())


def test_white_space_pattern_matches_python_split() -> None:
    for code in range(0x20000):
        if not 0xD800 <= code < 0xE000:
            assert bool(white_space().fullmatch(chr(code).encode())) == chr(code).isspace(), hex(
                code
            )


@pytest.mark.parametrize("num_shards", [1, 2, 7, 61])
@pytest.mark.parametrize("chunk_bytes", [3, 64, 1 << 20])
def test_shards_contain_every_word_once(tmp_path: Path, num_shards: int, chunk_bytes: int) -> None:
    files, expected = write_corpus(tmp_path)
    options = ReadOptions(chunk_bytes=chunk_bytes)
    scan_stats = ScanStats()
    counts: Counter[str] = Counter()
    for share in plan_shards(files, num_shards):
        for shard in share:
            for text in read_texts(shard, options, scan_stats):
                counts.update(text.split())
    assert counts == expected
    assert scan_stats.size_bytes == sum(size for _, size in files)


def test_line_shards_contain_complete_lines(tmp_path: Path) -> None:
    lines = [random_text(number, 40).replace("\n", " ") for number in range(50)]
    files = [save(tmp_path / "a.txt", "\n".join(lines))]
    for num_shards in (1, 3, 8, 100):
        shards = [shard for share in plan_shards(files, num_shards) for shard in share]
        texts = [
            text
            for shard in shards
            for text in read_texts(shard, ReadOptions(lines=True, chunk_bytes=32), ScanStats())
        ]
        assert all(text.endswith("\n") for text in texts[:-1])
        assert "".join(texts).split("\n") == lines


def test_compressed_files_and_json_fields(tmp_path: Path) -> None:
    contents = [random_text(7, 80), "", "a\tb\nc", "\ud800 lone"]
    raw = "\n".join(["", *(json.dumps({"text": text, "n": 1}) for text in contents)]).encode()
    plain = save(tmp_path / "a.jsonl", raw)
    compressed = save(tmp_path / "b.jsonl.gz", gzip.compress(raw))
    for num_shards in (1, 4):
        shards = [
            shard
            for share in plan_shards([plain, compressed, compressed], num_shards)
            for shard in share
        ]
        texts = [
            text
            for shard in shards
            for text in read_texts(shard, ReadOptions(field="text", chunk_bytes=50), ScanStats())
        ]
        assert Counter(texts) == Counter(contents * 3)


@pytest.mark.parametrize(
    ("name", "raw", "options", "message"),
    [
        ("a.txt", b"ab \xff c", ReadOptions(chunk_bytes=2), "0xff at offset 3"),
        ("a.txt", b"word " * 9 + b"\xe4\xb8", ReadOptions(chunk_bytes=8), "0xe4 at offset 45"),
        ("a.txt", b"\xed\xa0\x80", ReadOptions(), "offset 0"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}\n', ReadOptions(field="text"), "offset 14"),
        ("a.jsonl", b'{"text": "x"}\n{"text":\n', ReadOptions(field="text"), "not valid JSON"),
        (
            "a.txt.gz",
            gzip.compress(b"some words", mtime=0)[:-9],
            ReadOptions(),
            "not a complete gzip file",
        ),
        ("a.txt.gz", b"some words", ReadOptions(), "not a complete gzip file"),
    ],
)
def test_read_error_names_file_and_offset(
    tmp_path: Path, name: str, raw: bytes, options: ReadOptions, message: str
) -> None:
    files = [save(tmp_path / name, raw)]
    with pytest.raises(ConfigError, match=name) as caught:
        [*read_texts(plan_shards(files, 1)[0][0], options, ScanStats())]
    assert message in str(caught.value)


def test_undecodable_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    raw = b"a\xffb \xe2\x80 \xf0\x9f\x98 \xef\xbf\xbd x\xc3\n\xed\xa0\x80 \xf0\xc2\x85y"
    files = [save(tmp_path / "a.txt", raw)]
    expected = raw.decode("utf-8", "replace")
    for num_shards in (1, 3, 9):
        scan_stats = ScanStats()
        shards = [shard for share in plan_shards(files, num_shards) for shard in share]
        counts = Counter(
            token
            for shard in shards
            for text in read_texts(shard, ReadOptions(errors="replace", chunk_bytes=2), scan_stats)
            for token in text.split()
        )
        assert counts == Counter(expected.split())
        assert scan_stats.replaced == expected.count("\ufffd") - 1  # the text itself contains one


def test_rejects_word_that_exceeds_memory(tmp_path: Path) -> None:
    files = [save(tmp_path / "a.txt", "a " + "x" * 5000 + " b")]
    for num_shards in (1, 3):
        shards = [shard for share in plan_shards(files, num_shards) for shard in share]
        options = ReadOptions(chunk_bytes=64, longest_bytes=1000)
        with pytest.raises(RunError, match="--memory-per-rank"):
            list(chain.from_iterable(read_texts(shard, options, ScanStats()) for shard in shards))


def test_merged_runs_are_sorted_sums(tmp_path: Path) -> None:
    generator = random.Random(3)
    spills = Spills(tmp_path, 3, 1 << 20)
    total: Counter[str] = Counter()
    for number in range(130):  # more runs than are merged at once
        table = Counter(
            random_text(number, 200).split() + ["\ud800", "😀"] * generator.randrange(3)
        )
        spills.add(table)
        total.update(table)
    run = spills.finish()
    assert [path.name for path in tmp_path.iterdir()] == [run.path.name]
    parts = [list(run.part(rank, 512)) for rank in range(3)]
    for part in parts:
        assert part == sorted(part)
    assert Counter(dict(row for part in parts for row in part)) == Counter(
        {encode(token): n for token, n in total.items()}
    )


def test_memory_limit_bounds_table_size(tmp_path: Path) -> None:
    files = [save(tmp_path / "a.txt", " ".join(f"word-{number}" for number in range(40_000)))]
    spec = CountSpec(tuple(files), memory_bytes=1 << 20)
    scan_stats = ScanStats()
    count_tables = list(tables(plan_shards(files, 1)[0], spec, scan_stats))
    assert scan_stats.full_tables >= 10
    assert max(map(len, count_tables)) < 5000
    assert Counter(token for table in count_tables for token in table) == Counter(
        f"word-{number}" for number in range(40_000)
    )


def test_token_counts_do_not_depend_on_number_of_shards(tmp_path: Path) -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")[:6000] + random_text(5, 300)
    files = [save(tmp_path / "a.txt", text)]
    folder = Path(builtin_tokenizer())
    backend = load_tokenizer(folder).backend
    lines = text.split("\n")
    units = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
    expected = Counter(
        token for unit in units for token in backend.encode(unit, add_special_tokens=False).tokens
    )
    for num_shards in (1, 3):
        spec = CountSpec(tuple(files), by="tokens", tokenizer=folder)
        counts: Counter[str] = Counter()
        for share in plan_shards(files, num_shards):
            for table in tables(share, spec, ScanStats()):
                counts.update(table)
        assert counts == expected


@pytest.mark.parametrize("num_processes", [1, 3])
def test_counts_of_processes_match_python(tmp_path: Path, num_processes: int) -> None:
    files, expected = write_corpus(tmp_path)
    extra_words = [f"{number:05d}-{'x' * 30}" for number in range(6000)]
    files.append(save(tmp_path / "distinct.txt", "\n".join(extra_words)))
    expected.update(extra_words)
    expected_top = sorted(expected.items(), key=lambda entry: (-entry[1], entry[0]))[:25]
    for memory_bytes in (CountSpec.memory_bytes, 1 << 18):
        output = tmp_path / "table.tsv"
        spec = CountSpec(tuple(files), top=25, memory_bytes=memory_bytes)
        result = count_locally(spec, num_processes, output)
        assert (result.total, result.distinct) == (expected.total(), len(expected))
        assert result.top == expected_top
        assert (result.spills > 0) == (memory_bytes == 1 << 18)
        assert (result.spilled_bytes > 0) == (result.spills > 0)
        assert (result.shuffled_bytes > 0) == (num_processes > 1)
        assert list(result.seconds) == ["map", "shuffle", "reduce"]
        lines = [line.split("\t") for line in output.read_bytes().decode().split("\n")[:-1]]
        assert [token for token, _ in lines] == sorted(expected)
        assert {token: int(count) for token, count in lines} == expected
        assert count_locally(spec, num_processes, None).top == expected_top


def test_failed_process_terminates_the_others(tmp_path: Path) -> None:
    long_file = save(tmp_path / "a.txt", " ".join(map(str, range(3_000_000))))
    broken_file = save(tmp_path / "b.txt", b"word \xff " * (long_file[1] // 7))
    start_time = time.perf_counter()
    with pytest.raises(ConfigError, match="not UTF-8"):
        count_locally(CountSpec((long_file, broken_file), memory_bytes=1 << 20), 2, None)
    assert time.perf_counter() - start_time < 30
    assert not multiprocessing.active_children()


def test_table_with_control_characters_is_valid_utf8(tmp_path: Path) -> None:
    output = tmp_path / "table.tsv"
    write_table(output, iter([(encode("\x00a"), 2), (encode("x\ud800"), 1)]))
    assert output.read_bytes().decode("utf-8") == "\x00a\t2\nx\\ud800\t1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["table.tsv"]
