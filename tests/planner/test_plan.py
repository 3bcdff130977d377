"""Test `paceline plan`, `paceline.plan()`, and the choice of `mode: auto`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from families import make_model
from raised import raises_error

import paceline
from paceline.cli import main
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.builtin import resolve_model
from paceline.models.weights.stored_files import read_header
from paceline.planner.auto.choose import all_modes, candidates, eligible_layouts
from paceline.planner.auto.pick import pick, pick_without_lengths
from paceline.planner.estimate import estimate
from paceline.planner.machine import profile as machine_profile
from paceline.planner.machine.hardware import cpu_machine
from paceline.planner.machine.local import local_machine
from paceline.planner.machine.profile import MeasuredLink
from paceline.planner.micro_batch import micro_batch
from paceline.planner.mode_time import time_of_layout
from paceline.planner.model_profile import describe
from paceline.planner.upper_bound import stored_parameters, upper_bound
from paceline.tasks import load_task

MICRO = "builtin:qwen2-micro"


def config(**keys: Any) -> Config:
    return Config(**{"model": MICRO, "dataset": "builtin:python-docs", **keys})


def write_model_config(folder: Path, hidden: int = 2048, layers: int = 12) -> str:
    """Write the config.json of a model with about 50 million parameters per layer."""
    widths = {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(widths))
    return str(folder)


def test_candidates_cover_all_modes_and_meshes() -> None:
    names = [layout.strategy for layout in candidates(config(), 8)]
    assert names[:10] == [
        "single",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "deepspeed",
        "tensor",
        "pipeline",
        "context",
        "dp",
    ]
    meshes = [layout.axes for layout in candidates(config(), 8) if layout.strategy == "hybrid"]
    assert len(meshes) == len(set(meshes)) == 20
    assert {layout.size for layout in meshes} == {8}
    assert [layout.strategy for layout in candidates(config(), 1)] == ["single"]
    zero3 = config(parallel={"mode": "zero3", "data": 2})
    assert candidates(zero3, 4)[-1].axes.shard == 2
    assert len(set(candidates(zero3, 4))) == len(candidates(zero3, 4))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (None, "it has no experts, or transformers has no plan that divides them"),
        ("llama4_text", "it has no experts, or transformers has no plan that divides them"),
        ("mixtral", "the 4 experts of a layer are not divisible by 8 ranks"),
    ],
)
def test_experts_that_cannot_be_divided_do_not_fit(
    family: str | None, reason: str, tmp_path: Path
) -> None:
    model = MICRO if family is None else str(make_model(family, tmp_path))
    keys = {"model": model, "dataset": "none", "parallel": {"expert": 8}}
    modes = paceline.plan(keys, world_size=8, device_memory="8GB")["modes"]
    (divided,) = (mode for mode in modes if "expert" in mode["mode"])
    assert not divided["fits"]
    assert reason in divided["reason"]


def test_command_and_function_return_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        f"model={MICRO}",
        "dataset=none.jsonl",
        "max_length=64",
        "parallel.mode=zero2",
        "precision=32",
    ]
    assert main(["plan", *args, "--world-size", "2", "--device-memory", "8GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["world_size"], plan["device_memory_bytes"]) == (2, 8 * 10**9)
    assert (plan["chosen"], plan["configured"]) == ("ddp", "zero2")
    assert "ddp" in plan["why"]
    modes = {mode["mode"]: mode for mode in plan["modes"]}
    assert {
        "single",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "tensor",
        "pipeline",
        "dp",
        "deepspeed stage 2",
    } <= set(modes)
    for mode in modes.values():
        memory = mode["memory_bytes"]
        assert {"fits", "traffic_bytes_per_step", "step_time_s", "reason"} <= set(mode)
        if memory["total"] is not None:
            parts = [memory[key] for key in ("parameters", "gradients", "optimizer", "activations")]
            assert memory["total"] == sum(parts)
    elements = plan["parameters"]
    assert modes["ddp"]["memory_bytes"]["gradients"] == 4 * elements
    assert modes["ddp"]["traffic_bytes_per_step"] == pytest.approx(4 * elements, abs=2)
    result = paceline.plan(
        {"model": MICRO, "dataset": "none.jsonl", "parallel": {"mode": "zero2"}},
        world_size=2,
        device_memory="8GB",
        **{"train_args.max_length": 64, "train_args.precision": "32"},
    )
    assert result == plan


def test_reports_an_invalid_layout(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "plan",
        f"model={MICRO}",
        "dataset=none.jsonl",
        "parallel.mode=pipeline",
        "parallel.tensor=4",
        "--world-size",
        "2",
    ]
    assert main(args) == 0
    message = (
        "`parallel.tensor: 4` is not supported with `parallel.mode: pipeline`: it has no such"
        " dimension"
    )
    assert f"as configured: {message}" in " ".join(capsys.readouterr().out.split())
    assert main([*args, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["configured"] is None
    assert plan["layout_error"]["what"] == message


def test_says_how_the_ranks_of_a_row_exchange_keys(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", f"model={MICRO}", "dataset=builtin:python-docs", "parallel.device=cpu"]
    args += ["parallel.context_method=gather", "--world-size", "2", "--json"]
    expected = {
        "context: keys and values are exchanged by `gather` (it was requested)",
        "context: of the fullest row, the rank with the most (query, key) pairs has 1.00 times the"
        " mean",
    }
    for mode in ("context", "ddp"):
        assert main([*args, f"parallel.mode={mode}"]) == 0
        notes = set(json.loads(capsys.readouterr().out)["notes"])
        assert expected & notes == (expected if mode == "context" else set())


def test_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "task=classify",
        "model=builtin:small-cnn",
        "dataset=builtin:digits",
        "parallel.device=cpu",
    ]
    args.append("per_device_train_batch_size=64")
    assert main(["plan", *args, "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 120
    assert "→ ddp" in out
    assert "113,226 parameters" in out
    assert "auto: ddp is the fastest" in out


def test_counts_tied_weights_on_stages_and_shards(tmp_path: Path) -> None:
    """The first and the last stage share a weight, and the stages between them do not have it."""
    model = write_model_config(tmp_path, layers=8)
    modes = paceline.plan({"model": model, "dataset": "none"}, world_size=8, device="A100-40GB")[
        "modes"
    ]
    totals = {mode["mode"]: mode["memory_bytes"]["parameters"] for mode in modes}
    assert totals["shard 2 × pipeline 4"] == pytest.approx(
        totals["data 2 × pipeline 4"] / 2, rel=1e-3
    )


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--world-size", "0"], ["--world-size 0"]),
        (["--world-size", "two"], ["--world-size two"]),
        (["--device-memory", "24"], ["has no unit", "--device-memory 24GB"]),
        (["--device", "H1000"], ["H1000", "H100-SXM"]),
        (["--world-sizes", "2"], ["--world-sizes", "did you mean"]),
        (["--wobble", "2"], ["wobble"]),
        (["model=./no-such-model"], ["no-such-model", "does not exist"]),
        (["parallel.mode=zero9"], ["zero9"]),
        (["parallel.device=cuda"], ["cuda", "--device"]),
        (["lora.enable=true", "lora.target_modules=[nothing]"], ["target_modules"]),
    ],
)
def test_reports_invalid_input(
    args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    required = [
        key for key in (f"model={MICRO}", "dataset=none.jsonl") if not args[0].startswith(key[:6])
    ]
    assert main(["plan", *required, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    paragraph = err[err.index("error: ") :].strip()
    assert "\n" not in paragraph
    for part in parts:
        assert part in paragraph


def test_reports_an_inconsistent_config_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "hidden_size": -1, "num_hidden_layers": 2}'
    )
    assert main(["plan", f"model={tmp_path}", "dataset=none", "--device", "T4"]) == 2
    assert "cannot be built from its config.json" in capsys.readouterr().err


def test_reads_token_counts_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.data.encoding.prepare import prepare_tokens
    from paceline.models.builtin import resolve_model

    small_config = config(dataset="builtin:python-docs#40", train_args={"max_length": 96})
    args = [
        f"model={MICRO}",
        "dataset=builtin:python-docs#40",
        "max_length=96",
        "--device",
        "T4",
        "--json",
    ]
    assert main(["plan", *args]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_micro_batch"] == 4 * 96
    tokens = prepare_tokens(small_config, "sft", resolve_model)
    assert main(["plan", *args]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens_per_micro_batch"] == pytest.approx(
        4 * tokens.train_tokens / tokens.num_train
    )
    assert "from the tokenized data" in plan["notes"][0]


def test_comparing_times_does_not_import_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    resolve_model(MICRO)
    machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, 1e9))
    code = (
        "import sys; from paceline.config.schema import Config; from paceline.planner.auto.pick"
        f" import pick;choice = pick(Config(model={MICRO!r}, dataset='d'), 4, 8 * 10**9,"
        " device_type='cpu');print(choice.layout.strategy, 'torch' in sys.modules,"
        " len(choice.remarks))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert out.split() == ["ddp", "False", "2"]


def test_auto_selects_the_simplest_mode_that_fits() -> None:
    choice = pick(config(), 4, 8 * 10**9)
    assert choice.layout.strategy == "ddp"
    assert choice.settings == {"parallel.mode": "ddp"}
    assert "GiB" in choice.why
    assert pick(config(), 1, 8 * 10**9).layout.strategy == "single"
    digits = config(task="classify", model="builtin:small-cnn", dataset="builtin:digits")
    assert pick(digits, 4, 8 * 10**9).layout.strategy == "ddp"


def next_best(remarks: tuple[str, ...]) -> list[str]:
    """Return the names of the runners-up."""
    marks = [remark for remark in remarks if remark.startswith("next: ")]
    return [mark.removeprefix("next: ").partition(":")[0] for mark in marks]


def test_auto_compares_the_times_of_modes_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = config(lora={"enable": False})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unknown = pick(full, 2, 8 * 10**9, device_type="cpu")
    assert unknown.layout.strategy == "ddp"
    assert unknown.remarks == (
        "other modes were not compared, because `paceline doctor` has not measured this CPU",
    )
    machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, 1e9))
    fast = pick(full, 2, 8 * 10**9, device_type="cpu")
    assert "needs at most" in fast.why
    assert "as fast as the best of" in fast.why
    assert len(next_best(fast.remarks)) == 2
    assert not {"ddp", "tensor"} & set(next_best(fast.remarks))
    assert all("slower" in remark or "less simple" in remark for remark in fast.remarks)
    machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, 1e6))
    # All gradients of a larger model take longer than the activations of a pipeline.
    larger = config(lora={"enable": False}, model=write_model_config(tmp_path), dataset="none")
    slow = pick(larger, 2, 80 * 10**9, device_type="cpu")
    assert slow.layout.strategy == "pipeline"
    assert "is the fastest that fits" in slow.why
    assert len(next_best(slow.remarks)) == 2
    assert not pick(full, 1, 8 * 10**9, device_type="cpu").remarks
    digits = config(task="classify", model="builtin:small-cnn", dataset="builtin:digits")
    images = pick(digits, 2, 8 * 10**9, device_type="cpu")
    assert images.layout.strategy == "ddp"
    assert not images.remarks


@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e10])
def test_times_from_widths_are_those_of_the_plan(
    bandwidth: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimates without a model differ only by its small parameters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_profile.save("cpu", MeasuredLink(2, 1, 1e-4, bandwidth))
    full = config(lora={"enable": False}, model=write_model_config(tmp_path), dataset="none")
    machine = local_machine(2, True, None, 80 * 10**9, can_measure=False)
    profile, batch = describe(full), micro_batch(full)
    assert profile.dims is not None
    compared = 0
    for layout in eligible_layouts(full, 2):
        mode = estimate(layout, full, profile, batch, machine)
        if mode.cost is not None:
            rough = time_of_layout(layout, full, profile.dims, batch, machine)
            assert rough.seconds == pytest.approx(mode.step_time_s, rel=0.01)
            compared += 1
    assert compared >= 5


@pytest.mark.soak
def test_upper_bound_exceeds_the_plan(tmp_path: Path) -> None:
    for keys in (
        {"train_args": {"precision": "32"}},
        {"train_args": {"precision": "32"}, "lora": {"enable": True}},
        {"train_args": {"precision": "bf16-mixed"}},
        {"train_args": {"precision": "32"}, "lora": {"enable": True, "dropout": 0.0}},
        {"train_args": {"precision": "fp16-mixed"}, "lora": {"enable": True}},
    ):
        keys = {"train_args": {"precision": "32"}, **keys}
        trained = config(model=write_model_config(tmp_path), dataset="none", **keys)
        plan = paceline.plan(trained.model_dump(), world_size=2, device="T4")
        bound = upper_bound(trained)
        ddp = next(mode for mode in plan["modes"] if mode["mode"] == "ddp")["memory_bytes"]["total"]
        assert bound is not None
        assert ddp <= bound <= 1.5 * ddp


def test_auto_shards_a_model_that_does_not_fit_one_device(tmp_path: Path) -> None:
    trained = config(
        model=write_model_config(tmp_path),
        dataset="none",
        train_args={"max_length": 64, "per_device_train_batch_size": 1},
    )
    ddp = next(
        mode
        for mode in paceline.plan(trained.model_dump(), world_size=4, device="T4")["modes"]
        if mode["mode"] == "ddp"
    )
    choice = pick(trained, 4, int(0.6 * ddp["memory_bytes"]["total"]))
    assert choice.layout.strategy not in ("ddp", "single", "dp", "deepspeed")
    assert choice.layout.world_size == 4
    assert "ddp needs" in choice.why
    assert [remark for remark in choice.remarks if remark.startswith("next: ")]


def test_first_run_chooses_by_the_lengths_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained = config(
        dataset="builtin:python-docs#20",
        train_args={"max_length": 1024, "per_device_train_batch_size": 4},
    )
    at_most = upper_bound(trained)
    assert at_most is not None
    memory = at_most // 2
    assumed = pick(trained, 2, memory, device_type="cpu")
    assert pick_without_lengths(trained, 2, memory, device_type="cpu") is None
    load_task(trained).prepare()
    first = pick(trained, 2, memory, device_type="cpu")
    assert first.layout.strategy == "ddp"
    assert "needs at most" in first.why
    assert "needs at most" not in assumed.why
    assert pick(trained, 2, memory, device_type="cpu") == first  # a later run
    assert pick_without_lengths(trained, 2, 10 * at_most, device_type="cpu") is not None


def test_upper_bound_counts_both_answers_of_a_pair() -> None:
    args = {"max_length": 64, "per_device_train_batch_size": 4}
    single, pairs = (
        upper_bound(config(task=task, dataset="none", train_args=args)) for task in ("sft", "orpo")
    )
    assert single is not None
    assert pairs is not None
    assert pairs > single


def test_reports_if_no_mode_fits(tmp_path: Path) -> None:
    trained = config(model=write_model_config(tmp_path), dataset="none")
    with raises_error(ConfigError, code="does-not-fit") as error:
        pick(trained, 2, 2 * 10**9)
    assert "lora.enable=true" in str(error.value)
    # Without data, the activations are only an upper bound, so the mode is chosen with a warning.
    state = 16 * 12 * 50e6
    choice = pick(trained, 1, int(1.15 * state))
    assert choice.layout.strategy == "single"
    assert "may not fit" in choice.why


def test_cpu_ranks_share_frozen_weights() -> None:
    """Frozen weights in the dtype of the model's files are in memory once per host."""
    adapted = config(lora={"enable": True}, parallel={"device": "cpu"})
    frozen = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for entry in read_header(Path(resolve_model(MICRO)) / "model.safetensors")[0].values()
    )

    def planned(precision: str, mode: str) -> int:
        args = adapted.train_args.model_copy(update={"precision": precision})
        profile = describe(adapted.model_copy(update={"train_args": args}))
        machine = cpu_machine(4, None, measure=False, memory_bytes=1 << 30)
        modes = all_modes(adapted, profile, micro_batch(adapted), machine)
        report = next(each for each in modes if each.name == mode).as_dict()["memory_bytes"]
        assert report["parameters"] is not None
        return report["parameters"]

    shared, converted = planned("32", "ddp"), planned("bf16-mixed", "ddp")
    adapters = planned("bf16-mixed", "ddp") - frozen // 2
    assert shared == frozen // 4 + adapters
    assert converted > shared  # each rank converts them to bfloat16
    assert planned("32", "zero3") == pytest.approx((frozen + adapters) / 4, rel=0.1)


def test_counts_parameters_from_safetensors_headers(tmp_path: Path) -> None:
    count = stored_parameters(Path(resolve_model(MICRO)))
    assert count is not None
    assert 8192 * 64 < count < 8192 * 64 + 150_000  # embeddings, and two layers of 64
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 32)
    assert stored_parameters(tmp_path) is None


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("A10", "bf16-mixed"),
        ("T4", "fp16-mixed"),
        ("V100-32GB", "fp16-mixed"),
        ("P100-PCIe-16GB", "fp16-mixed"),
    ],
)
def test_auto_precision_follows_the_named_device(device: str, precision: str) -> None:
    keys = {
        "model": "builtin:qwen2-micro",
        "dataset": "builtin:python-docs#8",
        "lora": {"enable": True},
    }
    plan = paceline.plan(keys, world_size=2, device=device)
    assert plan["precision"] == precision
    assert any(
        "chosen by `precision: auto`" in note and device[:4] in note for note in plan["notes"]
    )
    weights = {
        mode["mode"]: mode["memory_bytes"]["parameters"]
        for mode in plan["modes"]
        if mode["memory_bytes"]
    }
    full = paceline.plan({**keys, "train_args": {"precision": 32}}, world_size=2, device=device)
    assert full["precision"] == "32"
    frozen = plan["parameters"] - plan["trainable_parameters"]
    full_precision_bytes = next(
        mode["memory_bytes"]["parameters"] for mode in full["modes"] if mode["mode"] == "ddp"
    )
    assert full_precision_bytes - weights["ddp"] == 2 * frozen


def test_float8_is_faster_where_the_device_has_it(tmp_path: Path) -> None:
    # In a small model, the casts take longer than float8 saves.
    model = write_model_config(tmp_path, hidden=8192, layers=2)
    job = {"model": model, "dataset": "none.jsonl", "parallel": {"mode": "single"}}
    times = []
    for fp8 in ("none", "tensorwise"):
        args = {"precision": "bf16-mixed", "fp8": fp8}
        result = paceline.plan({**job, "train_args": args}, device="H100", world_size=1)
        times.append(result["modes"][0]["step_time_s"])
    assert times[0] > times[1]
    with raises_error(ConfigError, code="fp8-on-device", naming="train_args.fp8"):
        paceline.plan({**job, "train_args": args}, device="A100", world_size=1)
