"""Print the digests of the final checkpoints of short training runs on CPU ranks in float32.

    python benchmarks/digests.py > before.json
    python benchmarks/digests.py --compare before.json --only 'mode/zero*,task/*'

The runs cover every mode with all weights and with LoRA, every compression method, every algorithm
of `all_reduce_algorithm`, the consistencies of the parameter server, and each task, optimizer and
packing strategy at least once. A change that should not change numerics leaves all digests as they
are. Digests depend on the versions of torch, transformers and Python (the built-in model and its
tokenizer are made from Python's own documentation), so compare runs of one environment only.

Each run is `paceline sft` in a process of its own, with random weights and generated rows. With
`--compare`, the exit code is 1 if a digest differs, or if the file has a run that is missing here.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 600.0
VOCABULARY = ("alpha", "beta", "gamma", "delta", "red", "green", "blue", "tree")
NUM_ROWS = 48
#: Settings of all runs. Those that Paceline would choose for the machine are set, so that the
#: digests do not depend on it.
BASE = (
    "model=builtin:qwen2-micro",
    "dataset={data}/chats.jsonl",
    "parallel.device=cpu",
    "parallel.num_gpus=2",
    "parallel.mode=ddp",
    "local_sgd.sync_every=2",
    "compression.ratio=0.1",
    "compression.rank=2",
    "train_args.precision=32",
    "train_args.gradient_checkpointing=none",
    "train_args.per_device_train_batch_size=2",
    "train_args.gradient_accumulation_steps=2",
    "train_args.max_length=64",
    "train_args.learning_rate=1e-2",
    "train_args.weight_decay=0.01",
    "train_args.max_steps=4",
    "train_args.seed=7",
)
CLICKS = (
    "task=recommend",
    "model=builtin:dlrm",
    "dataset=builtin:clicks#512",
    "recommend.embedding_dim=4",
    "recommend.table_size=500",
    "train_args.weight_decay=0",
)
ROLLOUTS = (
    "dataset={data}/prompts.jsonl",
    "rewards=[{{name: format, pattern: '.*e.*'}}]",
    "grpo.num_generations=4",
    "grpo.max_completion_length=8",
    "grpo.beta=0.1",
)
SERVER = (*CLICKS, "parallel.mode=parameter_server")
#: What a mode needs besides its name.
MODES = {
    "single": ("parallel.num_gpus=1",),
    "deepspeed": ("parallel.deepspeed_stage=2",),
    "hybrid": ("parallel.tensor=2", "parallel.pipeline=2", "parallel.num_gpus=4"),
}
#: With `dp`, the threads of the CPU share a random generator, so dropout is not deterministic.
WITH_LORA = {"dp": ("lora.dropout=0",)}
LORA = ("lora.enable=true", "lora.rank=4")
MESH = ("parallel.mode=hybrid", "parallel.data=2", "parallel.tensor=2", "parallel.num_gpus=4")
#: Name → settings, besides the runs of every mode (`mode_runs`). Most optimizers are in runs that
#: have another purpose.
RUNS: dict[str, tuple[str, ...]] = {
    "mode/data2-tensor2": MESH,
    "mode/data2-tensor2-lora": (*MESH, *LORA),
    "mode/deepspeed-3": ("parallel.mode=deepspeed", "parallel.deepspeed_stage=3"),
    "mode/own": (f"parallel.mode={EXAMPLES}/my_strategy.py:SPEC",),
    "mode/parameter_server": SERVER,
    "mode/parameter_server-async": (
        *SERVER,
        "parallel.num_gpus=1",
        "parameter_server.consistency=async",
        "parameter_server.num_servers=2",
    ),
    "mode/parameter_server-bounded": (
        *SERVER,
        "parallel.num_gpus=1",
        "parameter_server.consistency=bounded",
        "parameter_server.optimizer=adam",
    ),
    "compression/bf16": ("compression.method=bf16",),
    "compression/fp16": ("compression.method=fp16",),
    "compression/int8": ("compression.method=int8",),
    "compression/topk": ("compression.method=topk",),
    "compression/randomk-sgd": ("compression.method=randomk", "train_args.optim=sgd"),
    "compression/powersgd": ("compression.method=powersgd",),
    "compression/signsgd": ("compression.method=signsgd",),
    "compression/topk-bf16": ("compression.method=[topk,bf16]", "compression.warmup_steps=2"),
    "all_reduce/ring-adam": ("parallel.all_reduce_algorithm=ring", "train_args.optim=adam"),
    "all_reduce/tree-rmsprop": ("parallel.all_reduce_algorithm=tree", "train_args.optim=rmsprop"),
    "all_reduce/halving-adagrad": (
        "parallel.all_reduce_algorithm=halving",
        "train_args.optim=adagrad",
    ),
    "all_reduce/naive-sgd": ("parallel.all_reduce_algorithm=naive", "train_args.optim=sgd"),
    "task/pretrain-wrapped-adamw_8bit": (
        "task=pretrain",
        "train_args.packing_strategy=wrapped",
        "train_args.optim=adamw_8bit",
    ),
    "task/dpo": ("task=dpo", "dataset={data}/pairs.jsonl"),
    "task/orpo-lion": (
        "task=orpo",
        "dataset={data}/pairs.jsonl",
        "train_args.optim=lion",
        "train_args.learning_rate=1e-3",
    ),
    "task/simpo-muon": ("task=simpo", "dataset={data}/pairs.jsonl", "train_args.optim=muon"),
    "task/kto-schedule_free_adamw": (
        "task=kto",
        "dataset={data}/marked.jsonl",
        "train_args.optim=schedule_free_adamw",
    ),
    "task/reward-adafactor": (
        "task=reward",
        "dataset={data}/pairs.jsonl",
        "train_args.optim=adafactor",
    ),
    "task/grpo": ("task=grpo", *ROLLOUTS, "grpo.num_iterations=2"),
    "task/rloo": ("task=rloo", *ROLLOUTS),
    "task/classify-text": ("task=classify", "dataset={data}/labels.jsonl"),
    "task/classify-images": (
        "task=classify",
        "model=builtin:small-cnn",
        "dataset=builtin:digits",
        "classify.hidden_size=16",
        "classify.augment=true",
    ),
    "task/recommend": CLICKS,
    "task/vision-language": (
        "model={data}/llava",
        "dataset={data}/images.jsonl",
        "train_args.max_length=128",
    ),
    "task/own": (
        f"task={EXAMPLES}/my_task.py:DampedWave",
        "dataset=made-by-the-task",
        "task_args.num_points=400",
        "task_args.frequency=2.0",
        "task_args.noise=0.05",
        "task_args.hidden=16",
    ),
    "data/bfd-adamw_torchao_8bit": (
        "train_args.packing_strategy=bfd",
        "train_args.optim=adamw_torchao_8bit",
    ),
    "data/padded": ("train_args.packing=false",),
    "data/stream-paged_adamw_8bit": ("streaming=true", "train_args.optim=paged_adamw_8bit"),
    "data/mixture": (
        "dataset=[{{path: {data}/chats.jsonl, weight: 2}}, {data}/more.jsonl]",
        "mixing=weights",
    ),
    "model/first-generation-qwen": ("model={data}/qwen", "parallel.mode=zero3"),
}


def mode_runs() -> dict[str, tuple[str, ...]]:
    """Return the runs of the modes in the registry, except `parameter_server`, which trains neither
    language models nor LoRA."""
    from paceline.parallel.registry import STRATEGIES

    runs = {}
    for mode in STRATEGIES.keys() - {"parameter_server"}:
        settings = (f"parallel.mode={mode}", *MODES.get(mode, ()))
        runs[f"mode/{mode}"] = settings
        runs[f"mode/{mode}-lora"] = (*settings, *LORA, *WITH_LORA.get(mode, ()))
    return runs


def main() -> int:
    args = _arguments()
    runs = dict(sorted((mode_runs() | RUNS).items()))
    patterns = args.only.split(",")
    selected = {
        name: settings
        for name, settings in runs.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
    }
    if not selected:
        print(f"--only {args.only}: none of {', '.join(runs)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="paceline-digests-") as scratch:
        folder = Path(scratch)
        environment = _make_environment(folder)
        _write_data(folder, environment)
        digests, problems = run_all(folder, selected, environment, args.rounds)
    if args.compare:
        expected = json.loads(args.compare.read_text(encoding="utf-8"))
        missing_matters = args.only == "*"
        problems += compare(expected.get("digests", expected), digests, missing_matters)
    print(json.dumps(digests, indent=2))
    if args.output:
        _write_result(args.output, digests)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def compare(expected: dict[str, str], digests: dict[str, str], missing_matters: bool) -> list[str]:
    """Return the differences as text. Runs that only ``digests`` has are new, which is none."""
    problems = [
        f"{name}: expected {expected[name]}, got {digest}"
        for name, digest in digests.items()
        if digest != expected.get(name, digest)
    ]
    if missing_matters:
        problems += [f"{name}: this run is missing" for name in expected.keys() - digests.keys()]
    return problems


def run_all(
    folder: Path, runs: dict[str, tuple[str, ...]], environment: dict[str, str], rounds: int
) -> tuple[dict[str, str], list[str]]:
    """Return the digest of each run, and as text which runs failed or differ between rounds."""
    digests, problems = {}, []
    for name, settings in runs.items():
        started_at = time.monotonic()
        try:
            repeated = {_train(folder, settings, environment) for _ in range(rounds)}
        except RunFailed as error:
            problems.append(f"{name}: {error}")
            print(problems[-1], file=sys.stderr)
            continue
        digests[name] = repeated.pop()
        if repeated:
            problems.append(f"{name}: not deterministic: {digests[name]}, {', '.join(repeated)}")
        seconds = (time.monotonic() - started_at) / rounds
        print(f"{name}: {digests[name]} ({seconds:.1f} s)", file=sys.stderr)
    return digests, problems


class RunFailed(Exception):
    """A run ended with another exit code than 0."""


def _train(folder: Path, settings: tuple[str, ...], environment: dict[str, str]) -> str:
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    merged = dict(setting.split("=", 1) for setting in (*BASE, *settings))
    options = [f"{key}={value.format(data=folder)}" for key, value in merged.items()]
    _paceline(["sft", *options, f"output_dir={output}", "--quiet"], environment)
    return str(json.loads(_paceline(["inspect", str(output), "--json"], environment))["digest"])


def _paceline(arguments: list[str], environment: dict[str, str]) -> str:
    """Run a command and return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RunFailed(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _make_environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the order of sums depends on the number of threads
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONHASHSEED": "0",
    }


def _write_data(folder: Path, environment: dict[str, str]) -> None:
    """Write the rows, and the models that are not built in."""
    numbers = random.Random(0)

    def phrase() -> str:
        return " ".join(numbers.choices(VOCABULARY, k=numbers.randint(2, 12)))

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def chat(question: str) -> dict[str, Any]:
        answer = {"role": "assistant", "content": phrase()}
        return {"messages": [{"role": "user", "content": question}, answer]}

    indices = range(NUM_ROWS)
    write("chats", [chat(phrase()) for _ in indices])
    write("more", [{"instruction": phrase(), "output": phrase()} for _ in indices])
    write(
        "pairs", [{"prompt": phrase(), "chosen": phrase(), "rejected": phrase()} for _ in indices]
    )
    write(
        "marked",
        [{"prompt": phrase(), "completion": phrase(), "label": row % 3 > 0} for row in indices],
    )
    write("labels", [{"text": phrase(), "label": VOCABULARY[row % 3]} for row in indices])
    write("images", [chat(f"<image>{phrase()}") | {"images": [f"{row}.png"]} for row in indices])
    write("prompts", [{"prompt": phrase()} for _ in indices])
    _write_images(folder)
    _write_models(folder, environment)


def _write_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    for row in range(NUM_ROWS):
        pixels = np.random.default_rng(row).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")


def _write_models(folder: Path, environment: dict[str, str]) -> None:
    """Write a vision-language model and a first-generation Qwen with random weights, with helpers
    of the tests. A process of its own has the cache of the runs, for the built-in tokenizer."""
    code = (
        "import sys; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "from vision_models import make_model; make_model(folder / 'llava', 'llava')\n"
        "from original_qwen import write_checkpoint\n"
        "write_checkpoint(folder / 'qwen', (folder / 'chats.jsonl').read_text())\n"
    )
    paths = [str(TESTS), str(TESTS / "models"), *filter(None, [environment.get("PYTHONPATH")])]
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=sys.stderr,
        check=True,
    )


def _write_result(path: Path, digests: dict[str, str]) -> None:
    """Write the digests with the versions. An existing file keeps its other runs if its machine and
    versions are the same."""
    from run import describe_machine

    machine = describe_machine()
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["machine"] == machine:
            digests = dict(sorted({**before["digests"], **digests}.items()))
    result = {"date": str(date.today()), "machine": machine, "digests": digests}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="run these: patterns with * and ?, and commas")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="compare with a file of this script"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="repeat each run, whose digests must be equal"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the digests with all versions, or update a file",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
