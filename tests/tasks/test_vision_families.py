"""Each tested family of vision-language models, with its processor: tokens, pixels, loss and
gradients, and the parts that are trained."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchvision_server import TorchvisionServer
from vision_checks import (
    check_batch_and_loss,
    check_images_that_attend_both_ways,
    check_packed_rows,
    check_parts,
)
from vision_models import TINY

from paceline.models.vision.types import TESTED_TYPES

Check = Callable[..., None]


@pytest.fixture(scope="module")
def server() -> Iterator[TorchvisionServer]:
    server = TorchvisionServer()
    yield server
    server.stop()


def test_every_tested_type_has_a_tiny_model() -> None:
    assert set(TINY) == TESTED_TYPES


@pytest.mark.parametrize("check", [check_batch_and_loss, check_parts, check_packed_rows])
@pytest.mark.parametrize("family", TINY)
def test_family(family: str, check: Check, server: TorchvisionServer, tmp_path: Path) -> None:
    if TINY[family].needs_torchvision:
        server.call(check, family, tmp_path)
    else:
        check(family, tmp_path)


def test_images_that_attend_both_ways(server: TorchvisionServer, tmp_path: Path) -> None:
    server.call(check_images_that_attend_both_ways, tmp_path)
