"""Test the values and ranges of a sweep, and the combinations that follow from them."""

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.sweep.devices import divide_accelerators, divide_cores
from paceline.sweep.metric import Metric, choose_metric
from paceline.sweep.space import (
    SampledRange,
    Values,
    combinations,
    extremes,
    folder_name,
    parse_space,
    values_of,
)


def axes(*overrides: str) -> list[Values | SampledRange]:
    return list(parse_space(overrides).axes)


def test_commas_separate_values_outside_brackets_and_quotes() -> None:
    space = parse_space(
        [
            "lora.rank=8,16,64",
            "lora.target_modules=[q_proj,v_proj],all-linear",
            "evaluation.metrics=[rouge,bleu]",
            "seed='1,2', 3",
            "max_steps=10",
        ]
    )
    assert space.fixed == ("evaluation.metrics=[rouge,bleu]", "max_steps=10")
    assert space.axes == (
        Values("lora.rank", ("8", "16", "64")),
        Values("lora.target_modules", ("[q_proj,v_proj]", "all-linear")),
        Values("seed", ("'1,2'", "3")),
    )
    assert values_of(["lora.target_modules=[q_proj,v_proj]", "learning_rate=1e-4"]) == {
        "lora.target_modules": ["q_proj", "v_proj"],
        "learning_rate": 1e-4,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-5..1e-3:log", SampledRange("x", 1e-5, 1e-3, is_log=True)),
        ("0..0.2", SampledRange("x", 0.0, 0.2)),
        ("4..64", SampledRange("x", 4, 64, is_integer=True)),
        ("4..64:4", SampledRange("x", 4, 64, step=4, is_integer=True)),
        ("4..64:log", SampledRange("x", 4, 64, is_log=True, is_integer=True)),
        ("0..1:0.25", SampledRange("x", 0, 1, step=0.25)),
        ("-1.5..-.5", SampledRange("x", -1.5, -0.5)),
    ],
)
def test_ranges(text: str, expected: SampledRange) -> None:
    assert axes(f"x={text}") == [expected]


def test_range_contains_its_steps_only() -> None:
    axis = SampledRange("x", 4, 64, step=4, is_integer=True)
    assert [value for value in (4, 6, 8, 64, 68) if axis.contains(value)] == [4, 8, 64]
    assert SampledRange("x", 0.0, 1.0).contains(0.3)
    assert not SampledRange("x", 0.0, 1.0).contains("a")


def test_paths_with_dots_are_values() -> None:
    assert parse_space(["dataset=../a..b.jsonl", "x=1"]).axes == ()


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["x=8,"], "empty-sweep-value"),
        (["x=8,8"], "repeated-value"),
        (["x=1e-4,0.0001"], "repeated-value"),
        (["x=1,2", "x=3,4"], "repeated-sweep-key"),
        (["x=1,2", "x=3"], "repeated-sweep-key"),
        (["output_dir=a,b"], "fixed-in-sweep"),
        (["x=1..2:fast"], "invalid-range"),
        (["x=2..1"], "reversed-range"),
        (["x=0..1:log"], "non-positive-range"),
        (["x=[a,b"], "invalid-yaml"),
    ],
)
def test_invalid_overrides_are_refused(overrides: list[str], code: str) -> None:
    with raises_error(ConfigError, code=code):
        parse_space(overrides)


def test_combinations_vary_the_last_key_fastest() -> None:
    grid = [Values("a.rank", ("8", "16")), Values("lr", ("1", "2"))]
    assert combinations(grid) == [
        ("a.rank=8", "lr=1"),
        ("a.rank=8", "lr=2"),
        ("a.rank=16", "lr=1"),
        ("a.rank=16", "lr=2"),
    ]


def test_extremes_have_every_value_and_both_limits() -> None:
    space = [
        Values("kind", ("a", "b", "c")),
        SampledRange("lr", 1e-5, 1e-3, is_log=True),
        SampledRange("rank", 4, 64, is_integer=True),
    ]
    assert extremes(space) == [
        ("kind=a", "lr=1e-05", "rank=4"),
        ("kind=b", "lr=0.001", "rank=64"),
        ("kind=c", "lr=0.001", "rank=64"),
    ]


def test_folder_names_are_readable_safe_and_distinct() -> None:
    assert folder_name(["lora.rank=8", "learning_rate=1e-4"]) == "rank-8_learning_rate-1e-4"
    unsafe = [folder_name([f"dataset={value}"]) for value in ("../a b", "../a,b", "x" * 300)]
    assert len(set(unsafe)) == 3
    for name in unsafe:
        assert "/" not in name
        assert len(name) <= 80


def test_devices_are_divided_without_overlap() -> None:
    shares = divide_accelerators("cuda", 4, 2, 2, {})
    assert [share.variables for share in shares] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    limited = divide_accelerators("cuda", 2, 1, 2, {"CUDA_VISIBLE_DEVICES": "5, GPU-7"})
    assert [share.variables["CUDA_VISIBLE_DEVICES"] for share in limited] == ["5", "GPU-7"]
    assert [share.cores for share in divide_cores([0, 2, 4, 5, 6], 2)] == [(0, 2, 4), (5, 6)]
    with raises_error(ConfigError, code="not-enough-cores"):
        divide_cores([0], 2)


def test_direction_follows_from_the_name_of_the_metric() -> None:
    assert choose_metric(None, None, True) == Metric("eval_loss", False)
    assert choose_metric(None, None, False) == Metric("train_loss", False)
    assert choose_metric("eval_rougeL", None, True) == Metric("eval_rougeL", True)
    assert choose_metric("perplexity", True, True) == Metric("perplexity", True)


def test_metric_of_a_run_is_that_of_its_last_or_best_evaluation() -> None:
    events = [
        {"type": "eval", "step": 2, "loss": 1.0, "metrics": {"f1": 0.5}},
        {"type": "eval", "step": 4, "loss": 2.0, "metrics": {"f1": 0.25}},
    ]
    loss, f1 = Metric("eval_loss", False), Metric("eval_f1", True)
    assert loss.of_run({}, events) == 2.0
    assert f1.of_run({}, events) == 0.25
    assert loss.of_run({"best": {"step": 2, "is_final": True}}, events) == 1.0
    assert loss.of_run({"best": {"step": 2, "is_final": False}}, events) == 2.0
    assert Metric("accuracy", True).of_run({}, events) is None
    assert Metric("train_loss", False).of_run({"final_train_loss": 3.0}, events) == 3.0
    assert loss.of_run({}, [{"type": "eval", "step": 4, "loss": "nan"}]) is None
    values = sorted([None, 2.0, 1.0], key=f1.sort_key)
    assert values == [2.0, 1.0, None]
