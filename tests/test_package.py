"""The package ``paceline``: what importing it offers."""

import importlib
import pickle

import cloudpickle

import paceline


def test_train_stays_the_function_after_its_package_is_imported() -> None:
    importlib.import_module("paceline.train.trainer")
    assert callable(paceline.train)


def test_functions_that_use_the_package_can_be_sent_to_another_process() -> None:
    """Ray serializes a training function and its globals with cloudpickle."""

    def train() -> object:
        return paceline.train

    assert pickle.loads(cloudpickle.dumps(train))() is paceline.train
