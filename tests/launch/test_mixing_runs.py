"""Runs with mixed sources and packed rows: the losses do not depend on the strategy, and a resumed
run ends with the same bits."""

import json
from pathlib import Path

import pytest
from commands import events, report, run

#: Name → the settings of a run.
RUNS = {
    "weights": ("mixing=weights", "stopping_strategy=all_exhausted"),
    "temperature": ("mixing=temperature", "packing_strategy=bfd"),
    "mixed-wrapped": ("mixing=weights", "task=pretrain", "packing_strategy=wrapped"),
    "bfd": ("packing_strategy=bfd",),
    "wrapped": ("packing_strategy=wrapped", "task=pretrain"),
    "bfd-noise": ("packing_strategy=bfd", "neftune_noise_alpha=5"),
    "wrapped-noise": ("packing_strategy=wrapped", "task=pretrain", "neftune_noise_alpha=5"),
}
#: Strategy → its arguments; the global batch is the same.
MODES = {
    "single": ("parallel.num_gpus=1", "gradient_accumulation_steps=2"),
    "ddp": ("parallel.num_gpus=2", "parallel.mode=ddp"),
    "zero3": ("parallel.num_gpus=2", "parallel.mode=zero3"),
}


def write_sources(folder: Path, weights: bool) -> str:
    """Write sources of different sizes; return the argument that names them."""
    sources = []
    for name, rows, weight in (("a", 30, 0.5), ("b", 60, {0: 0.4, 4: 0.1}), ("c", 90, 0.1)):
        texts = [f"{name} {row} " + "words of a text " * (1 + row % 7) for row in range(rows)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"path": str(path)} | ({"weight": weight} if weights else {}))
    return f"dataset={json.dumps(sources)}"


def train(folder: Path, settings: tuple[str, ...], *args: str) -> None:
    data = write_sources(folder.parent, "mixing=weights" in settings)
    run(
        "model=builtin:qwen2-micro", data, "parallel.device=cpu", f"output_dir={folder}",
        "per_device_train_batch_size=4", "max_length=64", "lr_scheduler_type=constant",
        *settings, *args,
    )  # fmt: skip


def digest(folder: Path, step: int) -> str:
    path = str(folder / "checkpoints" / f"step-{step:08}")
    return json.loads(run(path, "--json", verb="inspect").stdout)["digest"]


def figures(folder: Path) -> list[dict]:
    return [
        {key: event.get(key) for key in ("loss", "tokens", "samples", "fill", "sources")}
        for event in events(folder, "step")
    ]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_do_not_depend_on_the_strategy(tmp_path: Path, name: str) -> None:
    settings = RUNS[name]
    for mode, args in MODES.items():
        train(tmp_path / mode, settings, *args, "max_steps=6")
    reference = figures(tmp_path / "single")
    for mode in ("ddp", "zero3"):
        for step, expected in zip(figures(tmp_path / mode), reference, strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            for key in ("tokens", "samples", "fill"):
                assert step[key] == expected[key]
            for source, other in zip(step["sources"], expected["sources"], strict=True):
                if other["loss"] is None:  # no sample of the source in these steps
                    assert source["loss"] is None
                else:
                    assert source["loss"] == pytest.approx(other["loss"], rel=1e-5)
                assert (source["samples"], source["tokens"]) == (other["samples"], other["tokens"])
    for step in reference:
        assert sum(source["tokens"] for source in step["sources"]) == step["tokens"]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    settings = RUNS[name]
    train(tmp_path / "undisturbed", settings, "max_steps=8", *MODES["single"])
    train(tmp_path / "resumed", settings, "max_steps=3", *MODES["single"])
    train(
        tmp_path / "resumed", settings, "max_steps=8", "--allow-config-change", *MODES["single"],
        "dataloader_num_workers=1",
    )  # fmt: skip
    assert digest(tmp_path / "resumed", 8) == digest(tmp_path / "undisturbed", 8)
    keys = ("samples_seen", "train_tokens", "label_tokens", "packing")
    expected, resumed = report(tmp_path / "undisturbed"), report(tmp_path / "resumed")
    assert [expected.get(key) for key in keys] == [resumed.get(key) for key in keys]


@pytest.mark.slow
def test_weight_without_mixing_is_refused(tmp_path: Path) -> None:
    data = write_sources(tmp_path, weights=True)
    args = ("model=builtin:qwen2-micro", data, f"output_dir={tmp_path / 'run'}", "--dry-run")
    error = run(*args, expect=2).stderr
    assert "mixing: weights" in error
    assert not (tmp_path / "run").exists()
