"""Configs in the style of each tool, and what Paceline makes of them. Run as a script, it writes
the expectations anew."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.load import diff_configs, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(path for path in CORPUS.glob("*/*.yaml") if not path.name.endswith(".expected.yaml"))


def outcome(path: Path) -> dict[str, Any]:
    """The keys that differ from the defaults and the keys that are warned of, or the error."""
    with contextlib.chdir(path.parent):
        try:
            loaded = load_config(path.name)
        except ConfigError as error:
            lines = error.paragraph().splitlines()  # without what is allowed and how to fix it
            return {
                "refused": "\n".join(
                    re.sub(r" (Allowed|To fix): .*", "", line) for line in lines if line
                )
            }
    defaults = Config(model=loaded.config.model, dataset=loaded.config.dataset)
    config: dict[str, Any] = {"model": loaded.config.model}
    for key in ("dataset", "val_dataset"):
        sources = loaded.config.sources(validation=key == "val_dataset")
        if sources:
            config[key] = [
                source.model_dump(mode="json", exclude_defaults=True) for source in sources
            ]
    changed = diff_configs(defaults, loaded.config)
    config.update(
        {
            key: value
            for key, _, value in changed
            if key.split(".")[0] not in ("dataset", "val_dataset")
        }
    )
    warnings = [text for level, text in loaded.notices if level == "warning"]
    return {
        "config": config,
        "warnings": sorted(
            {match[1] for text in warnings if (match := re.match(r"`([\w.]+)", text))}
        ),
    }


def expectation(path: Path) -> Path:
    return path.with_suffix(".expected.yaml")


def test_the_corpus_covers_every_tool() -> None:
    assert len(FILES) >= 60
    assert {path.parent.name for path in FILES} >= {
        "llama_factory",
        "ms_swift",
        "axolotl",
        "trl",
        "alignment_handbook",
    }
    assert {expectation(path) for path in FILES} == set(CORPUS.glob("*/*.expected.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_a_config_becomes(path: Path) -> None:
    expected = yaml.safe_load(expectation(path).read_text())
    assert outcome(path) == expected


if __name__ == "__main__":
    for file in FILES:
        text = yaml.safe_dump(outcome(file), sort_keys=False, allow_unicode=True, width=120)
        expectation(file).write_text(text)
        print(f"{file.parent.name}/{file.stem}")
