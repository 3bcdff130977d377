"""`paceline convert` writes native configs."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from config.test_corpus import FILES

from paceline.cli import main
from paceline.config.load import diff_configs, load_config
from paceline.core.errors import ConfigError

FOREIGN = (
    "model: m\ndataset: d\nlora_r: 16\nlora_alpha: 32\nmicro_batch_size: 3\nsequence_len: 64\n"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_converted_config_is_equal_and_native(path: Path, tmp_path: Path) -> None:
    """Also which keys are set, because `mode: auto` chooses values for the other ones."""
    output = tmp_path / "native.yaml"
    with contextlib.chdir(path.parent):
        try:
            loaded = load_config(Path(path.name))
        except ConfigError:
            assert main(["convert", path.name, "--output", str(output)]) == 2
            assert not output.exists()
            return
        assert main(["convert", path.name, "--output", str(output)]) == 0
        converted = load_config(output)
    assert diff_configs(loaded.config, converted.config) == []
    for section in ("parallel", "train_args", "lora"):
        set_keys = [getattr(each.config, section).model_fields_set for each in (loaded, converted)]
        assert set_keys[0] == set_keys[1]
    foreign = "keys that the config does not set have Paceline's defaults"
    assert not any(foreign in text for _, text in converted.notices)


def test_prints_yaml_json_and_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(FOREIGN)
    assert main(["convert", str(file)]) == 0
    output, errors = capsys.readouterr()
    config = yaml.safe_load(output)
    assert config["lora"]["rank"] == 16
    assert config["train_args"]["per_device_train_batch_size"] == 3
    assert "`lora_r: 16`" in errors
    assert main(["convert", str(file), "lora.rank=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["lora"]["rank"] == 4


def test_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(FOREIGN)
    assert main(["convert", str(file), "--output", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == FOREIGN
    assert main(["convert"]) == 2
    assert "a config file is required" in capsys.readouterr().err
