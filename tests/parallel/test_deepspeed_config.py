"""A DeepSpeed JSON of the user's: each key is honoured, or refused by name with the reason."""

import json

import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.shape import ModelShape, TensorShape
from paceline.parallel.cost import Workload
from paceline.parallel.deepspeed_config import HONOURED_ZERO, REFUSED, check_json, engine_config
from paceline.parallel.deepspeed_cost import deepspeed_cost
from paceline.world.mesh import Axes


def configured(given, stage=2, **train_args):
    return Config(
        model="m",
        dataset="d",
        parallel={"mode": "deepspeed", "deepspeed_stage": stage, "deepspeed_config": given},
        train_args=train_args,
    )


def test_a_file_that_agrees_is_honoured(tmp_path):
    given = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0}},
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e6,
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "none"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    settings = {
        "precision": "bf16-mixed",
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "adam_beta2": 0.95,
    }
    for one in (str(path), given):
        config = configured(one, stage=3, **settings)
        check_json(config, num_ranks=4)
        made = engine_config(config, 10_000_000)
        assert made["bf16"] == {"enabled": True}
        assert (made["gradient_accumulation_steps"], made["gradient_clipping"]) == (3, 0.5)
        zero = made["zero_optimization"]
        assert (zero["stage"], zero["overlap_comm"], zero["reduce_bucket_size"], zero["sub_group_size"]) == (
            3,
            True,
            5_000_000,
            10**9,
        )
        assert isinstance(zero["reduce_bucket_size"], int)
        assert zero["stage3_param_persistence_threshold"] == 0  # "auto" leaves it to Paceline


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"train_batch_size": 7}, "train_args.per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 2}, "train_args.gradient_accumulation_steps"),
        ({"gradient_clipping": 0.3}, "train_args.max_grad_norm"),
        ({"bf16": {"enabled": True}}, "train_args.precision"),
        ({"fp16": {"enabled": True}}, "train_args.precision"),
        ({"bf16": {"enabled": False}, "fp16": {"loss_scale": 128}}, "fp16.loss_scale"),
        ({"optimizer": {"type": "Lamb"}}, "train_args.optim"),
        ({"optimizer": {"params": {"lr": 0.5}}}, "train_args.learning_rate"),
        ({"optimizer": {"params": {"adam_w_mode": True}}}, "optimizer.params.adam_w_mode"),
        ({"scheduler": {"type": "WarmupLR"}}, "train_args.lr_scheduler_type"),
        ({"zero_optimization": {"stage": 1}}, "parallel.deepspeed_stage"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "parallel.offload"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
        ({"zero_optimization": {"reduce_bucket_size": "large"}}, "is no number"),
        ({"zero_optimization": {"overlap_comm": 1}}, "is no boolean"),
        ({"zero_optimization": {"overlap_com": True}}, "overlap_comm"),
        ({"zero_optimization": [2]}, "is no object"),
        ({"steps_per_print": 10}, "train_args.logging_steps"),
        ({"activation_checkpointing": {"partition_activations": True}}, "train_args.gradient_checkpointing"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"nonsense": "auto"}, "nonsense"),
    ],
)
def test_each_key_that_is_not_honoured_is_named(given, says):
    with pytest.raises(ConfigError) as caught:
        check_json(configured(given), num_ranks=2)
    assert says in str(caught.value)


def test_all_mistakes_are_named_at_once_and_every_feature_has_a_reason():
    given = {key: {"enabled": True} for key in REFUSED}
    with pytest.raises(ConfigError) as caught:
        check_json(configured(given), num_ranks=2)
    for key, reason in REFUSED.items():
        assert f"{key}: {reason}" in str(caught.value)
    check_json(configured(dict.fromkeys(REFUSED, "auto")), num_ranks=2)
    check_json(configured({"zero_optimization": dict.fromkeys(HONOURED_ZERO, "auto")}), num_ranks=2)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_a_file_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        check_json(configured(str(path)), num_ranks=2)


def test_the_stages_of_a_large_model_cost_what_the_paper_says():
    """ZeRO's own figures (7.5 B parameters, 64 ranks) for the optimizer's share, 12/N bytes a parameter, and the weights'."""
    shape = ModelShape(tuple(TensorShape(f"w{one}", (7_500_000, 100), 4, True) for one in range(10)), low_bytes=2)
    costs = {
        stage: deepspeed_cost(shape, Axes(data=64), Workload(1), configured(None, stage=stage, precision="bf16-mixed"))
        for stage in (1, 2, 3)
    }
    for cost in costs.values():
        assert cost.optimizer == pytest.approx(12 * 7.5e9 / 64, rel=1e-3)
    assert [costs[stage].parameters for stage in (1, 2, 3)] == pytest.approx([15e9, 15e9, 15e9 / 64], rel=1e-3)
    assert costs[3].state == pytest.approx(1.9e9, rel=0.02)
    # Stage 1 is 2 + 2 + 12/N as in the paper; stage 2 keeps whole what its partition touches: two matrices of 0.75 B at most.
    assert costs[1].state == pytest.approx(31.4e9, rel=0.01)
    assert costs[2].state == pytest.approx(15e9 + 2 * 1.5e9 + 1.4e9, rel=0.01)
