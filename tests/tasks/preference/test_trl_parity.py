"""Preference training agrees with TRL's trainers: the same loss, gradient norm and metrics in each
of the first steps, with the same data, order and hyperparameters."""

from pathlib import Path
from typing import Any

import pytest
from trl_runs import make_adapter, make_model, make_rows, paceline_steps, trl_steps

CASES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dpo", {"loss_type": "hinge", "beta": 0.3}),
    ("dpo", {"loss_type": "ipo"}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}),
    ("dpo", {"loss_type": "robust", "label_smoothing": 0.1}),
    ("dpo", {"f_divergence_type": "js_divergence"}),
    ("kto", {"desirable_weight": 1.3}),
    ("kto", {"loss_type": "apo_zero_unpaired"}),
    ("orpo", {}),
    ("simpo", {"beta": 2.0, "simpo_gamma": 0.7}),
    ("simpo", {"cpo_alpha": 0.5}),
]
TOLERANCE = 1e-4
#: A reward is beta times the difference of log-probabilities of many tokens, in float32; log odds
#: are such a difference.
ROUNDING = 1e-6
#: The loss of pairs does not change if all rewards move by the same amount. The gradient of what
#: moves them, such as the bias of the last norm, is rounding, which Adam scales up. So unless
#: rewards are centered, their mean is compared less strictly, and the others by their distance from
#: it.
MEAN_ROUNDING = 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("task", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else None
)
def test_first_steps_agree(
    task: str, settings: dict[str, Any], kind: str, with_adapter: bool, tmp_path: Path
) -> None:
    model, rows = make_model(tmp_path / "model", kind), make_rows(task)
    adapter = make_adapter(model, tmp_path / "adapter") if with_adapter else None
    arguments = dict(settings)
    if task == "dpo" and isinstance(arguments.get("loss_type"), str):
        arguments["loss_type"] = [arguments["loss_type"]]
    expected = trl_steps(task, model, rows, tmp_path / "trl", adapter, **arguments)
    actual = paceline_steps(task, model, rows, tmp_path / "run", adapter, **settings)
    assert len(actual) == len(expected) == 10
    beta = settings.get("beta", 0.1)
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name, value in ours.items():
            scale = 1.0 if name.startswith("log_odds") else beta
            rounding = ROUNDING * scale * abs(theirs["logps/chosen"])
            expected_value = pytest.approx(theirs[name], rel=TOLERANCE, abs=rounding)
            assert value == expected_value, f"step {number + 1}: {name}"


@pytest.mark.soak
@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("data", "settings"),
    [("pairs", {}), ("margins", {"center_rewards_coefficient": 0.01}), ("texts", {})],
    ids=["plain", "margins", "texts"],
)
def test_reward_models_agree(
    data: str, settings: dict[str, Any], kind: str, with_adapter: bool, tmp_path: Path
) -> None:
    model, rows = make_model(tmp_path / "model", kind, num_labels=1), make_rows(data)
    adapter = make_adapter(model, tmp_path / "adapter", has_head=True) if with_adapter else None
    if data == "texts":  # the end-of-sequence token is appended to texts without a chat template
        (model / "chat_template.jinja").unlink()
        rows = [
            {name: _text(row[name]) for name in ("prompt", "chosen", "rejected")} for row in rows
        ]
    expected = trl_steps("reward", model, rows, tmp_path / "trl", adapter, **settings)
    actual = paceline_steps("reward", model, rows, tmp_path / "run", adapter, **settings)
    assert len(actual) == len(expected) == 10
    assert {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"} <= actual[0].keys()
    roundings = {"loss": 0.0, "grad_norm": 0.0}
    if "center_rewards_coefficient" not in settings:
        roundings["mean_reward"] = MEAN_ROUNDING
        actual, expected = ([_from_mean(step) for step in steps] for steps in (actual, expected))
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name, value in ours.items():
            rounding = roundings.get(name, ROUNDING)
            expected_value = pytest.approx(theirs[name], rel=TOLERANCE, abs=rounding)
            assert value == expected_value, f"step {number + 1}: {name}"


def _from_mean(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the lowest and the highest reward as distances from the mean."""
    mean = metrics["mean_reward"]
    distances = {name: metrics[name] - mean for name in ("min_reward", "max_reward")}
    return {**metrics, **distances}


def _text(turns: list[dict[str, str]]) -> str:
    return "".join(f"{turn['role']}: {turn['content']} " for turn in turns)
