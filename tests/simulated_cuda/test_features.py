"""Test features of runs on simulated CUDA devices: checkpoints, offloading, evaluation, generation,
the watchdog, `paceline doctor`, and the error for a tensor on a wrong device."""

import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import device_task
import pytest
from commands import digest, events, losses, report, run, start
from cpu_reference import Reference
from device_runs import VARIABLES, run_on, train_on
from families import make_model
from switches import FULL, FULL_FP16, LAYOUTS, LORA_BF16, TOLERANCES, Layout, Switches

from paceline.models.builtin import resolve_model
from paceline.parallel.support_table import reason_against

pytestmark = pytest.mark.slow

QUESTION = "What is a tuple?"
KEEP = Switches(is_lora=False, precision="bf16-mixed", recomputes=False, packs=True)
CONSTANT = "lr_scheduler_type=constant"  # other schedules depend on `max_steps`


def layout_of(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_resumed_run_has_the_digest_of_an_uninterrupted_run(layout: Layout, tmp_path: Path) -> None:
    switches = FULL_FP16 if layout.supports(FULL_FP16) else FULL
    args = (*layout.args, *switches.args, CONSTANT)
    train_on("cuda", tmp_path / "whole", *args, "max_steps=4")
    for step in (2, 4):
        train_on("cuda", tmp_path / "resumed", *args, f"max_steps={step}", "--allow-config-change")
    assert report(tmp_path / "resumed")["resumed_from_step"] == 2
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


#: Each cell of the support table with offloading.
OFFLOADS = [
    (layout, offload)
    for layout, offload in itertools.product(LAYOUTS, ("optimizer", "all", "activations"))
    if reason_against(
        layout.mode, layout.dims, layout.settings, {"parallel": {"cpu_offload": offload}}
    )
    is None
]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "offload"), OFFLOADS, ids=[f"{layout.name}-{name}" for layout, name in OFFLOADS]
)
def test_offloading_does_not_change_the_losses(
    layout: Layout, offload: str, cpu_losses: Reference, tmp_path: Path
) -> None:
    args = (*layout.args, *FULL.args, f"parallel.cpu_offload={offload}")
    stderr = train_on("cuda", tmp_path / "run", *args)
    assert "has no effect" not in stderr
    assert losses(tmp_path / "run") == pytest.approx(cpu_losses(layout, FULL), rel=TOLERANCES["32"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "switches", "offload"),
    [
        ("ddp", FULL_FP16, "optimizer,activations"),
        ("single", KEEP, "optimizer,activations"),
        ("zero1", LORA_BF16, "optimizer,activations"),
        ("zero2", LORA_BF16, "activations"),
        ("zero3", KEEP, "activations"),
        ("local_sgd", KEEP, "activations"),
        ("diloco", KEEP, "activations"),
        ("tensor", KEEP, "activations"),
        ("shard2-tensor2", KEEP, "activations"),
    ],
    ids=str,
)
def test_offloading_does_not_change_a_bit(
    name: str, switches: Switches, offload: str, tmp_path: Path
) -> None:
    """The run is resumed with offloading, and then without it."""
    args = (*layout_of(name).args, *switches.args, CONSTANT)
    train_on("cuda", tmp_path / "plain", *args, "max_steps=6")
    folder, change = tmp_path / "run", "--allow-config-change"
    setting = f"parallel.cpu_offload={offload}"
    assert "has no effect" not in train_on("cuda", folder, *args, "max_steps=2", setting)
    train_on("cuda", folder, *args, "max_steps=4", setting, change)
    memory = events(folder, "memory")[-1]
    state = report(folder)["state_memory_bytes"]
    assert state["measured"] == pytest.approx(state["predicted"], rel=0.01)
    train_on("cuda", folder, *args, "max_steps=6", change)
    assert report(folder)["resumed_from_step"] == 4
    plain = events(tmp_path / "plain", "memory")[-1]
    if "optimizer" in offload:
        assert memory["ranks"][0]["optimizer"] < 0.6 * plain["ranks"][0]["optimizer"]
    assert digest(folder) == digest(tmp_path / "plain")


@pytest.mark.soak
@pytest.mark.parametrize("rest", ["data", "shard"])
def test_offloading_activations_of_divided_experts_does_not_change_a_bit(
    rest: str, tmp_path: Path
) -> None:
    model = make_model("mixtral", tmp_path)
    args = (
        *replace(FULL, recomputes=False).args,
        f"model={model}", "tokenizer=builtin:qwen2-micro", "parallel.num_gpus=2",
        f"parallel.{rest}=2", "parallel.expert=2", "per_device_train_batch_size=2",
    )  # fmt: skip
    train_on("cuda", tmp_path / "plain", *args)
    offload = "parallel.cpu_offload=activations"
    assert "has no effect" not in train_on("cuda", tmp_path / "offloaded", *args, offload)
    assert digest(tmp_path / "offloaded") == digest(tmp_path / "plain")
    on_device = [
        events(tmp_path / name, "memory")[-1]["ranks"][0]["activations"]
        for name in ("plain", "offloaded")
    ]
    assert on_device[1] < on_device[0]


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["distributed", "rank0"])
def test_evaluation_and_generation(mode: str, tmp_path: Path) -> None:
    """The samples are generated during training."""
    args = (
        *layout_of("ddp").args, *FULL.args, "split_dataset_ratio=0.1", "eval_steps=2",
        # Few tokens: longer samples are cut short on a slow machine.
        "evaluation.num_samples=2", "evaluation.max_new_tokens=4",
    )  # fmt: skip
    for device in ("cuda", "cpu"):
        train_on(device, tmp_path / device, *args, f"evaluation.mode={mode}")
    on_cuda, on_cpu = (report(tmp_path / device) for device in ("cuda", "cpu"))
    assert on_cuda["final_eval_loss"] == pytest.approx(on_cpu["final_eval_loss"], rel=1e-5)
    samples = [
        [event["samples"] for event in events(tmp_path / device, "sample")]
        for device in ("cuda", "cpu")
    ]
    assert samples[0]
    assert samples[0] == samples[1]


@pytest.mark.soak
def test_tf32_is_in_the_report(tmp_path: Path) -> None:
    train_on("cuda", tmp_path / "run", *FULL.args, "parallel.mode=single", "tf32=true")
    assert report(tmp_path / "run")["tf32"] is True


def generate_on(device: str, model: str) -> str:
    environment = os.environ | (VARIABLES if device == "cuda" else {})
    options = (QUESTION, "--max-new-tokens=8", "--temperature=1", "--seed=1", "--json")
    done = run(model, *options, verb="generate", env=environment)
    return json.loads(done.stdout)["answer"]


@pytest.mark.soak
def test_generate_gives_the_answer_of_the_cpu() -> None:
    model = resolve_model("builtin:qwen2-micro")
    answer = generate_on("cuda", model)
    assert answer
    assert answer == generate_on("cpu", model)


@pytest.mark.soak
def test_chat_server_answers_on_the_device() -> None:
    model = resolve_model("builtin:qwen2-micro")
    messages = [{"role": "user", "content": QUESTION}]
    options = {"max_new_tokens": 8, "temperature": 1, "seed": 1}
    request = {"id": 1, "messages": messages, **options}
    with start(
        model, "--serve", verb="generate", env=os.environ | VARIABLES, stdin=subprocess.PIPE
    ) as server:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answers = []
        while not answers or not {"end", "error"} & answers[-1].keys():
            answers.append(json.loads(server.stdout.readline()))
        server.stdin.close()
    assert answers[0]["ready"]["device"] == "cuda"
    text = "".join(answer.get("token", "") for answer in answers)
    assert text.strip() == generate_on("cpu", model)


@pytest.mark.soak
def test_offloading_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    args = (*layout_of("ddp").args, "parallel.cpu_offload=all")
    stderr = train_on("cuda", folder, *args, expect=2)
    assert "`parallel.cpu_offload: all` is not supported with `parallel.mode: ddp`" in stderr
    assert not folder.exists()


def train_device_task(folder: Path, task_args: dict[str, object], *args: str, expect: int) -> str:
    return run_on(
        "cuda", f"task={device_task.__file__}:DeviceTask", "model=small", "dataset=none",
        f"task_args={json.dumps(task_args)}", "parallel.mode=ddp", "parallel.num_gpus=2",
        "per_device_train_batch_size=8", "precision=32", f"output_dir={folder}", *args,
        expect=expect,
    ).stderr  # fmt: skip


def test_tensor_on_a_wrong_device_fails_the_run(tmp_path: Path) -> None:
    stderr = train_device_task(tmp_path / "run", {"cpu_targets": True}, "max_steps=2", expect=1)
    assert "Expected all tensors to be on the same device" in stderr
    assert "Repeating the command would fail in the same way" in stderr


@pytest.mark.soak
def test_watchdog_reports_a_rank_that_hangs(tmp_path: Path) -> None:
    args = ("max_steps=10", "recovery.hang_warning_s=2")
    train_device_task(tmp_path / "run", {"sleep_s": 6}, *args, expect=0)
    (hang,) = events(tmp_path / "run", "hang")
    assert (hang["rank"], hang["phase"]) == (1, "forward")


@pytest.mark.soak
def test_profile_without_a_memory_snapshot(tmp_path: Path) -> None:
    """Only GPU builds of torch record allocations."""
    stderr = train_device_task(
        tmp_path / "run",
        {},
        "max_steps=3",
        "train_args.profile={start_step: 2, num_steps: 1}",
        expect=0,
    )
    assert "this build of torch records no memory snapshot" in stderr
    (event,) = events(tmp_path / "run", "profile")
    assert len(event["traces"]) == 2
    assert event["memory_snapshots"] == []


def test_doctor_on_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests must not plan with these measurements.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run_on(
        "cuda", "model=builtin:qwen2-micro", "dataset=builtin:python-docs#50", "--ranks=2",
        "--json", f"output_dir={tmp_path / 'run'}", verb="doctor",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["ok"]
    assert {check["name"] for check in result["checks"]} > {"packages", "memory"}
    assert [(link["from"], link["to"], link["intact"]) for link in result["links"]]
