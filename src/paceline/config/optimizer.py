"""What an optimizer keeps. No torch here: the planner reads it too."""

from __future__ import annotations

from paceline.config.schema import TrainArgs


def optimizer_bytes_per_element(args: TrainArgs) -> int:
    """Bytes of float32 state an optimizer keeps for each trained element (Adafactor: its factored state counts as 0)."""
    return {"adamw": 8, "adam": 8, "sgd": 4 if args.momentum else 0, "rmsprop": 8 if args.momentum else 4, "adagrad": 4}.get(
        args.optim, 0
    )
