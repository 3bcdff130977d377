"""`metric_for_best_model` names a metric of the evaluations, or the run does not start."""

from pathlib import Path

import pytest
from commands import events, report, train
from raised import raises_error
from scripted_task import prepare

from paceline.core.errors import ConfigError

ARGS = ("split_dataset_ratio=0.1", "max_steps=4", "eval_steps=2", "parallel.num_gpus=1")


@pytest.mark.parametrize(
    ("metrics", "metric", "allowed"),
    [
        ("perplexity", "rouge1", "loss, perplexity"),
        ("rouge", "rouge", "loss, rouge1, rouge2, rougeL"),
    ],
)
def test_unknown_metric_is_refused(metrics: str, metric: str, allowed: str, tmp_path: Path) -> None:
    config = {
        "model": "builtin:qwen2-micro",
        "dataset": "builtin:python-docs#24",
        "output_dir": str(tmp_path / "run"),
        "split_dataset_ratio": 0.1,
        "evaluation.metrics": metrics,
        "train_args.max_steps": 2,
        "train_args.metric_for_best_model": metric,
    }
    with raises_error(ConfigError, code="unknown-best-metric", naming=metric) as error:
        prepare(config)
    assert error.value.allowed == allowed
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize("metric", ["rouge1", "eval_ter", "token_accuracy"])
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_best_model_by_a_metric_of_text(metric: str, mode: str, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    train(
        tmp_path,
        *ARGS[:-1],
        "parallel.num_gpus=2",
        f"parallel.mode={mode}",
        "evaluation.metrics=rouge,ter,token_accuracy",
        "evaluation.metric_rows=6",
        "evaluation.max_new_tokens=8",
        f"metric_for_best_model={metric}",
        "load_best_model_at_end=true",
        "learning_rate=0.03",
    )
    name = metric.removeprefix("eval_")
    values = {event["step"]: event["metrics"][name] for event in events(tmp_path, "eval")}
    best = report(tmp_path)["best"]
    choose = min if name == "ter" else max
    assert best["metric"] == name
    assert best["value"] == values[best["step"]] == choose(values.values())
    assert best["is_final"]
