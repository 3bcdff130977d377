"""The config of a run with a parameter server, for its tests."""

from paceline.config.schema import Config


def make_config(mode, optimizer, servers, consistency="sync", dense="auto"):
    train_optimizer = {"adagrad": "adagrad", "sgd": "sgd"}.get(optimizer, "adamw")
    return Config(
        model="m",
        dataset="d",
        task="recommend",
        parallel={"mode": mode, "bucket_cap_mb": 0.001},
        parameter_server={
            "num_servers": servers,
            "optimizer": optimizer,
            "consistency": consistency,
            "max_staleness": 2,
            "dense_placement": dense,
        },
        train_args={"optim": train_optimizer, "momentum": 0.0, "gradient_accumulation_steps": 2},
    )
