"""Runs with quantized weights from the cache: each layer is quantized once per host, and a run ends
with the same bits whether its weights were quantized or read."""

import json
import os
import re
from pathlib import Path

import pytest
from commands import losses, run, train

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.soak]

ARGS = (
    "lora.enable=true",
    "lora.dropout=0",
    "train_args.learning_rate=1e-2",
    "max_steps=3",
)
LAYERS = {
    f"model.layers.{number}.{name}"
    for number in (0, 1)
    for name in (
        *(f"self_attn.{projection}_proj" for projection in "qkvo"),
        *(f"mlp.{projection}_proj" for projection in ("gate", "up", "down")),
    )
}


def quantized_layers(errors: str) -> list[str]:
    """Return the layers that the ranks of a run have quantized, with repetitions."""
    return re.findall(r"quantized weights: part \d+ of \d+: (\S+)", errors)


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cold_warm_and_no_cache_end_with_the_same_bits(
    form: str, num_ranks: int, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "PACELINE_LOG_LEVEL": "debug",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    args = [*ARGS, f"lora.quantize={form}", f"parallel.num_gpus={num_ranks}", "parallel.mode=ddp"]

    def train_once(name: str) -> str:
        return train(tmp_path / name, *args, env=environment).stderr

    cold = train_once("cold")
    assert sorted(quantized_layers(cold)) == sorted(LAYERS)
    assert " quantized in " in cold
    assert " and stored in " in cold
    warm = train_once("warm")
    assert quantized_layers(warm) == []
    assert "14 layers read from the cache" in warm

    folder = tmp_path / "cache" / "paceline" / "quantized"
    folder.rename(tmp_path / "quantized")
    folder.write_text("not a folder")
    assert "they cannot be stored in the cache" in train_once("without")
    digests = {digest_of(tmp_path / name) for name in ("cold", "warm", "without")}
    assert len(digests) == 1
    assert losses(tmp_path / "cold") == losses(tmp_path / "warm") == losses(tmp_path / "without")

    folder.unlink()
    (tmp_path / "quantized").rename(folder)
    answer = run(str(tmp_path / "cold"), "Sort a list.", verb="generate", env=environment)
    assert quantized_layers(answer.stderr) == []
    assert "14 layers read from the cache" in answer.stderr


def digest_of(folder: Path) -> str:
    path = str(folder / "checkpoints" / "step-00000003")
    digest: str = json.loads(run(path, "--json", verb="inspect").stdout)["digest"]
    return digest
