"""Write the config that `paceline bench tuning` recommends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import yaml

from paceline.bench.tuning import TuningChangeReport, TuningReport
from paceline.bench.tuning_text import ratio_text
from paceline.config.load import Loaded, diff_configs, load_config, load_text
from paceline.config.yaml_edit import edit_yaml
from paceline.config.yaml_read import Dumper, YamlValue
from paceline.core.errors import ConfigError

_HEADER = "# Written by `paceline bench tuning`."


def default_path(loaded: Loaded) -> Path:
    """Return ``NAME.tuned.yaml`` next to the config, or in the current folder without one."""
    if loaded.path is None:
        return Path("tuned.yaml")
    return loaded.path.with_suffix(".tuned.yaml")


def check_path(path: Path) -> None:
    """Raise ConfigError if the file cannot be written there, or if one exists that this command has
    not written."""
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(
            "the tuned config `{path}` cannot be written",
            code="tuned-config-not-writable",
            fix="name another file with `--output`",
            path=path,
        )
    try:
        is_own = path.read_text(encoding="utf-8").startswith(_HEADER)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        is_own = False
    if not is_own:
        raise ConfigError(
            "{path} exists, and `paceline bench tuning` has not written it",
            code="tuned-config-exists",
            fix="name another file with `--output`",
            path=path,
        )


def tuned_text(loaded: Loaded, report: TuningReport) -> str | None:
    """Return the text of the config with the recommended changes, with a comment for each; all
    other keys and comments stay as they are. None if no change is recommended."""
    recommendation = report["recommendation"]
    if recommendation is None:
        return None
    values = {**_overridden(loaded), **recommendation["values"]}
    text, _ = edit_yaml(_text_of(loaded), values)
    text = f"{_header(report, recommendation)}\n{text}"
    load_text(text, "the tuned config")
    return text


def _text_of(loaded: Loaded) -> str:
    """Return the user's file, or what was set on the command line if there is none."""
    if loaded.path is not None:
        return loaded.path.read_text(encoding="utf-8").removeprefix("\ufeff")
    keys = loaded.config.model_dump(mode="json", exclude_unset=True)
    return str(yaml.dump(keys, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def _overridden(loaded: Loaded) -> dict[str, YamlValue]:
    """Return the keys that the command line has set differently from the file."""
    if loaded.path is None:
        return {}
    in_file = load_config(loaded.path).config
    return {key: cast("YamlValue", new) for key, _, new in diff_configs(in_file, loaded.config)}


def _header(report: TuningReport, recommendation: TuningChangeReport) -> str:
    devices = f"{report['world_size']} × {report['device']}"
    lines = [
        _HEADER,
        f"# Measured with {devices}, {report['strategy']}, relative to the config without changes:",
        f"# {recommendation['name']}: speed {ratio_text(recommendation, 'speedup')}, peak memory"
        f" {ratio_text(recommendation, 'memory')}.",
    ]
    changed = recommendation["changes_result"]
    if changed is None:
        lines.append("# The trained weights are the same up to the order of float32 sums.")
    else:
        lines.append(f"# This changes the result: {changed}.")
    return "\n".join(lines)
