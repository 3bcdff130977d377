"""Test that parallelism settings of other tools and spellings of `parallel.mode` select the
strategy or are rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.config.load import Loaded, load_config, to_yaml
from paceline.core.errors import ConfigError

Load = Callable[..., Loaded]
BASE = "model: m\ndataset: d\n"


def parallel_settings(loaded: Loaded) -> dict[str, Any]:
    return loaded.config.parallel.model_dump(exclude_defaults=True)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a DeepSpeed JSON file of each kind."""
    monkeypatch.chdir(tmp_path)
    host = {"device": "cpu", "pin_memory": True}
    sections: dict[str, dict[str, Any]] = {
        "ds_z0.json": {"stage": 0, "reduce_scatter": True},
        "ds_z2.json": {"stage": 2, "overlap_comm": False},
        "ds_z2_offload.json": {"stage": 2, "offload_optimizer": host},
        "ds_z3.json": {"stage": 3, "sub_group_size": 1e9},
        "ds_z3_offload.json": {"stage": 3, "offload_optimizer": host, "offload_param": host},
        "ds_z3_params.json": {"stage": 3, "offload_param": host},
    }
    for name, section in sections.items():
        settings = {
            "zero_optimization": section,
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
        }
        (tmp_path / name).write_text(json.dumps(settings))
    (tmp_path / "fsdp2.json").write_text(
        json.dumps(
            {
                "_note": "one file for both",
                "fsdp": "full_shard auto_wrap offload",
                "fsdp_config": {
                    "fsdp_version": 2,
                    "reshard_after_forward": True,
                    "activation_checkpointing": True,
                },
            }
        )
    )
    (tmp_path / "settings.json").write_text(json.dumps({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}))
    return tmp_path


def deepspeed(stage: int, file: Any = None, **extra: Any) -> dict[str, Any]:
    settings = {"mode": "deepspeed", "deepspeed_stage": stage, **extra}
    return settings if file is None else settings | {"deepspeed_config": file}


IN_16_BITS = {"zero_optimization": {"stage": 2}, "communication_data_type": "bf16"}
IN_FLOAT32 = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}
INLINE = {"zero_optimization": {"stage": 1}}
TP_HSDP = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: false}
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
HSDP = (
    "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\nnum_machines:"
    " 2\nnum_processes: 16"
)
ND = (
    "dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\nfsdp_version: 2\nfsdp_config:"
    " {offload_params: false}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # -- deepspeed
        ("deepspeed: ds_z3.json", deepspeed(3, "ds_z3.json")),
        ("deepspeed: ds_z2.json", deepspeed(2, "ds_z2.json")),
        (
            "deepspeed: ds_z2_offload.json",
            deepspeed(2, "ds_z2_offload.json", cpu_offload="optimizer"),
        ),
        ("deepspeed: ds_z3_offload.json", deepspeed(3, "ds_z3_offload.json", cpu_offload="all")),
        ("deepspeed: ds_z3_params.json", deepspeed(3, "ds_z3_params.json", cpu_offload="all")),
        ("deepspeed: ds_z0.json", {"mode": "ddp"}),
        ("deepspeed: zero0", {"mode": "ddp"}),
        ("deepspeed: zero1", deepspeed(1)),
        ("deepspeed: zero2", deepspeed(2)),
        ("deepspeed: default-zero3", deepspeed(3)),
        ("deepspeed: zero2_offload", deepspeed(2, cpu_offload="optimizer")),
        ("deepspeed: zero3_offload", deepspeed(3, cpu_offload="all")),
        ("deepspeed: {zero_optimization: {stage: 1}}", deepspeed(1, INLINE)),
        ('deepspeed: \'{"zero_optimization": {"stage": 1}}\'', deepspeed(1, INLINE)),
        (f"deepspeed: {json.dumps(IN_16_BITS)}", deepspeed(2, IN_16_BITS, reduce_dtype="auto")),
        ("parallel: {deepspeed: zero2}", deepspeed(2)),
        ("zero_stage: 3", deepspeed(3)),
        ("train_args: {deepspeed: ds_z3.json}", deepspeed(3, "ds_z3.json")),
        ("deepspeed: null", {}),
        ("deepspeed: ''", {}),
        ("parallel: {mode: deepspeed, deepspeed_config: ds_z3.json}", deepspeed(3, "ds_z3.json")),
        ("parallel: {deepspeed_config: ds_z3.json}", deepspeed(3, "ds_z3.json")),
        ("parallel: {mode: deepspeed, deepspeed_config: ds_z0.json}", {"mode": "ddp"}),
        ("distributed_type: DEEPSPEED", {"mode": "deepspeed"}),
        (
            (
                "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3,"
                " offload_param_device: cpu, offload_optimizer_device: cpu, zero3_init_flag: true,"
                " deepspeed_multinode_launcher: standard}"
            ),
            deepspeed(3, cpu_offload="all"),
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", {"mode": "ddp"}),
        (
            (
                "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds_z2.json,"
                " zero3_init_flag: false}"
            ),
            deepspeed(2, "ds_z2.json"),
        ),
        ("dist_config: {name: deepspeed, config_file: ds_z3.json}", deepspeed(3, "ds_z3.json")),
        # -- FSDP
        ("fsdp: full_shard auto_wrap", {"mode": "zero3"}),
        ("fsdp: full_shard auto_wrap offload", {"mode": "zero3", "cpu_offload": "all"}),
        ("fsdp: [shard_grad_op, auto_wrap]", {"mode": "zero2"}),
        ("fsdp: no_shard", {"mode": "ddp"}),
        ("fsdp: true", {"mode": "zero3"}),
        ("fsdp: ''\nfsdp_config: {min_num_params: 0}", {}),
        ("fsdp: fsdp2", {"mode": "zero3"}),
        ("fsdp: fsdp_zero2_offload", {"mode": "zero2", "cpu_offload": "all"}),
        ("fsdp: fsdp2.json", {"mode": "zero3", "cpu_offload": "all"}),
        ("fsdp: full_shard\nfsdp_config: settings.json", {"mode": "zero2"}),
        ("fsdp_version: 2", {"mode": "zero3"}),
        ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}", {"mode": "zero2"}),
        ("fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}", {"mode": "zero3"}),
        (
            "fsdp_config: {fsdp_sharding_strategy: 2, fsdp_offload_params: true}",
            {"mode": "zero2", "cpu_offload": "all"},
        ),
        ("fsdp_config: {fsdp_sharding_strategy: NO_SHARD}", {"mode": "ddp"}),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", {"mode": "zero2"}),
        ("dist_config: {name: fsdp2, dcp_path: null}", {"mode": "zero3"}),
        (
            "dist_config: {name: fsdp2, reshard_after_forward: false, mp_replicate_size: 2}",
            {"mode": "zero2", "data": 2},
        ),
        (HSDP, {"mode": "zero3", "data": 2, "shard": 8, "nnodes": 2, "num_gpus": 8}),
        ("fsdp: hybrid_shard\nnnodes: 4", {"mode": "zero3", "data": 4, "nnodes": 4}),
        # -- Accelerate
        ("distributed_type: MULTI_GPU\nnum_processes: 8", {"mode": "ddp", "num_gpus": 8}),
        ("distributed_type: MULTI_CPU", {"mode": "ddp", "device": "cpu"}),
        ("distributed_type: no", {"mode": "single"}),
        (
            (
                "distributed_type: 'NO'\nfsdp_config: {fsdp_version: 2}\ndeepspeed_config:"
                " {zero_stage: 2}"
            ),
            {"mode": "single"},
        ),
        ("distributed_type: MULTI_GPU\ndeepspeed: zero2", deepspeed(2)),
        ("num_processes: 16\nnum_machines: 2", {"num_gpus": 8, "nnodes": 2}),
        (TP_HSDP, {"mode": "hybrid", "data": 2, "shard": 2, "tensor": 2, "num_gpus": 8}),
        ("tp_config: {tp_size: 4}", {"tensor": 4}),
        # -- sizes
        ("tensor_parallel_size: 2", {"tensor": 2}),
        ("tensor_parallel_size: 1", {}),
        (
            "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2",
            {"tensor": 2, "pipeline": 2},
        ),
        ("pipeline_parallel_size: 2", {"pipeline": 2}),
        ("dp_shard_size: 4\ndp_replicate_size: 2", {"shard": 4, "data": 2}),
        (ND, {"mode": "hybrid", "shard": 4, "data": 2, "tensor": 2}),
        (
            "fsdp: full_shard\ntensor_parallel_size: 2\nnproc_per_node: 8",
            {"mode": "hybrid", "tensor": 2, "shard": 4, "num_gpus": 8},
        ),
        ("context_parallel_size: 1\nsequence_parallel_size: 1\nexpert_parallel_size: 1", {}),
        *(
            (f"{key}: 2", {"context": 2})
            for key in (
                "context_parallel_size",
                "context_parallel_degree",
                "sequence_parallel_size",
                "sequence_parallel_degree",
                "ulysses_parallel_size",
                "ring_attention_size",
            )
        ),
        ("ulysses_parallel_size: 2\nring_attention_size: 4", {"context": 8}),
        ("ulysses_parallel_size: 2\nring_attention_size: 1", {"context": 2}),
        ("context_parallel_size: 2\nsequence_parallel_degree: 2", {"context": 2}),
        (
            "sequence_parallel_size: 8\nulysses_parallel_size: 2\nring_attention_size: 4",
            {"context": 8},
        ),
        ("cp_size: 2\nsequence_parallel_size: 1", {"context": 2}),
        ("parallelism_config: {cp_size: 2, sp_size: 1}", {"context": 2}),
        ("cp_size: 2\ncp_mode: ulysses", {"context": 2, "context_method": "ulysses"}),
        (
            "context_parallel_size: 4\nring_attn_func: varlen_llama3",
            {"context": 4, "context_method": "gather"},
        ),
        ("parallelism_config: {cp_size: 8}", {"context": 8}),
        ("parallelism_config_cp_size: 2", {"context": 2}),
        ("parallelism_config_sp_size: 2", {"context": 2}),
        ("parallelism_config_ep_size: 2", {"expert": 2}),
        ("parallelism_config: {parallelism_config_sp_size: 2}", {"context": 2}),
        ("dist_config: {name: fsdp2, cp_size: 2}", {"mode": "zero3", "context": 2}),
        (
            (
                "fsdp: full_shard\ncontext_parallel_size: 2\ntensor_parallel_size: 2\n"
                "nproc_per_node: 8"
            ),
            {"mode": "hybrid", "context": 2, "tensor": 2, "shard": 2, "num_gpus": 8},
        ),
        ("ddp: true", {"mode": "ddp"}),
    ],
)
def test_settings_of_other_tools_select_the_strategy(
    load: Load, in_folder: Path, text: str, expected: dict[str, Any]
) -> None:
    loaded = load(BASE + text)
    assert parallel_settings(loaded) == expected
    assert loaded.notices, "a key was read under another name without a notice"
    resolved = in_folder / "resolved.yaml"
    resolved.write_text(to_yaml(loaded.config))
    assert load_config(resolved).config == loaded.config


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("DDP", {"mode": "ddp"}),
        ("FSDP", {"mode": "zero3"}),
        ("fsdp", {"mode": "zero3"}),
        ("fsdp2", {"mode": "zero3"}),
        ("ZeRO-3", {"mode": "zero3"}),
        ("zero_3", {"mode": "zero3"}),
        ("Zero2", {"mode": "zero2"}),
        ("zero-stage-1", {"mode": "zero1"}),
        ("zero3_offload", {"mode": "zero3", "cpu_offload": "all"}),
        ("DeepSpeed", {"mode": "deepspeed"}),
        ("deepspeed_zero2", deepspeed(2)),
        ("deepspeed-stage-3-offload", deepspeed(3, cpu_offload="all")),
        ("rpc", {"mode": "parameter_server"}),
        ("Parameter-Server", {"mode": "parameter_server"}),
        ("tp", {"mode": "tensor"}),
        ("tensor_parallel", {"mode": "tensor"}),
        ("pp", {"mode": "pipeline"}),
        ("hsdp", {"mode": "zero3", "data": 1}),
        ("local-sgd", {"mode": "local_sgd"}),
        ("auto", {}),
        ("my.module:Strategy", {"mode": "my.module:Strategy"}),
    ],
)
def test_accepts_spellings_of_the_mode(load: Load, spelling: str, expected: dict[str, Any]) -> None:
    assert parallel_settings(load(f"{BASE}parallel: {{mode: {spelling}}}")) == expected
    assert parallel_settings(load(BASE, [f"parallel.mode={spelling}"])) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("activation_offloading: true", {"cpu_offload": "activations"}),
        ("activation_offloading: legacy", {"cpu_offload": "activations"}),
        ("activation_offloading: false", {}),
        ("enable_activation_cpu_offload: true", {"cpu_offload": "activations"}),
        ("gradient_checkpointing: offload", {"cpu_offload": "activations"}),
        ("parallel: {cpu_offload: [activations]}", {"cpu_offload": "activations"}),
        (
            "activation_offloading: true\nfsdp: full_shard offload",
            {"mode": "zero3", "cpu_offload": ["all", "activations"]},
        ),
        ("activation_offloading: true\ndeepspeed: zero3", deepspeed(3)),
    ],
)
def test_reads_keys_of_activation_offloading(
    load: Load, text: str, expected: dict[str, Any]
) -> None:
    assert parallel_settings(load(f"{BASE}{text}\n")) == expected


def test_hsdp_replicates_across_hosts_unless_sizes_are_given(load: Load) -> None:
    assert parallel_settings(load(BASE + "parallel: {mode: hsdp, nnodes: 2}")) == {
        "mode": "zero3",
        "nnodes": 2,
        "data": 2,
    }
    assert parallel_settings(load(BASE + "parallel: {mode: hsdp, shard: 4}")) == {
        "mode": "zero3",
        "shard": 4,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cp_size: 2\ncp_mode: pipelined", "not a method of context parallelism"),
        ("cp_size: 2\nsequence_parallel_size: 2", "`cp_size: 2` (line 3) divides rows too"),
        ("cp_size: 2\nsequence_parallel_size: 4", "`sequence_parallel_size: 4`"),
        (
            "parallelism_config_cp_size: 2\nparallelism_config_sp_size: 2",
            "`parallelism_config_cp_size: 2` (line 3) divides rows too",
        ),
        (
            "parallelism_config: {cp_size: 2}\nparallelism_config_sp_size: 2",
            "parallelism_config_sp_size: 2`: `parallelism_config",
        ),
        (
            "parallelism_config: {cp_size: 2, sp_size: 2}",
            "`cp_size` and `sp_size` in it both set `parallel.context`",
        ),
        ("ulysses_parallel_size: 2\nring_attention_size: 2\ncp_size: 2", "disagree"),
        ("deepspeed_autotp_size: 2", "mode: hybrid, tensor: 2"),
        ("zero_hpz_partition_size: 8", "secondary partition"),
        ("distributed_type: MEGATRON_LM", "Megatron-LM"),
        ("distributed_type: XLA", "TPUs"),
        ("mixed_precision: fp4", "not a supported precision"),
        ("deepspeed: missing.json", "No such file"),
        ("deepspeed: zero7", "neither a file nor the name of a ZeRO stage"),
        ("deepspeed: ds_z3.json\nfsdp: full_shard", "keep one of the two"),
        ("deepspeed: ds_z3.json\nparallel: {mode: zero2}", "disagree: both set `parallel.mode`"),
        (
            "deepspeed: {zero_optimization: {stage: 2, zero_quantized_weights: true}}",
            "zero_quantized_weights",
        ),
        ("deepspeed: {zero_optimization: {stage: 3, offload_param: {device: nvme}}}", "nvme"),
        ("deepspeed: {stage: 3}", "stage: not a key of DeepSpeed that Paceline knows"),
        (
            "deepspeed: {zero_optimization: {stage: 2}, optimizer: {type: Lamb}}",
            "deepspeed: `optimizer.type: Lamb`",
        ),
        ("fsdp: full_sard", "did you mean `full_shard`"),
        ("fsdp_config: {fsdp_shardng_strategy: FULL_SHARD}", "did you mean `sharding_strategy`"),
        ("fsdp_config: {xla: true}", "TPUs"),
        ("fsdp: full_shard\ntensor_parallel_size: 2", "number of shards"),
        ("num_processes: 5\nnum_machines: 2", "cannot be divided evenly over 2 hosts"),
    ],
)
def test_rejects_unsupported_parallelism(
    load: Load, in_folder: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE + text)
    assert expected in caught.value.paragraph()


def test_command_line_overrides_the_strategy_of_the_file(load: Load, in_folder: Path) -> None:
    loaded = load(BASE + "deepspeed: ds_z3_offload.json", ["parallel.mode=zero2"])
    assert parallel_settings(loaded) == {"mode": "zero2"}
    assert any(
        "is overridden by the command line: `parallel.mode=zero2`" in text
        for _, text in loaded.notices
    )
    assert parallel_settings(
        load(BASE + "fsdp: full_shard", ["--deepspeed", "ds_z2.json"])
    ) == deepspeed(2, "ds_z2.json")
    assert parallel_settings(load(BASE + "deepspeed: zero3", ["deepspeed=zero1"])) == deepspeed(1)


def test_deepspeed_json_sets_missing_keys(load: Load, in_folder: Path) -> None:
    settings = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.3,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-3, "betas": [0.8, "auto"], "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 10, "total_num_steps": "auto"},
        },
    }
    Path("ds.json").write_text(json.dumps(settings))
    args = load(BASE + "deepspeed: ds.json").config.train_args
    assert (args.precision, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (
        "bf16-mixed",
        2,
        3,
    )
    assert (args.max_grad_norm, args.optim, args.learning_rate) == (0.3, "adamw", 1e-3)
    assert (args.adam_beta1, args.adam_beta2) == (0.8, 0.999)
    assert (args.lr_scheduler_type, args.warmup_steps) == ("linear", 10)

    loaded = load(
        BASE + "deepspeed: ds.json\nmax_grad_norm: 2\nbf16: auto", ["gradient_accumulation_steps=1"]
    )
    args = loaded.config.train_args
    assert (args.max_grad_norm, args.gradient_accumulation_steps, args.precision) == (
        2,
        1,
        "bf16-mixed",
    )
    warnings = [text for level, text in loaded.notices if level == "warning"]
    assert "`gradient_clipping: 0.3` (ds.json) is overridden by `max_grad_norm: 2`" in warnings
    steps = "gradient_accumulation_steps"
    assert f"`{steps}: 3` (ds.json) is overridden by `{steps}=1`" in warnings
    notices = "\n".join(text for _, text in loaded.notices)
    assert "`steps_per_print`" in notices

    loaded = load(BASE + "deepspeed: ds.json\nfp16: true")
    assert loaded.config.train_args.precision == "fp16-mixed"
    assert (
        "warning",
        "`bf16.enabled: true` (ds.json) is overridden by `fp16: true`",
    ) in loaded.notices


def test_a_json_beside_the_config_is_found(tmp_path: Path) -> None:
    (tmp_path / "beside.json").write_text('{"zero_optimization": {"stage": 3}}')
    path = tmp_path / "c.yaml"
    path.write_text(BASE + "deepspeed: beside.json")
    loaded = load_config(path)
    assert parallel_settings(loaded) == deepspeed(3, str(tmp_path / "beside.json"))


def test_activation_checkpointing_of_fsdp_is_gradient_checkpointing(load: Load) -> None:
    text = (
        BASE
        + "gradient_checkpointing: false\nfsdp: full_shard\nfsdp_config: {activation_checkpointing:"
        " true}"
    )
    assert load(text).config.train_args.gradient_checkpointing == "full"
    overridden = load(text, ["gradient_checkpointing=false"]).config.train_args
    assert overridden.gradient_checkpointing == "none"
    every_second = load(text, ["gradient_checkpointing=2"]).config.train_args
    assert every_second.gradient_checkpointing == 2


# -- whole files

ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_accelerate_config_needs_model_and_dataset(
    tmp_path: Path,
) -> None:
    path = tmp_path / "accelerate_config.yaml"
    path.write_text(ACCELERATE)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = caught.value.paragraph()
    assert "is an Accelerate config" in text
    assert "`parallel.mode: zero3`; `train_args.precision: bf16-mixed`" in text
    assert "model=... dataset=..." in text
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["mixed_precision=fp4"])
    assert "is an Accelerate config" in caught.value.paragraph()
    assert "`fp4` is not a supported precision" in caught.value.paragraph()
    loaded = load_config(path, ["model=m", "dataset=d"])
    assert parallel_settings(loaded) == {"mode": "zero3", "num_gpus": 8, "node_rank": 0}
    assert loaded.config.train_args.precision == "bf16-mixed"


@pytest.mark.parametrize("overrides", [[], ["model=m", "dataset=d"]])
def test_recognizes_a_deepspeed_json(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "ds_z3.json"
    path.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}')
    with raises_error(ConfigError, code="deepspeed-config-as-config") as caught:
        load_config(path, overrides)
    assert f"deepspeed: {path}" in caught.value.paragraph()


def test_recognizes_an_fsdp_json(in_folder: Path) -> None:
    with raises_error(ConfigError, code="fsdp-config-as-config"):
        load_config(Path("fsdp2.json"))


@pytest.mark.parametrize(("content", "reduce_dtype"), [(IN_16_BITS, "auto"), (IN_FLOAT32, None)])
def test_type_of_reductions_in_a_deepspeed_json_is_used_with_another_mode(
    load: Load, content: dict[str, Any], reduce_dtype: str | None
) -> None:
    loaded = load(f"{BASE}deepspeed: {json.dumps(content)}", ["parallel.mode=zero2"])
    expected = {"mode": "zero2"} | ({"reduce_dtype": reduce_dtype} if reduce_dtype else {})
    assert parallel_settings(loaded) == expected


def test_reset_mode_is_named_in_the_notice_of_a_deepspeed_json(load: Load, in_folder: Path) -> None:
    file = BASE + "parallel: {mode: deepspeed, deepspeed_config: ds_z2.json}"
    loaded = load(file, ["parallel.mode="])
    assert any("and the mode is auto" in text for _, text in loaded.notices)


def test_sizes_of_the_file_and_of_the_command_line_are_multiplied(load: Load) -> None:
    text = f"{BASE}ulysses_parallel_size: 2\nring_attention_size: 2\n"
    loaded = load(text, ["ring_attention_size=4"])
    assert parallel_settings(loaded) == {"context": 8}
    notices = [notice for _, notice in loaded.notices]
    assert any(notice.endswith("times `ulysses_parallel_size: 2`") for notice in notices)
    assert any("is a factor of `parallel.context: 8`" in notice for notice in notices)
    assert parallel_settings(load(f"{BASE}cp_size: 2\n", ["sequence_parallel_size=4"])) == {
        "context": 4
    }
    assert parallel_settings(load(text, ["parallel.context=2"])) == {"context": 2}
