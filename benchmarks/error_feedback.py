"""What `topk` needs to train well: the residual fed back, and the signs of what is sent.

Trains a built-in model on two CPU ranks four times from the same start: `ddp`, `topk`, `topk` that
forgets what it did not send, and `topk` that sends magnitudes. Prints the training loss of the last
steps and the loss on held-out samples.

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
from paceline.parallel.compression.sparsify import TopK
from paceline.parallel.ddp.strategy import DDPStrategy
from paceline.parallel.registry import StrategySpec


class WithoutResidual(TopK):
    """Drops what is not sent."""

    def reduce(self, flat: Any, state: Any, group: Any, step: int) -> None:
        super().reduce(flat, state, group, step)
        state.flats["residual"].zero_()


class _AbsoluteValues:
    """A :class:`paceline.parallel.compression.codecs.Codec` that drops the signs."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.decode = codec.decode

    def encode(self, rows: Any, generator: Any) -> Any:
        return self.codec.encode(rows.abs(), generator)


class Magnitudes(TopK):
    """Chooses as `topk` does, feeds the residual back, and sends magnitudes in place of signed
    values."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.codec = _AbsoluteValues(self.codec)  # type: ignore[assignment]

    def _keep(self, state: Any, chosen: Any, rest: Any) -> None:
        super()._keep(state, chosen, None)


class _Varied(DDPStrategy):
    compressor: type[TopK]

    def setup(self, model: Any) -> Any:
        model = super().setup(model)
        original: Any = self.reducer.compressor  # type: ignore[union-attr]
        self.reducer.compressor = self.compressor(
            original.settings, self.config.train_args.seed, original.momentum
        )  # type: ignore[union-attr]
        return model


class NoFeedback(_Varied):
    compressor = WithoutResidual


class NoSigns(_Varied):
    compressor = Magnitudes


_COMPRESSES = Capabilities(reduces_in_buckets=True)
NO_FEEDBACK = StrategySpec("no-feedback", "error_feedback:NoFeedback", capabilities=_COMPRESSES)
NO_SIGNS = StrategySpec("no-signs", "error_feedback:NoSigns", capabilities=_COMPRESSES)

VARIANTS = {
    "ddp, nothing compressed": ["parallel.mode=ddp"],
    "topk": ["parallel.mode=ddp", "compression.method=topk"],
    "topk without error feedback": [
        "parallel.mode=error_feedback:NO_FEEDBACK",
        "compression.method=topk",
    ],
    "topk with magnitudes": ["parallel.mode=error_feedback:NO_SIGNS", "compression.method=topk"],
}


def measure(overrides: list[str], options: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """(mean training loss of the last tenth of the steps, loss on held-out samples)."""
    fixed = [
        "model=builtin:qwen2-micro", "dataset=builtin:python-docs#800", "split_dataset_ratio=0.1",
        "max_length=128", "per_device_train_batch_size=4", "parallel.device=cpu",
        "parallel.num_gpus=2", f"max_steps={options.steps}", "eval_strategy=steps",
        f"eval_steps={options.steps}", f"optim={options.optim}", f"learning_rate={options.rate}",
        f"output_dir={folder}", f"compression.ratio={options.ratio}", "logging_steps=1",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-m", "paceline", "sft", *fixed, *overrides],
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    print(f"{'':30}{'training loss':>15}{'held-out loss':>15}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, overrides) in enumerate(VARIANTS.items()):
            training, held_out = measure(overrides, options, Path(folder) / str(number))
            print(f"{name:30}{training:15.3f}{held_out:15.3f}", flush=True)


if __name__ == "__main__":
    main()
