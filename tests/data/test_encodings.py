"""Text that is not UTF-8: the message names an encoding that it may have, with a sample."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.data.sources.encodings import guess_encodings, is_mostly_utf8
from paceline.data.sources.readers import read_file
from paceline.data.streaming.tables import open_table

TEXTS = {
    "gb18030": ["今天天气怎么样？", "法国的首都是巴黎。", "你好", "什么是机器学习？"],
    "big5": ["今天天氣怎麼樣？", "法國的首都是巴黎。"],
    "cp932": ["今日の天気はどうですか？", "日本語"],
    "euc-jp": ["フランスの首都はパリです。", "質問に答えてください"],
    "cp949": ["오늘 날씨가 어떻습니까?", "안녕하세요"],
    "cp1252": ["Was ist die größte Stadt?", "n’est-ce pas très bon, le café ?", "déjà vu"],
    "cp1250": ["Zażółć gęślą jaźń", "Příliš žluťoučký kůň"],
    "cp1251": ["Какая сегодня погода?", "Столица Франции — Париж."],
    "koi8-r": ["Какая сегодня погода?", "Столица Франции"],
    "cp866": ["Какая сегодня погода?"],
    "cp1253": ["Ποια είναι η πρωτεύουσα της Ελλάδας;"],
    "cp1254": ["Türkiye'nin başkenti neresi?"],
    "cp1255": ["מה מזג האוויר היום"],
    "cp1256": ["ما هو الطقس اليوم"],
}
CASES = [(encoding, text) for encoding, texts in TEXTS.items() for text in texts]


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_file(path))
    return str(caught.value)


@pytest.mark.parametrize(("encoding", "text"), CASES)
def test_likeliest_encoding_reads_the_text(encoding: str, text: str) -> None:
    raw = f'{{"prompt": "{text}"}}\n'.encode(encoding)
    best = guess_encodings(raw)[0]
    assert best.is_likely
    assert raw.decode(best.name) == f'{{"prompt": "{text}"}}\n'


@pytest.mark.parametrize(("encoding", "text"), CASES)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "jsonl.gz"])
def test_message_shows_guess_and_sample(
    tmp_path: Path, encoding: str, text: str, kind: str
) -> None:
    content = f'{{"prompt": "ascii"}}\n{{"prompt": "{text}"}}\n'
    if kind == "csv":
        content = f"prompt,completion\na,b\n{text},c\n"
    raw, path = content.encode(encoding), tmp_path / f"a.{kind}"
    path.write_bytes(gzip.compress(raw) if kind == "jsonl.gz" else raw)
    message = error_of(path)
    line = 3 if kind == "csv" else 2
    assert f"line {line} of `{path}` is not UTF-8 text" in message
    assert text[:5] in message or text[-5:] in message
    assert "a guess" in message
    assert "iconv -f" in message
    assert ("decompress" in message) == (kind == "jsonl.gz")


def test_damaged_utf8_is_not_taken_for_another_encoding(tmp_path: Path) -> None:
    raw = "Grüße aus München, schöne Straße\n".encode() * 3 + b"\xff\n"
    assert is_mostly_utf8(raw)
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "' + raw.replace(b"\n", b" ") + b'"}\n')
    message = error_of(tmp_path / "a.jsonl")
    assert "damaged" in message
    assert "iconv" not in message


def test_bytes_that_are_no_text_have_no_guess(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\x81\xff\xd7\xb7\xf7\xa4"}\n')
    message = error_of(tmp_path / "a.jsonl")
    assert "a guess" not in message
    assert "encoding in which it was written" in message


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_streams_name_the_encoding_before_they_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes("prompt,completion\n今天天气怎么样？,很好\n".encode("gb18030"))
    with raises_error(ConfigError, code="not-utf8"):
        open_table(path)


def test_text_in_a_shard_names_the_encoding(tmp_path: Path) -> None:
    for name in ("1.txt", "1.json"):
        content = '{"text": "今天天气怎么样？"}'.encode("gb18030")
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        message = error_of(tmp_path / "a.tar")
        assert f"`{name}` in `{tmp_path / 'a.tar'}` is not UTF-8 text" in message
        assert "GB18030" in message
