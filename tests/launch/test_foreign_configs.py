"""Test that configs of ms-swift, LLaMA-Factory, axolotl and TRL train without changes to their
keys."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from commands import events, report, run

from paceline.config.load import load_config
from paceline.models.builtin import resolve_model

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "examples" / "configs-from-other-tools"
# For each tool, some keys that are mapped to other names and some that are ignored.
NOTICES = {
    "ms_swift_lora_sft": (
        ["tuner_type", "torch_dtype", "truncation_strategy"],
        ["padding_free", "freeze_vit", "model_author"],
    ),
    "llama_factory_lora_sft": (
        ["model_name_or_path", "cutoff_len", "val_size"],
        ["plot_loss", "preprocessing_num_workers"],
    ),
    "axolotl_lora": (
        ["base_model", "sequence_len", "micro_batch_size"],
        ["dataset_prepared_path", "loss_watchdog_threshold"],
    ),
    "trl_sft": (["use_peft", "dataset_name", "assistant_only_loss"], ["hub_model_id", "log_level"]),
}


def test_examples_cover_every_tool() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(NOTICES)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(NOTICES))
def test_config_of_other_tool_trains(tmp_path: Path, name: str) -> None:
    rows = [
        {"instruction": f"Add {n} and {n}.", "input": "", "output": f"It is {2 * n}."}
        for n in range(120)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    folder = tmp_path / "run"
    args = [
        f"model={resolve_model('builtin:qwen2-micro')}", f"dataset={tmp_path / 'rows.json'}",
        f"output_dir={folder}", "parallel.device=cpu", "max_steps=2", "dataloader_num_workers=0",
    ]  # fmt: skip
    config = CONFIGS / f"{name}.yaml"
    done = run(str(config), *args)
    result = report(folder)
    assert (result["status"], result["steps"], result["world_size"]) == ("done", 2, 2)
    assert result["data"]["read"] == 120
    assert (folder / "model" / "adapter_config.json").is_file()

    # Each key is reported exactly once; none is dropped silently.
    loaded = load_config(config, args)
    lines = done.stderr.splitlines()
    for _, text in loaded.notices:
        assert [line.removeprefix("warning: ") for line in lines].count(text) == 1, text
    mapped, ignored = NOTICES[name]
    notices = [text for _, text in loaded.notices]
    for key in (*mapped, *ignored):
        assert any(f"`{key}" in text for text in notices), f"{key} is not reported"
    native = yaml.safe_load((folder / "config.yaml").read_text())
    known = set(native) | set(native["train_args"]) | set(native["lora"])
    for key in yaml.safe_load(config.read_text()):
        assert key in known or any(f"`{key}" in text for text in notices), (
            f"{key} was dropped silently"
        )
    notices = Counter(event["text"] for event in events(folder, "notice"))
    assert all(count == 1 for count in notices.values()), notices
