"""Compare configs in the style of other tools with the expected results. Run as a script to
regenerate the expected results."""

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


def load_result(path: Path) -> dict[str, Any]:
    """Return the keys that differ from the defaults and the keys with a warning, or the error."""
    with contextlib.chdir(path.parent):
        try:
            loaded = load_config(path.name)
        except ConfigError as error:
            lines = error.paragraph().splitlines()  # without the allowed values and the fix
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


def expected_file(path: Path) -> Path:
    return path.with_suffix(".expected.yaml")


def test_corpus_covers_every_tool() -> None:
    assert len(FILES) >= 60
    assert {path.parent.name for path in FILES} >= {
        "llama_factory",
        "ms_swift",
        "axolotl",
        "trl",
        "alignment_handbook",
    }
    assert {expected_file(path) for path in FILES} == set(CORPUS.glob("*/*.expected.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_config_has_the_expected_result(path: Path) -> None:
    expected = yaml.safe_load(expected_file(path).read_text())
    assert load_result(path) == expected


if __name__ == "__main__":
    for file in FILES:
        text = yaml.safe_dump(load_result(file), sort_keys=False, allow_unicode=True, width=120)
        expected_file(file).write_text(text)
        print(f"{file.parent.name}/{file.stem}")
