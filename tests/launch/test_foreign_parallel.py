"""Test strategies that are selected with the settings of other tools: they train on real ranks with
the same losses."""

import json
import os
from pathlib import Path

import pytest
from commands import MICRO, losses, report, run, train

pytestmark = pytest.mark.slow

ON_HOST = {"device": "cpu", "pin_memory": True}
ZERO_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": ON_HOST,
        "offload_param": ON_HOST,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "monitor_config": {"enabled": True, "tag": "x"},
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  {fsdp_version: 2, fsdp_reshard_after_forward: true,
   fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: true
"""


@pytest.mark.soak
def test_deepspeed_and_accelerate_configs_have_equal_losses(tmp_path: Path) -> None:
    (tmp_path / "ds_z3.json").write_text(json.dumps(ZERO_3))
    (tmp_path / "config.yaml").write_text("deepspeed: ds_z3.json\nparallel: {num_gpus: 2}\n")
    done = run("config.yaml", *MICRO, "output_dir=deepspeed", "max_steps=3", cwd=tmp_path)
    assert report(tmp_path / "deepspeed")["strategy"] == "deepspeed"
    assert "`parallel.deepspeed_stage: 3`" in done.stderr
    assert "`parallel.cpu_offload: all` has no effect on a CPU" in done.stderr

    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    run("accelerate.yaml", *MICRO, "output_dir=fsdp", "max_steps=3", cwd=tmp_path)
    result = report(tmp_path / "fsdp")
    assert (result["strategy"], result["world_size"], result["device"]) == ("zero3", 2, "cpu")
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "deepspeed"), rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("args", "strategy", "num_ranks"),
    [
        (["deepspeed=zero1"], "deepspeed", 2),
        (["deepspeed=zero0"], "ddp", 2),
        (["fsdp=shard_grad_op auto_wrap"], "zero2", 2),
        (["parallel.mode=hsdp", "parallel.data=2"], "zero3", 4),
        (
            [
                "fsdp_config={reshard_after_forward: true}",
                "dp_shard_size=2",
                "tensor_parallel_size=2",
            ],
            "hybrid",
            4,
        ),
        (["pipeline_parallel_size=2"], "hybrid", 2),
        (["parallel.mode=ZeRO-1"], "zero1", 2),
    ],
)
def test_strategy_of_other_tool_matches_ddp(
    tmp_path: Path, args: list[str], strategy: str, num_ranks: int
) -> None:
    batch = ["max_steps=3", f"parallel.num_gpus={num_ranks}"]
    train(tmp_path / "run", *args, *batch)
    assert report(tmp_path / "run")["strategy"] == strategy
    replicas = num_ranks // 2 if strategy == "hybrid" else num_ranks
    train(tmp_path / "ddp", "parallel.mode=ddp", "max_steps=3", f"parallel.num_gpus={replicas}")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-4)


def test_missing_deepspeed_error_suggests_install_and_zero3(tmp_path: Path) -> None:
    # A folder of the same name, which users often have for DeepSpeed's configs.
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Without:\n    def __init__(self, finder): self.finder = finder\n    def"
        " __getattr__(self, name): return getattr(self.finder, name)\n    def find_spec(self, name,"
        " path=None, target=None):\n        return None if name == 'deepspeed' else"
        " self.finder.find_spec(name, path, target)\nsys.meta_path[:] = [Without(finder) for finder"
        " in sys.meta_path]\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    args = [*MICRO, f"output_dir={tmp_path / 'run'}", "parallel.num_gpus=2", "deepspeed=zero3"]
    done = run(*args, expect=2, env=env)
    assert "pip install 'paceline[deepspeed]'" in done.stderr
    assert "`parallel.mode: zero3`" in done.stderr
    assert not (tmp_path / "run").exists()
