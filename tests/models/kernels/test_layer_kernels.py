"""What computes the recurrent and convolution layers of models is known before and during a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, HYBRIDS, TOKENS, make_model
from transformers import AutoConfig, AutoModelForCausalLM

import paceline
from paceline.config.schema import Config
from paceline.doctor.checks import check_layers
from paceline.models.kernels.layer_kernels import (
    LayerFunction,
    LayerKernels,
    has_attention,
    layer_functions,
    layer_kernels,
)
from paceline.planner.model_profile import describe
from paceline.tasks import load_task

DELTA = ("gated delta net", ("causal-conv1d", "flash-linear-attention"))
MAMBA_2 = ("mamba 2", ("causal-conv1d", "mamba-ssm"))
#: family → kinds of layers, with the packages that have kernels for them.
EXPECTED = {
    "qwen3_next": [DELTA],
    "qwen3_5_text": [DELTA],
    "qwen3_5_moe_text": [DELTA],
    "mamba2": [MAMBA_2],
    "bamba": [MAMBA_2],
    "falcon_h1": [MAMBA_2],
    "nemotron_h": [MAMBA_2],
    "zamba2": [MAMBA_2],
    "jamba": [("mamba", ("causal-conv1d", "mamba-ssm"))],
    "lfm2": [("short convolution", ("causal-conv1d",))],
    "llama": [],
    "gemma3_text": [],
}


def on_meta(name: str) -> Any:
    kind, numbers = {**FAMILIES, **HYBRIDS}[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TOKENS, **numbers))


@pytest.mark.parametrize("name", [name for name in EXPECTED if name in {**FAMILIES, **HYBRIDS}])
def test_layers_of_families(name: str) -> None:
    """None of the packages is installed where the tests run."""
    model = on_meta(name)
    found = layer_kernels(model)
    assert [(each.kind, each.missing) for each in found] == EXPECTED[name]
    assert {each.kernel for each in found} <= {"torch"}
    assert has_attention(model) == (name != "mamba2")


def test_only_functions_that_training_calls_count() -> None:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    assert {each.name for each in layer_functions(Mamba2Mixer)} == {
        "causal_conv1d_fn",
        "mamba_split_conv1d_scan_combined",
        "mamba_chunk_scan_combined",
    }
    assert layer_functions(Qwen3NextGatedDeltaNet) == {
        LayerFunction("causal_conv1d_fn", "causal_conv1d", False),
        LayerFunction("chunk_gated_delta_rule", "fla", False),
    }
    assert not layer_functions(torch.nn.Linear)


def test_a_function_that_a_package_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers chooses the function of a package when the modeling code is imported."""
    import sys
    import types

    from transformers.integrations import hub_kernels

    package = types.ModuleType("causal_conv1d")
    package.causal_conv1d_fn = lambda hidden_states, weight: hidden_states  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)

    def in_torch(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden_states

    choose = hub_kernels.use_kernel_func_from_hub_with_fallback
    module = types.ModuleType("transformers.models.made_up.modeling_made_up")
    module.convolve = choose("causal_conv1d_fn", "causal_conv1d")(in_torch)  # type: ignore[attr-defined]
    code = "class MadeUpShortConv:\n    def forward(self, x):\n        return convolve(x, None)\n"
    exec(code, module.__dict__)  # a class of a modeling file
    kind = module.MadeUpShortConv
    assert layer_functions(kind) == {LayerFunction("causal_conv1d_fn", "causal_conv1d", True)}


def test_notices() -> None:
    part = LayerKernels("mamba 2", ("mamba-ssm",), ("causal-conv1d",))
    assert part.kernel == "mamba-ssm and torch"
    codes = {
        (device, missing): LayerKernels("mamba 2", (), missing).notice(device).code
        for device in ("cpu", "cuda")
        for missing in ((), ("mamba-ssm",))
    }
    assert codes == {
        ("cpu", ()): "layer-kernels",
        ("cuda", ()): "layer-kernels",
        ("cpu", ("mamba-ssm",)): "layer-kernels-need-gpu",
        ("cuda", ("mamba-ssm",)): "layer-kernels-missing",
    }


def config_of(folder: Path, **values: Any) -> Config:
    args = {"max_length": 48, "precision": "32"}
    return Config.model_validate(
        {"model": str(folder), "dataset": "builtin:python-docs#48", "train_args": args, **values}
    )


def test_plan_and_doctor(tmp_path: Path) -> None:
    folder = make_model("qwen3_next", tmp_path)
    config = config_of(folder)
    values = config.model_dump(mode="json", exclude_unset=True)
    for device, missing in ((None, "need a GPU"), ("A100-80GB", "not installed")):
        notes = paceline.plan(values, device=device, world_size=1, uses_history=False)["notes"]
        assert sum(note.startswith("layers: attention, computed by") for note in notes) == 1
        layers = [note for note in notes if note.startswith("layers: gated delta net")]
        assert len(layers) == 1
        assert "computed by torch" in layers[0]
        assert missing in layers[0]
    profile = describe(config)
    on_cpu, on_gpu = (check_layers(profile, config, device) for device in ("cpu", "cuda"))
    assert on_cpu is not None
    assert on_gpu is not None
    assert on_cpu.ok
    assert not on_gpu.ok
    assert not on_gpu.fatal
    assert on_gpu.advice is not None
    assert "pip install causal-conv1d flash-linear-attention" in on_gpu.advice


def test_a_model_without_attention_names_none(tmp_path: Path) -> None:
    task: Any = load_task(config_of(make_model("mamba2", tmp_path)))
    task.packed = False
    codes = [getattr(text, "code", "") for _, text in task.setup(task.build_model())]
    assert "attention-kernel" not in codes
    assert codes.count("layer-kernels-need-gpu") == 1
