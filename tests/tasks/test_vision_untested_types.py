"""Vision-language models of types that are not tested: they are compared with transformers on their
first rows with images, and train with a notice or end with an error."""

from pathlib import Path
from typing import Any

import pytest
from raised import raises_error
from vision_checks import prepare, write_chats
from vision_models import make_untested

from paceline.core.errors import ConfigError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data"))


def test_trains_with_a_notice(data: Path, tmp_path: Path) -> None:
    task = prepare(make_untested(tmp_path / "vipllava", "vipllava"), data)
    model = task.build_model()
    notices = task.setup(model)
    (notice,) = (text for level, text in notices if text.code == "vision-language-type-untested")
    assert "loss of the first rows with images equal" in notice
    assert "language model: model.language_model, lm_head" in notice
    batch = task.collate([task.build_datasets()[0][0]])
    task.loss(model, batch).backward()


def test_another_loss_of_the_model_is_an_error(data: Path, tmp_path: Path) -> None:
    """VipLlava with a loss that is weighted by the images' tokens, as a model's own code may be."""
    task = prepare(make_untested(tmp_path / "vipllava", "vipllava"), data)
    model: Any = task.build_model()
    own_loss = model.loss_function
    model.loss_function = lambda *args, **keys: 2 * own_loss(*args, **keys)
    with raises_error(ConfigError, code="vision-language-type-differs", naming="own loss"):
        task.setup(model)


@pytest.mark.parametrize(
    ("family", "processor"),
    [("idefics2", "Idefics2Processor"), ("paligemma", "PaliGemmaProcessor")],
)
def test_other_tokens_of_the_processor_are_an_error(
    family: str, processor: str, data: Path, tmp_path: Path
) -> None:
    """Idefics2's processor also writes spaces after images, PaliGemma's puts all images first."""
    folder = make_untested(tmp_path / family, family)
    with raises_error(ConfigError, code="processor-differs", naming=processor):
        prepare(folder, data)
