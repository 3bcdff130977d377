"""Train a Paceline config on a Ray cluster, through Ray Train::

    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from paceline.ray import TorchTrainer

    trainer = TorchTrainer(
        "config.yaml",
        overrides={"train_args.max_steps": 1000},
        scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    report = trainer.fit()

It needs the extra: ``pip install "paceline[ray]"``. `paceline ray` is the same as a command.
"""

from paceline.cluster.ray.driver import TorchTrainer

__all__ = ["TorchTrainer"]
