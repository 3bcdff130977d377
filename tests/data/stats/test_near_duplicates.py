"""Groups of similar samples compared with the Jaccard indices of their sets of tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.stats.dataset import dataset_stats
from paceline.data.stats.near_duplicates import near_duplicates, shingle_hashes
from paceline.data.stats.text import render_page, table
from paceline.data.text.token_dataset import TokenDataset, TokenWriter
from paceline.models.builtin import resolve_model


def write(folder: Path, samples: list[np.ndarray]) -> TokenDataset:
    writer = TokenWriter(folder)
    writer.extend(
        {
            "input_ids": [sample.astype(np.int32).tobytes() for sample in samples],
            "labels_mask": [np.ones(len(sample), dtype=np.bool_).tobytes() for sample in samples],
        },
        [len(sample) for sample in samples],
        [len(sample) - 1 for sample in samples],
    )
    writer.close()
    return TokenDataset(folder)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    sets = [{tuple(each[at : at + 5]) for at in range(len(each) - 4)} for each in (a, b)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_groups_are_those_of_similar_samples(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    samples = [generator.integers(0, 500, 200) for _ in range(40)]
    near, far = samples[3].copy(), samples[4].copy()
    near[[20, 120]] = 777  # 10 of 196 sets of tokens differ
    far[5::8] = 777
    samples += [near, far, samples[5].copy(), near.copy()]
    assert jaccard(samples[3], near) > 0.85
    assert jaccard(samples[4], far) < 0.4
    result = near_duplicates(write(tmp_path, samples))
    assert result["groups"] == 2
    assert result["samples"] == 3
    assert result["share"] == pytest.approx(3 / 44)
    assert [group["samples"] for group in result["largest"]] == [[3, 40], [5, 42]]
    assert [group["size"] for group in result["largest"]] == [3, 2]


def test_samples_shorter_than_a_set_are_compared_as_a_whole() -> None:
    assert shingle_hashes(np.array([1, 2])).tolist() != shingle_hashes(np.array([2, 1])).tolist()
    assert len(shingle_hashes(np.arange(4))) == 1
    assert len(shingle_hashes(np.arange(9))) == 5


def test_languages_and_tokens_per_source(tmp_path: Path) -> None:
    texts = {
        "fr": "Le chat dort sur le canapé pendant que les enfants jouent dans le jardin. ",
        "zh": "今天天气很好，我们去公园散步吧，然后一起去吃晚饭。",
    }
    files = []
    for language, text in texts.items():
        rows = [{"prompt": "?", "completion": f"{text}{n}"} for n in range(4 + len(files))]
        files.append(tmp_path / f"{language}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = Config(model="builtin:qwen2-micro", dataset=[str(file) for file in files])
    stats, prepared = dataset_stats(config, resolve_model, near_duplicates=True, languages=True)
    assert stats["languages"] is not None
    shares = {each["language"]: each["samples"] for each in stats["languages"]}
    assert shares == {"fr": 4, "zh": 5}
    assert [source["dataset"] for source in stats["sources"]] == [str(file) for file in files]
    lengths = TokenDataset(prepared.train_folder).lengths
    assert [source["tokens"] for source in stats["sources"]] == [
        int(lengths[:4].sum()),
        int(lengths[4:].sum()),
    ]
    text, page = table(stats), render_page(stats)
    assert "zh 55.6 %, fr 44.4 %" in text
    assert "Le chat dort" in text
    assert f"{stats['sources'][1]['tokens']:,}" in text
    assert "Le chat dort" in page


def test_missing_package_is_reported_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.config.packages.find_spec", lambda name: None)
    config = Config(model="builtin:qwen2-micro", dataset="/nowhere")
    with raises_error(ConfigError, code="missing-package", naming="--languages"):
        dataset_stats(config, resolve_model, languages=True)
