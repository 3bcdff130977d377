"""Test the memory settings that are chosen for a run whose layout is known."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run
from planner.test_plan import write_model_config
from planner.test_search import machine, trials
from raised import raises_error

from paceline.config.load import load_config
from paceline.core.errors import ConfigError
from paceline.parallel.registry import layout
from paceline.planner.api import make_plan
from paceline.planner.estimate import USABLE
from paceline.planner.search.fit import KeptSettings, check_fits, fit_memory
from paceline.planner.search.space import open_space
from paceline.planner.search.trials import Trials, with_settings

SIZE = "train_args.per_device_train_batch_size"
ACCUMULATION = "train_args.gradient_accumulation_steps"
RECOMPUTATION = "train_args.gradient_checkpointing"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of 0.3 billion parameters."""
    return write_model_config(tmp_path, layers=6)


def everything(tried: Trials, mode: str) -> dict[tuple[Any, ...], float]:
    """Return the samples per second of all combinations that fit, by their settings."""
    space, chosen = open_space(tried), layout(tried.config.parallel, 4, mode)
    result = {}
    for saving in space.savings():
        for batch in space.batches(chosen.axes.replicas):
            estimated = tried.estimate(chosen, {**saving.settings, **batch})
            if estimated.cost is not None and estimated.fits:
                result[tuple({**saving.settings, **batch}.items())] = estimated.per_second
    return result


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero3", "tensor", "pipeline"])
def test_chosen_settings_are_the_fastest_that_fit(model: str, mode: str) -> None:
    roomy = trials(model, machine(4, 80), parallel={"mode": mode})
    where = layout(roomy.config.parallel, 4)
    default = fit_memory(roomy, where)
    assert default is not None
    assert default.settings == {}
    tight = roomy.on(machine(4, 0.8 * default.mode.total / USABLE / 1e9))
    fitted = fit_memory(tight, where)
    assert fitted is not None
    assert fitted.settings
    assert fitted.mode.fits
    assert not fitted.default.fits
    assert fitted.mode.per_second >= 0.98 * max(everything(tight, mode).values())
    assert fitted.mode.global_batch_size == default.mode.global_batch_size
    # Kept settings come first if they fit.
    kept = KeptSettings({SIZE: 1, ACCUMULATION: 4, RECOMPUTATION: "full"})
    again = fit_memory(tight, where, kept=kept)
    assert again is not None
    assert again.mode.fits == (again.settings == kept.settings)


def test_what_is_set_does_not_change(model: str) -> None:
    args = {"per_device_train_batch_size": 4, "gradient_checkpointing": "none"}
    tried = trials(model, machine(4, 3), parallel={"mode": "ddp"}, train_args=args)
    fitted = fit_memory(tried, layout(tried.config.parallel, 4))
    assert fitted is not None
    assert not fitted.settings.keys() & {SIZE, ACCUMULATION, RECOMPUTATION}
    set_offload = {"mode": "ddp", "cpu_offload": "none"}
    tried = trials(model, machine(4, 3), parallel=set_offload, train_args=args)
    fitted = fit_memory(tried, layout(tried.config.parallel, 4))
    assert fitted is not None
    assert fitted.settings == {}


def test_open_sizes_may_become_larger(model: str) -> None:
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "auto_find_batch_size": True,
    }
    tried = trials(model, machine(4, 80), parallel={"mode": "ddp"}, train_args=args)
    fitted = fit_memory(tried, layout(tried.config.parallel, 4))
    assert fitted is not None
    assert int(fitted.settings[SIZE]) > 2
    assert int(fitted.settings[SIZE]) * int(fitted.settings.get(ACCUMULATION, 8)) == 16


def test_refused_above_110_percent_and_warned_above_90(model: str) -> None:
    args = {"per_device_train_batch_size": 4, "gradient_checkpointing": "none"}
    parallel = {"mode": "ddp", "cpu_offload": "none"}
    roomy = trials(model, machine(4, 80), parallel=parallel, train_args=args)
    where = layout(roomy.config.parallel, 4)
    total = roomy.estimate(where, {}).total
    for share, expected in ((0.89, "fits"), (0.95, "warned"), (1.09, "warned"), (1.11, "refused")):
        size = total / share
        tried = roomy.on(machine(4, size / 1e9))
        fitted = fit_memory(tried, where)
        assert fitted is not None
        if expected == "refused":
            with raises_error(ConfigError, code="run-does-not-fit") as error:
                check_fits(fitted, tried, round(size), "A100-40GB")
            assert "set `" in str(error.value)
            continue
        warning = check_fits(fitted, tried, round(size), "A100-40GB")
        assert (warning is not None) == (expected == "warned")


def test_memory_of_other_processes_is_not_used(model: str) -> None:
    tried = trials(model, machine(4, 80), parallel={"mode": "ddp"})
    where = layout(tried.config.parallel, 4)
    total = tried.estimate(where, {}).total
    occupied = tried.on(tried.machine.with_budget(total))
    fitted = fit_memory(occupied, where)
    assert fitted is not None
    assert fitted.settings
    assert fitted.mode.fits


def test_host_memory_limits_offloading(model: str) -> None:
    tried = trials(model, machine(4, 2.5), parallel={"mode": "ddp"})
    where = layout(tried.config.parallel, 4)
    free = fit_memory(tried, where)
    limited = fit_memory(tried, where, host_memory_bytes=1)
    assert free is not None
    assert limited is not None
    assert free.settings.get("parallel.cpu_offload") is not None
    assert limited.settings.get("parallel.cpu_offload") is None


def test_plan_has_what_the_run_does(model: str) -> None:
    keys = {"model": model, "dataset": "none", "parallel": {"mode": "ddp", "num_gpus": 4}}
    config = load_config(None, keys).config
    default = make_plan(config, 4, "80GB", "A100-80GB")
    report = default.as_dict()
    assert report["run"]["mode"] == "ddp"
    assert report["run"]["settings"] == {}
    memory = round(0.9 * default.as_dict()["run"]["memory_bytes"]["total"])  # type: ignore[index]
    plan = make_plan(config, 4, memory, "A100-80GB")
    report = plan.as_dict()
    chosen, configured = report["run"], next(m for m in report["modes"] if m["mode"] == "ddp")
    assert chosen["fits"]
    assert chosen["settings"]
    assert not configured["fits"]  # the table keeps the settings of the config
    changed = with_settings(plan.config, chosen["settings"])
    fixed = make_plan(changed, 4, memory, "A100-80GB").as_dict()
    assert (
        next(m for m in fixed["modes"] if m["mode"] == "ddp")["memory_bytes"]
        == chosen["memory_bytes"]
    )


def test_file_of_the_project_fits_on_four_a10(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(
        "model: qwen/Qwen-7B\ndataset: alpaca-en\n"
        "parallel: {mode: ddp, num_gpus: 4}\nlora: {enable: true, rank: 64}\n"
    )
    for device in (["--device", "A10"], ["--device-memory", "12GB", "lora.quantize=nf4"]):
        planned = run(str(file), *device, "--world-size", "4", "--json", verb="plan")
        estimate = json.loads(planned.stdout)["run"]
        assert estimate["mode"] == "ddp"
        assert estimate["fits"]
        limit = 21.6e9 if device[0] == "--device" else 10.8e9
        assert estimate["memory_bytes"]["total"] <= limit
        assert not estimate["settings"].keys() & {"parallel.mode", "lora.enable", "lora.rank"}
