"""Training on recorded completions agrees with TRL's trainers: advantages, and in each of the first
steps the loss, the divergence, the clipped ratios, the entropy and the gradient norm."""

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import BATCH, paceline_steps, record_rollouts, trl_steps
from trl_runs import STEPS, make_model

TOLERANCE = 1e-4
#: A mean over tokens whose terms are rounded in float32.
ROUNDING = 1e-6
#: The divergence of RLOO is a mean of differences of log-probabilities of about -9.
KL_ROUNDING = 9e-6
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"num_iterations": 2, "beta": 0.04}),
    ("grpo", {"num_iterations": 2, "beta": 0.04, "loss_type": "grpo", "epsilon_high": 0.28}),
    ("grpo", {"num_iterations": 2, "loss_type": "dr_grpo", "scale_rewards": "batch"}),
    (
        "grpo",
        {
            "num_iterations": 2,
            "importance_sampling_level": "sequence",
            "scale_rewards": "none",
            "epsilon": 0.001,
        },
    ),
    ("grpo", {"temperature": 0.7, "mask_truncated_completions": True, "beta": 0.04}),
    ("rloo", {}),
    ("rloo", {"num_iterations": 2, "beta": 0.04, "normalize_advantages": True}),
    ("rloo", {"reward_clip_range": (0.4, 1.2), "mask_truncated_completions": True}),
]
#: Names of the figures of a step: Paceline's, and TRL's.
FIGURES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "clip_ratio": "clip_ratio/region_mean",
    "reward": "reward",
}


#: Cases in which some tokens carry no loss.
MASKED: list[dict[str, Any]] = [
    {"num_iterations": 2, "beta": 0.04},
    {"num_iterations": 2, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dr_grpo", "mask_truncated_completions": True},
]


@pytest.mark.soak
@pytest.mark.parametrize("settings", MASKED, ids=lambda value: str(value)[:60])
def test_tokens_without_loss_agree_with_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    compare("grpo", settings, tmp_path, with_masks=True)


@pytest.mark.soak
@pytest.mark.parametrize(("task", "settings"), CASES, ids=lambda value: str(value)[:60])
def test_first_steps_agree_with_trl(task: str, settings: dict[str, Any], tmp_path: Path) -> None:
    compare(task, settings, tmp_path)


def compare(task: str, settings: dict[str, Any], tmp_path: Path, with_masks: bool = False) -> None:
    """Train on the same completions with both tools, and compare the figures of each step."""
    model = make_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    iterations = settings.get("num_iterations", 1)
    replay = tmp_path / "replay"
    records = record_rollouts(replay, config["eos_token_id"], iterations, True, with_masks)
    expected, their_advantages = trl_steps(task, model, records, tmp_path / "trl", **settings)
    keys = [f"grpo.{name}={json.dumps(value)}" for name, value in settings.items()]
    keys += ["parallel.num_gpus=2", f"per_device_train_batch_size={BATCH // 2}"]
    actual, our_advantages = paceline_steps(task, model, replay, tmp_path / "run", *keys)
    assert our_advantages == pytest.approx(their_advantages, rel=TOLERANCE, abs=ROUNDING)
    assert len(actual) == len(expected) == STEPS
    figures = dict(FIGURES)
    if "kl" in expected[0]:
        figures["kl"] = "kl"
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name, their_name in figures.items():
            if their_name not in theirs:  # TRL logs rewards only in the first step of a rollout
                continue
            rounding = KL_ROUNDING if (task, name) == ("rloo", "kl") else ROUNDING
            expected_value = pytest.approx(theirs[their_name], rel=TOLERANCE, abs=rounding)
            assert ours[name] == expected_value, f"step {number + 1}: {name}"
