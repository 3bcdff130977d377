"""A user's DeepSpeed JSON file: each key is honored, or rejected by name with the reason."""

import json

import pytest
import torch

from paceline.config.compat.parallel.deepspeed_json import HONORED_ZERO, IGNORED, REFUSED
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Workload
from paceline.strategies.deepspeed.config import check_json, engine_config
from paceline.strategies.deepspeed.cost import estimate
from paceline.strategies.deepspeed.strategy import DeepSpeedStrategy


def make_config(content, stage=2, **train_args):
    return Config(
        model="m",
        dataset="d",
        parallel={"mode": "deepspeed", "deepspeed_stage": stage, "deepspeed_config": content},
        train_args=train_args,
    )


def test_file_consistent_with_the_config_is_honored(tmp_path):
    content = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0},
        },
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
    path.write_text(json.dumps(content))
    settings = {
        "precision": "bf16-mixed",
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "adam_beta2": 0.95,
    }
    for value in (str(path), content):
        config = make_config(value, stage=3, **settings)
        check_json(config, num_ranks=4)
        engine_settings = engine_config(config, 10_000_000)
        assert engine_settings["bf16"] == {"enabled": True}
        assert (
            engine_settings["gradient_accumulation_steps"],
            engine_settings["gradient_clipping"],
        ) == (3, 0.5)
        zero = engine_settings["zero_optimization"]
        assert (
            zero["stage"],
            zero["overlap_comm"],
            zero["reduce_bucket_size"],
            zero["sub_group_size"],
        ) == (
            3,
            True,
            5_000_000,
            10**9,
        )
        assert isinstance(zero["reduce_bucket_size"], int)
        assert zero["stage3_param_persistence_threshold"] == 0  # "auto": Paceline chooses


AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
FP16 = {
    "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
    "hysteresis": 2, "min_loss_scale": 1,
}  # fmt: skip
STAGE_2 = {
    "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
    "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
    "round_robin_gradients": True,
}  # fmt: skip
STAGE_3 = {
    "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ON_HOST = {"device": "cpu", "pin_memory": True}
NOT_ON_HOST = {"device": "none", "pin_memory": True}
MONITORS = {
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
}
LLAMA_FACTORY = {
    **AUTO_BATCH,
    "zero_allow_untested_optimizer": True,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    **MONITORS,
}
MS_SWIFT = {
    **AUTO_BATCH,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
AXOLOTL = {**AUTO_BATCH, "bf16": {"enabled": True}, "wall_clock_breakdown": False}
AXOLOTL_FP16 = {**FP16, "auto_cast": False, "initial_scale_power": 32}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AXOLOTL_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "max_live_parameters": 0, "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
QUANTIZED_OFF = {"zero_quantized_weights": False, "zero_quantized_gradients": False}
#: In the style of the files that LLaMA-Factory, ms-swift and axolotl ship: (settings, stage,
#: `parallel.cpu_offload`).
STOCK = {
    "l z0": ({**LLAMA_FACTORY, "zero_optimization": {"stage": 0, **STAGE_2}}, 0, "none"),
    "l z2": ({**LLAMA_FACTORY, "zero_optimization": {"stage": 2, **STAGE_2}}, 2, "none"),
    "l z2 offload": (
        {
            **LLAMA_FACTORY,
            "zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST, **STAGE_2},
        },
        2,
        "optimizer",
    ),
    "l z3": ({**LLAMA_FACTORY, "zero_optimization": {"stage": 3, **STAGE_3}}, 3, "none"),
    "l z3 offload": (
        {
            **LLAMA_FACTORY,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": ON_HOST,
                "offload_param": ON_HOST,
                **STAGE_3,
            },
        },
        3,
        "all",
    ),
    "l z3 partial offload": (
        {
            **LLAMA_FACTORY,
            "zero_force_ds_cpu_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                **STAGE_3,
            },
        },
        3,
        "optimizer",
    ),
    "s zero0": ({**MS_SWIFT, "zero_optimization": {"stage": 0, **STAGE_2}}, 0, "none"),
    "s zero1": (
        {
            **MS_SWIFT,
            "zero_optimization": {"stage": 1, "offload_optimizer": NOT_ON_HOST, **STAGE_2},
        },
        1,
        "none",
    ),
    "s zero2": (
        {
            **MS_SWIFT,
            "zero_optimization": {"stage": 2, "offload_optimizer": NOT_ON_HOST, **STAGE_2},
        },
        2,
        "none",
    ),
    "s zero2 autotp of 1": (
        {
            **MS_SWIFT,
            "tensor_parallel": {"autotp_size": 1},
            "zero_optimization": {"stage": 2, **STAGE_2},
        },
        2,
        "none",
    ),
    "s zero3": (
        {
            **MS_SWIFT,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": NOT_ON_HOST,
                "offload_param": NOT_ON_HOST,
                **QUANTIZED_OFF,
                **STAGE_3,
            },
        },
        3,
        "none",
    ),
    "a zero1": (
        {
            **AUTO_BATCH,
            "optimizer": ADAMW,
            "fp16": AXOLOTL_FP16,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 1, "overlap_comm": True},
        },
        1,
        "none",
    ),
    "a zero1 torch compile": (
        {
            **AUTO_BATCH,
            "compile": {"disable": False, "backend": "inductor"},
            "fp16": AXOLOTL_FP16,
            "zero_optimization": {"stage": 1, "overlap_comm": True},
        },
        1,
        "none",
    ),
    "a zero2": (
        {
            **AUTO_BATCH,
            "fp16": AXOLOTL_FP16,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none"},
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
        },
        2,
        "none",
    ),
    "a zero3 bf16": ({**AXOLOTL, "zero_optimization": AXOLOTL_3}, 3, "none"),
    "a zero3 bf16, parameters on the host": (
        {
            **AXOLOTL,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {**AXOLOTL_3, "offload_param": ON_HOST},
        },
        3,
        "all",
    ),
    "a zero3 bf16, all on the host": (
        {
            **AXOLOTL,
            "zero_optimization": {
                **AXOLOTL_3,
                "offload_optimizer": ON_HOST,
                "offload_param": ON_HOST,
            },
        },
        3,
        "all",
    ),
    "accelerate": (
        {
            **AUTO_BATCH,
            "fp16": {"enabled": True, "loss_scale": 0},
            "optimizer": {**ADAMW, "params": {"lr": "auto", "torch_adam": True}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                    "total_num_steps": "auto",
                },
            },
            "steps_per_print": float("inf"),
            "zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST},
        },
        2,
        "optimizer",
    ),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_files_set_stage_and_offload(name, tmp_path):
    content, stage, offload = STOCK[name]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    for key in ("deepspeed", "parallel.deepspeed_config"):
        config = load_config(None, {"model": "m", "dataset": "d", key: str(path)}).config
        parallel = config.parallel
        if stage == 0:
            assert (parallel.mode, parallel.deepspeed_config) == ("ddp", None)
            continue
        assert (parallel.mode, parallel.deepspeed_stage, parallel.cpu_offload) == (
            "deepspeed",
            stage,
            offload,
        )
        check_json(config, num_ranks=2)
        section = engine_config(config, 10_000_000)["zero_optimization"]
        assert section["stage"] == stage
        assert section.get("offload_optimizer", {}).get("device", "none") == (
            "none" if offload == "none" else "cpu"
        )
        assert section["reduce_bucket_size"] <= 10_000_000
        for key_in_file, value in content["zero_optimization"].items():
            honored_key = {"max_live_parameters": "stage3_max_live_parameters"}.get(
                key_in_file, key_in_file
            )
            if (
                honored_key in HONORED_ZERO
                and value != "auto"
                and honored_key != "reduce_bucket_size"
            ):
                assert section[honored_key] == value


def test_stage_of_the_file_applies_without_load_config(tmp_path):
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage": 3}}},
    )
    assert engine_config(config, 100)["zero_optimization"]["stage"] == 3
    assert DeepSpeedStrategy(config, Communicator(RankEnv(), torch.device("cpu"))).stage == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train_batch_size": 7}, "train_args.per_device_train_batch_size"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
        ),
        ({"optimizer": {"params": {"max_coeff": 0.3}}}, "optimizer.params.max_coeff"),
        ({"scheduler": {"type": "OneCycle"}}, "train_args.lr_scheduler_type"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0.5}}},
            "scheduler.params.total_num_steps: 0.5 is not a whole number",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio",
        ),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights",
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        ({"zero_optimization": {"reduce_bucket_size": "large"}}, "is not a whole number"),
        ({"zero_optimization": {"overlap_comm": 1}}, "is not true or false"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean overlap_comm"),
        ({"zero_optimization": [2]}, "is not an object"),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tensor"),
        ({"sequence_parallel": {"enabled": True, "size": 4}}, "sequence parallelism"),
        ({"fp8": {"enabled": True}}, "8-bit"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "`zero2` and `zero3` do so in float32"),
        ({"data_types": {"grad_accum_dtyp": "bf16"}}, "data_types.grad_accum_dtyp: not a key"),
        ({"communication_data_type": "fp8"}, "communication_data_type: 'fp8' is not one of"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"nonsense": "auto"}, "nonsense"),
    ],
)
def test_rejects_unsupported_setting_by_name(content, expected):
    with pytest.raises(ConfigError) as caught:
        check_json(make_config(content), num_ranks=2)
    assert expected in str(caught.value)


def test_reports_all_errors_at_once_with_reasons():
    content = {key: {"enabled": True} for key in REFUSED if "." not in key}
    with pytest.raises(ConfigError) as caught:
        check_json(make_config(content), num_ranks=2)
    for key in content:
        assert f"{key}: {REFUSED[key].reason}" in str(caught.value)
    check_json(make_config(dict.fromkeys([*REFUSED, *IGNORED], "auto")), num_ranks=2)
    check_json(make_config({key: {"enabled": False, "size": 3} for key in content}), num_ranks=2)
    check_json(
        make_config({key: {"enabled": True} for key, rule in IGNORED.items() if rule.reason}),
        num_ranks=2,
    )
    check_json(make_config({"zero_optimization": dict.fromkeys(HONORED_ZERO, "auto")}), num_ranks=2)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_rejects_unreadable_file(tmp_path, text):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        check_json(make_config(str(path)), num_ranks=2)


def test_stage_costs_match_the_zero_paper():
    """The ZeRO paper's figures (7.5 B parameters, 64 ranks) for the optimizer state, 12/N bytes per
    parameter, and for the weights."""
    shape = ModelShape(
        tuple(TensorShape(f"w{number}", (7_500_000, 100), 4, True) for number in range(10)),
        low_bytes=2,
    )
    costs = {
        stage: estimate(
            shape,
            ParallelDims(data=64),
            Workload(1),
            make_config(None, stage=stage, precision="bf16-mixed"),
        )
        for stage in (1, 2, 3)
    }
    for cost in costs.values():
        assert cost.optimizer == pytest.approx(12 * 7.5e9 / 64, rel=1e-3)
    assert [costs[stage].parameters for stage in (1, 2, 3)] == pytest.approx(
        [15e9, 15e9, 15e9 / 64], rel=1e-3
    )
    assert costs[3].state == pytest.approx(1.9e9, rel=0.02)
    # Stage 1 is 2 + 2 + 12/N as in the paper. Stage 2 keeps the full gradients of matrices that its
    # partition overlaps: at most two of 0.75 B elements.
    assert costs[1].state == pytest.approx(31.4e9, rel=0.01)
    assert costs[2].state == pytest.approx(15e9 + 2 * 1.5e9 + 1.4e9, rel=0.01)
