"""Measure what `topk` gains from error feedback and from sending signed values.

Trains a built-in model on two CPU ranks four times with the same initial weights: with `ddp`, with
`topk`, with `topk` that discards the residual, and with `topk` that sends magnitudes. Prints the
training loss of the last steps and the loss on held-out samples.

    python benchmarks/error_feedback.py [--steps 200] [--ratio 0.01] [--optim adamw] [--rate 1e-3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.parallel.capabilities import Capabilities
from paceline.parallel.spec import StrategySpec
from paceline.strategies.ddp.strategy import DDPStrategy
from paceline.strategies.reducers.compression.sparsify import TopK


class TopKWithoutFeedback(TopK):
    """A top-k compressor that discards the elements that it does not send."""

    def reduce(self, flat: Any, state: Any, group: Any, step: int) -> None:
        super().reduce(flat, state, group, step)
        state.flats["residual"].zero_()


class _MagnitudeCodec:
    """A wrapper of a codec (`strategies/reducers/compression/codecs.py`) that drops the signs."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.decode = codec.decode

    def encode(self, rows: Any, generator: Any) -> Any:
        return self.codec.encode(rows.abs(), generator)


class TopKMagnitudes(TopK):
    """A top-k compressor with error feedback that sends magnitudes instead of signed values."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.codec = _MagnitudeCodec(self.codec)  # type: ignore[assignment]

    def _keep(self, state: Any, chosen: Any, rest: Any) -> None:
        super()._keep(state, chosen, None)


class _CustomCompressorStrategy(DDPStrategy):
    """DDP with the class ``compressor`` in place of the configured compressor."""

    compressor: type[TopK]

    def setup(self, model: Any) -> Any:
        model = super().setup(model)
        original: Any = self.reducer.compressor  # type: ignore[union-attr]
        self.reducer.compressor = self.compressor(
            original.settings, self.config.train_args.seed, original.momentum
        )  # type: ignore[union-attr]
        return model


class NoFeedback(_CustomCompressorStrategy):
    compressor = TopKWithoutFeedback


class NoSigns(_CustomCompressorStrategy):
    compressor = TopKMagnitudes


_CAPABILITIES = Capabilities(reduces_in_buckets=True)
NO_FEEDBACK = StrategySpec("no-feedback", "error_feedback:NoFeedback", capabilities=_CAPABILITIES)
NO_SIGNS = StrategySpec("no-signs", "error_feedback:NoSigns", capabilities=_CAPABILITIES)

VARIANTS = {
    "ddp without compression": ["parallel.mode=ddp"],
    "topk": ["parallel.mode=ddp", "compression.method=topk"],
    "topk without error feedback": [
        "parallel.mode=error_feedback:NO_FEEDBACK",
        "compression.method=topk",
    ],
    "topk with magnitudes": ["parallel.mode=error_feedback:NO_SIGNS", "compression.method=topk"],
}


def measure(overrides: list[str], options: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Train once, and return the mean training loss over the last tenth of the steps and the loss
    on held-out samples."""
    common_overrides = [
        "model=builtin:qwen2-micro", "dataset=builtin:python-docs#800", "split_dataset_ratio=0.1",
        "max_length=128", "per_device_train_batch_size=4", "parallel.device=cpu",
        "parallel.num_gpus=2", f"max_steps={options.steps}", "eval_strategy=steps",
        f"eval_steps={options.steps}", f"optim={options.optim}", f"learning_rate={options.rate}",
        f"output_dir={folder}", f"compression.ratio={options.ratio}", "logging_steps=1",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-m", "paceline", "sft", *common_overrides, *overrides],
        env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    losses = [event["loss"] for event in events if event["type"] == "step"]
    return (
        fmean(losses[-len(losses) // 10 :]),
        json.loads((folder / "report.json").read_text())["final_eval_loss"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument(
        "--ratio", type=float, default=0.01, help="share of the elements to send (default 0.01)"
    )
    parser.add_argument("--optim", default="adamw", help="optimizer (default adamw)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (default 1e-3)")
    options = parser.parse_args()
    print(f"{'':30}{'training loss':>15}{'held-out loss':>15}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, overrides) in enumerate(VARIANTS.items()):
            train_loss, eval_loss = measure(overrides, options, Path(folder) / str(number))
            print(f"{name:30}{train_loss:15.3f}{eval_loss:15.3f}", flush=True)


if __name__ == "__main__":
    main()
