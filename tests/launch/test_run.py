"""Test complete runs on the command line and through `paceline.train`."""

import json
import os
import subprocess
import sys

import pytest
from commands import MICRO, digest, events, losses, report, run, train

pytestmark = pytest.mark.slow

REPORT_KEYS = {
    "status", "strategy", "world_size", "device", "steps", "epochs", "samples_seen", "train_tokens",
    "label_tokens", "tokens_per_second", "time_to_first_step_s", "wall_s", "first_train_loss",
    "final_train_loss", "final_eval_loss", "peak_memory_bytes", "state_memory_bytes",
    "traffic_bytes_per_step", "restarts", "resumed_from_step", "data",
}  # fmt: skip

LORA = ("lora.enable=true", "lora.rank=4", "bf16=true")
FULL = (
    "split_dataset_ratio=0.1", "gradient_accumulation_steps=2", "max_steps=10",
    "learning_rate=3e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Run full fine-tuning on two ranks with validation, without dropout."""
    folder = tmp_path_factory.mktemp("full") / "run"
    return folder, train(folder, *FULL)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(
        folder,
        "lora.enable=true",
        "lora.rank=4",
        "max_steps=4",
        "learning_rate=1e-2",
        "bf16=true",
        "gradient_checkpointing=true",
    )
    return folder


def test_report_is_complete(full):
    folder, printed = full
    result = report(folder)
    assert set(result) >= REPORT_KEYS
    assert (result["task"], result["model"], result["adapter"]) == (
        *("sft", "builtin:qwen2-micro"),
        None,
    )
    assert result["dataset"] == ["builtin:python-docs#240"]
    assert "task        sft\n" in printed.stderr
    assert result["status"] == "done"
    assert result["strategy"] == "ddp"
    assert result["world_size"] == 2
    assert result["final_train_loss"] < result["first_train_loss"]
    unknown = [key for key in REPORT_KEYS - {"resumed_from_step"} if result[key] is None]
    assert unknown == []
    assert len(result["peak_memory_bytes"]) == 2
    for key in ("state_memory_bytes", "traffic_bytes_per_step"):
        assert result[key]["measured"] == pytest.approx(result[key]["predicted"], rel=0.02)
    assert result["samples_seen"] == 10 * 16
    assert result["data"] == {
        "read": 240,
        "kept": 240,
        "truncated": result["data"]["truncated"],
        "dropped": {},
    }


def test_startup_messages(full):
    _, done = full
    assert "2 ranks" in done.stderr
    assert "16 samples = 4 per micro-batch × 2 accumulation × 2 ranks" in done.stderr
    assert "216" in done.stderr or "240 read" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (4, 1)])
def test_loss_does_not_depend_on_world_size(full, tmp_path, ranks, accumulation):
    folder, _ = full
    args = [
        "split_dataset_ratio=0.1",
        f"gradient_accumulation_steps={accumulation}",
        "max_steps=10",
        "learning_rate=3e-3",
    ]
    train(tmp_path / "run", *args, f"parallel.num_gpus={ranks}")
    assert losses(tmp_path / "run") == pytest.approx(losses(folder), rel=1e-5)
    evaluation, reference = (events(run_dir, "eval")[-1] for run_dir in (tmp_path / "run", folder))
    assert evaluation["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert evaluation["count"] == reference["count"]


@pytest.mark.soak
def test_padding_and_packing_have_equal_losses(full, tmp_path):
    folder, _ = full
    train(tmp_path / "run", *FULL, "packing=false")
    assert losses(tmp_path / "run") == pytest.approx(losses(folder), rel=1e-4)


@pytest.mark.soak
def test_model_loads_in_transformers(full):
    folder, _ = full
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\nmodel,"
        " info = AutoModelForCausalLM.from_pretrained(sys.argv[1],"
        " output_loading_info=True)\nassert not info['missing_keys'] and not"
        " info['unexpected_keys'], info\ntokenizer = AutoTokenizer.from_pretrained(sys.argv[1]);"
        " assert tokenizer.chat_template\nassert not any(name.startswith('module.') for name in"
        " model.state_dict())\nassert 'paceline' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder / "model")], check=True)


@pytest.mark.soak
def test_adapter_loads_in_peft_and_merges(lora, tmp_path):
    assert report(lora)["adapter"] == "lora"
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM; from peft import"
        " AutoPeftModelForCausalLM\nadapted = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1],"
        " dtype=torch.float32).eval()\nmerged = AutoModelForCausalLM.from_pretrained(sys.argv[2],"
        " dtype=torch.float32).eval()\nids = torch.arange(3, 40).unsqueeze(0)\nwith"
        " torch.no_grad(): a, b = adapted(ids).logits, merged(ids).logits\nbase ="
        " adapted.unload()\nwith torch.no_grad(): c = base(ids).logits\nassert torch.allclose(a, b,"
        " atol=1e-4), (a - b).abs().max()\nassert not torch.allclose(a, c, atol=1e-4), 'the adapter"
        " changes nothing'\n"
    )
    merged = tmp_path / "merged"
    run(str(lora), "--merge", f"--output={merged}", "--dtype=float32", verb="export")
    subprocess.run([sys.executable, "-c", script, str(lora / "model"), str(merged)], check=True)


@pytest.mark.soak
def test_generate_prints_json(full):
    folder, _ = full
    output = run(
        str(folder), "What does json.dumps do?", "--json", "--max-new-tokens", "5", verb="generate"
    )
    assert set(json.loads(output.stdout)) == {"question", "answer"}
    assert output.stderr == ""  # no messages of packages that the run does not use


@pytest.mark.soak
def test_training_continues_from_adapter(lora, tmp_path):
    train(
        tmp_path / "run",
        "lora.enable=true",
        f"lora.adapter={lora / 'model'}",
        "max_steps=2",
        "bf16=true",
        "learning_rate=1e-3",
    )
    assert losses(tmp_path / "run")[0] < losses(lora)[0]


def test_finished_run_is_not_repeated(full):
    folder, _ = full
    before = (folder / "report.json").stat().st_mtime_ns
    done = train(folder, *FULL)
    assert "already finished" in done.stderr
    assert (folder / "report.json").stat().st_mtime_ns == before


@pytest.mark.soak
def test_changed_config_needs_allow_config_change(lora):
    args = (*LORA, "max_steps=6", "learning_rate=5e-3")
    rejected = train(lora, *args, expect=2)
    assert "train_args.learning_rate: 0.01 → 0.005" in rejected.stderr
    assert "--allow-config-change" in rejected.stderr
    allowed = train(lora, *args, "--allow-config-change")
    assert "resuming with config changes" in allowed.stderr
    assert report(lora)["resumed_from_step"] == 4
    assert report(lora)["steps"] == 6


@pytest.mark.soak
def test_run_under_torchrun(full, tmp_path):
    folder, _ = full
    args = [
        "split_dataset_ratio=0.1",
        "gradient_accumulation_steps=2",
        "max_steps=10",
        "learning_rate=3e-3",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "paceline",
        "sft",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *MICRO, f"output_dir={tmp_path / 'run'}", *args],
        check=True,
        env=env,
        capture_output=True,
        timeout=120,
    )
    assert report(tmp_path / "run")["world_size"] == 2
    assert losses(tmp_path / "run") == pytest.approx(losses(folder), rel=1e-6)
    assert digest(tmp_path / "run") == digest(folder)


SCRIPT = """
import json, os, pickle, signal, sys, threading
import paceline

config = {"model": "builtin:qwen2-micro", "dataset": "builtin:python-docs#64",
          "output_dir": sys.argv[1], "max_length": 64,
          "train_args": {"max_steps": 2}, "parallel": {"device": "cpu"}}
before = signal.getsignal(signal.SIGTERM)
if sys.argv[2] == "stop":  # only rank 1 receives the signal, but both ranks stop
    config["train_args"]["max_steps"] = 100000
    if os.environ["RANK"] == "1":
        threading.Timer(8.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    report = paceline.train(config)
    result = {key: report[key] for key in ("steps", "world_size")}
    result["loss"] = report["final_train_loss"]
except paceline.core.errors.PacelineError as error:
    copy = pickle.loads(pickle.dumps(error))
    result = {"kind": type(copy).__name__, "text": str(copy), "exit_code": copy.exit_code}
if sys.argv[2] == "done":  # another run in the same processes
    config.update(output_dir=sys.argv[1] + "-2", per_device_train_batch_size=1)
    second = paceline.train(config)
    result["second"] = {key: second[key] for key in ("steps", "samples_seen")}
result["handlers_restored"] = signal.getsignal(signal.SIGTERM) == before
with open(f"{sys.argv[3]}-{os.environ['RANK']}", "w") as handle:
    json.dump(result, handle)
"""


def run_script_on_two_ranks(folder, end):
    """Run SCRIPT under torchrun; return the result of each rank. ``end``: "done" or "stop"."""
    (folder / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "script.py",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "run", end, end],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"{end}-{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.soak
def test_train_returns_report_on_every_rank_under_torchrun(tmp_path):
    first, second = run_script_on_two_ranks(tmp_path, "done")
    assert first == second
    assert (first["steps"], first["world_size"], first["handlers_restored"]) == (2, 2, True)
    assert first["loss"] == report(tmp_path / "run")["final_train_loss"]
    # the second run does not use the batch size of the first
    assert first["second"] == {"steps": 2, "samples_seen": 4}


@pytest.mark.soak
def test_train_raises_stopped_error_on_every_rank_under_torchrun(tmp_path):
    for result in run_script_on_two_ranks(tmp_path, "stop"):
        assert (result["kind"], result["exit_code"], result["handlers_restored"]) == (
            "StoppedError",
            143,
            True,
        )
        assert "a checkpoint is in" in result["text"]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.soak
def test_json_prints_only_report_on_stdout(tmp_path):
    done = train(tmp_path / "run", "max_steps=2", "parallel.num_gpus=1", "--json")
    assert json.loads(done.stdout)["steps"] == 2
    assert report(tmp_path / "run")["strategy"] == "single"


@pytest.mark.soak
def test_float16_with_loss_scaling(tmp_path):
    train(
        tmp_path / "run", "max_steps=4", "fp16=true", "learning_rate=1e-3", "report_to=tensorboard"
    )
    result = losses(tmp_path / "run")
    assert result[-1] < result[0]
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


@pytest.mark.soak
def test_train_in_script_without_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import paceline\nprint('top level')\nreport = paceline.train({'model':"
        " 'builtin:qwen2-micro', 'dataset': 'builtin:python-docs#64', 'output_dir': 'run',\n       "
        "                  'parallel': {'device': 'cpu'}}, **{'train_args.max_steps': 2,"
        " 'max_length': 64})\nprint(report['steps'], report['world_size'], __file__)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["top", "level", "2", "2", str(script)]


@pytest.mark.soak
def test_shuffle_false_keeps_file_order(tmp_path):
    rows = [{"prompt": "Count:", "completion": " one" * (2 + 3 * number)} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [
        "model=builtin:qwen2-micro",
        f"dataset={tmp_path / 'rows.jsonl'}",
        "parallel.mode=single",
        "parallel.device=cpu",
    ]
    args += ["per_device_train_batch_size=1", "num_train_epochs=2", "dataloader_num_workers=2"]
    done = run(*args, "shuffle=false", f"output_dir={tmp_path / 'run'}")
    assert "Traceback" not in done.stderr
    tokens = [event["tokens"] for event in events(tmp_path / "run", "step")]
    assert len(tokens) == 12
    assert tokens[:6] == tokens[6:] == sorted(tokens[:6])
    assert len(set(tokens)) == 6


@pytest.mark.soak
def test_loader_workers_exit_without_errors(tmp_path):
    """The workers have prefetched batches that are not used, and evaluation has workers too."""
    done = train(
        tmp_path / "run", "max_steps=2", "dataloader_num_workers=2", "split_dataset_ratio=0.1"
    )
    assert "Traceback" not in done.stderr
    assert "DataLoader worker" not in done.stderr
