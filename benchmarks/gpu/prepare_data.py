"""Write the model and the data of the small configs, and the rows of the speed runs.

`prepare.py` runs it with the cache in the prepared folder.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from prepare import LONG_ROW_TURNS, NUM_LONG_ROWS, NUM_SAMPLES
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.data.sources.builtin import builtin_dataset
from paceline.models.builtin import resolve_model

#: Layers of the small model: two stages on each of two pipeline ranks.
NUM_LAYERS = 4


def main() -> None:
    folder = Path(sys.argv[1])
    built_in = Path(resolve_model("builtin:qwen2-micro"))
    tokenizer = folder / "models" / "tokenizer"
    shutil.copytree(
        built_in, tokenizer, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    small = folder / "models" / "small"
    shutil.copytree(tokenizer, small)
    config = AutoConfig.from_pretrained(built_in)
    config.num_hidden_layers = NUM_LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * NUM_LAYERS
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(small)

    lines = builtin_dataset("python-docs").read_text(encoding="utf-8").splitlines()
    data = folder / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text("\n".join(lines[:NUM_SAMPLES]) + "\n", encoding="utf-8")
    chats = [json.loads(line)["messages"] for line in lines]
    with open(data / "long-rows.jsonl", "w", encoding="utf-8") as file:
        for number in range(NUM_LONG_ROWS):
            turns = [
                chats[(number * LONG_ROW_TURNS + turn) % len(chats)]
                for turn in range(LONG_ROW_TURNS)
            ]
            messages = [message for chat in turns for message in chat]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    cache = folder / "cache" / "paceline"
    for name in ("builtin", "models", "checks", "simulation"):
        shutil.rmtree(cache / name, ignore_errors=True)


if __name__ == "__main__":
    main()
