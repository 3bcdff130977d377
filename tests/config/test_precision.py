"""Test the spellings of the precision setting, and configs with several of them."""

from pathlib import Path

import pytest

from paceline.config.load import Loaded, load_config, load_text, to_yaml
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"


def load(tmp_path: Path, text: str, *overrides: str) -> Loaded:
    path = tmp_path / "config.yaml"
    path.write_text(BASE + text)
    return load_config(path, list(overrides))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "auto"),
        ("precision: 32", "32"),
        ("precision: '32'", "32"),
        ("train_args: {precision: 16}", "fp16-mixed"),
        ("precision: bf16", "bf16-mixed"),
        ("precision: 16-mixed", "fp16-mixed"),
        ("precision: 32-true", "32"),
        ("precision: bfloat16", "bf16-mixed"),
        ("bf16: true", "bf16-mixed"),
        ("bf16: yes", "bf16-mixed"),
        ("bf16: 1", "bf16-mixed"),
        ("bf16: auto", "auto"),
        ("bf16: false", "32"),
        ("fp16: true", "fp16-mixed"),
        ("fp16: auto", "auto"),
        ("fp16: false", "auto"),
        ("fp16: 0", "auto"),
        ("bf16: false\nfp16: true", "fp16-mixed"),
        ("bf16: false\nfp16: false", "32"),
        ("bf16: true\nfp16: false", "bf16-mixed"),
        ("bf16: auto\nfp16: true", "fp16-mixed"),
        ("bf16: auto\nfp16:", "auto"),
        ("bfloat16: true", "bf16-true"),
        ("pure_bf16: true", "bf16-true"),
        ("pure_bf16: true\nbf16: true", "bf16-true"),
        ("bf16: full", "bf16-true"),
        ("bf16: full\nadapter: lora", "bf16-mixed"),
        ("precision: bf16-true", "bf16-true"),
        ("torch_dtype: auto", "auto"),
        ("dtype: auto\nbf16: true", "bf16-mixed"),
        ("torch_dtype: torch.bfloat16", "bf16-mixed"),
        ("torch_dtype: bfloat16\nbf16: false", "bf16-mixed"),
        ("dtype: float32", "32"),
        ("dtype: float32\nbf16: auto", "auto"),
        ("mixed_precision: bf16", "bf16-mixed"),
        ("mixed_precision: fp16", "fp16-mixed"),
        ("mixed_precision: no", "32"),
        ("mixed_precision: 'no'\nbf16: true", "bf16-mixed"),
    ],
)
def test_accepts_spellings_of_precision(tmp_path: Path, text: str, expected: str) -> None:
    assert load(tmp_path, text).config.train_args.precision == expected


def test_bfloat16_weights_with_lora_are_not_overridden_by_themselves(tmp_path: Path) -> None:
    notices = load(tmp_path, "bf16: full\nadapter: lora").notices
    (text,) = [text for _, text in notices if text.startswith("`bf16: full`")]
    assert text.endswith("is read as `train_args.precision: bf16-mixed`")


def test_full_fine_tuning_of_ms_swift_in_mixed_precision_is_explained(tmp_path: Path) -> None:
    hint = "ms-swift trains them in the dtype of the model's files"
    for text, is_explained in (
        ("tuner_type: full\nbf16: true", True),
        ("tuner_type: lora\nbf16: true", False),
        ("bf16: true", False),
        ("tuner_type: full\ntorch_dtype: bfloat16\nbf16: true", False),
    ):
        notices = load(tmp_path, text).notices
        assert any(hint in notice for _, notice in notices) == is_explained, text


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("bf16: true", "precision=32", "32"),
        ("bf16: true", "bf16=false", "32"),
        ("bf16: true", "fp16=true", "fp16-mixed"),
        ("bf16: true", "fp16=false", "bf16-mixed"),
        ("fp16: true", "fp16=false", "auto"),
        ("fp16: true", "bf16=false", "fp16-mixed"),
        ("precision: bf16-mixed", "bf16=false", "32"),
        ("precision: fp16-mixed", "bf16=auto", "auto"),
        ("precision: fp16-mixed", "precision=null", "auto"),
        ("bf16: true", "precision=null", "auto"),
        ("bf16: 7", "bf16=true", "bf16-mixed"),
        ("bf16: true\nfp16: true", "precision=32", "32"),
    ],
)
def test_command_line_overrides_the_file(
    tmp_path: Path, text: str, override: str, expected: str
) -> None:
    assert load(tmp_path, text, override).config.train_args.precision == expected


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("bf16: true\nfp16: true", ["line 3", "line 4", "disagree", "choose one"]),
        ("precision: 32\nbf16: true", ["disagree", "train_args.precision"]),
        ("precision: bf16-mixed\nbf16: false", ["disagree"]),
        ("mixed_precision: fp16\nbf16: true", ["disagree"]),
        ("precision: 16-true", ["16-true", "not supported", "bf16-true"]),
        ("precision: 7", ["line 3", "`bf16-mixed`"]),
        ("mixed_precision: fp4", ["fp4", "no, fp16, bf16 or fp8"]),
        ("bf16: 7", ["true, false or auto"]),
        ("torch_dtype: int8", ["int8", "bfloat16"]),
    ],
)
def test_rejects_conflicting_or_unknown_precision(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    for fragment in fragments:
        assert fragment in error.value.paragraph()


def test_reports_each_foreign_spelling_once(
    tmp_path: Path,
) -> None:
    assert load(tmp_path, "bf16: true\nfp16: false").notices == [
        ("info", "`bf16: true` is read as `train_args.precision: bf16-mixed`")
    ]
    assert load(tmp_path, "precision: 32").notices == []
    lines = [text for _, text in load(tmp_path, "torch_dtype: float32\nbf16: true").notices]
    assert any(
        "`torch_dtype: float32`" in line and "is overridden by `bf16: true`" in line
        for line in lines
    )
    changed = [text for _, text in load(tmp_path, "fp16: true", "fp16=false").notices]
    assert changed == ["`fp16: true` is overridden by the command line: `fp16=false`"]


@pytest.mark.parametrize("value", ["auto", "bf16-mixed", "fp16-mixed", "32"])
def test_written_config_reloads(value: str) -> None:
    config = load_text(BASE + f"precision: {value}", "a.yaml").config
    reloaded = load_text(to_yaml(config), "b.yaml")
    assert reloaded.config == config
    assert reloaded.notices == []
    assert config.train_args.mixed_dtype == {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}.get(
        value
    )


def test_accepts_a_number_in_python() -> None:
    assert TrainArgs(precision=32).precision == "32"  # type: ignore[arg-type]


def test_float8_of_accelerate_is_mixed_precision_with_float8_products(tmp_path: Path) -> None:
    args = load(tmp_path, "mixed_precision: fp8").config.train_args
    assert (args.precision, args.fp8) == ("bf16-mixed", "tensorwise")
    args = load(tmp_path, "mixed_precision: fp8\nfp8: rowwise").config.train_args
    assert (args.precision, args.fp8) == ("bf16-mixed", "rowwise")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train_type: full\ntorch_dtype: bfloat16", "bf16-true"),
        ("tuner_type: full\ntorch_dtype: bfloat16\nbf16: true", "bf16-true"),
        ("train_type: full\ntorch_dtype: bfloat16\ndeepspeed: zero2", "bf16-mixed"),
        ("train_type: lora\ntorch_dtype: bfloat16", "bf16-mixed"),
        ("finetuning_type: full\ntorch_dtype: bfloat16", "bf16-mixed"),
        ("train_type: full\nbf16: true", "bf16-mixed"),
    ],
)
def test_full_tuning_of_ms_swift_trains_weights_in_their_type(
    tmp_path: Path, text: str, expected: str
) -> None:
    loaded = load(tmp_path, text)
    assert loaded.config.train_args.precision == expected
    if expected == "bf16-true":
        (notice,) = [line for _, line in loaded.notices if line.startswith("`torch_dtype")]
        assert notice.endswith("is read as `train_args.precision: bf16-true`")
