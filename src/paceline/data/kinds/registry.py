"""The names of the kinds of samples."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.user_code import import_user_module
from paceline.data.cache import fingerprint

if TYPE_CHECKING:
    from paceline.data.kinds.base import SampleKind

#: The name of each kind, and its class: `module:class`, in this folder.
KINDS = {
    "sft": "chat:ChatKind",
    "pretrain": "document:DocumentKind",
    "classify": "label:LabelKind",
    "pairs": "pair:PairKind",
    "answers": "pair:AnswerKind",
    "reward": "pair:MarginKind",
    "vision": "image:ImageKind",
    "prompts": "prompt:PromptKind",
}
_FORM = "./file.py:Class or package.module:Class"


def load_kind(name: str) -> type[SampleKind]:
    """Return a class: of a kind with a name, or of a user's own (`./file.py:Class` or
    `package.module:Class`).

    Raises:
        ConfigError: there is no such class.
    """
    from paceline.data.kinds.base import SampleKind

    module, _, attribute = KINDS.get(name, name).partition(":")
    if name in KINDS:
        kind = getattr(import_module(f"paceline.data.kinds.{module}"), attribute)
    elif attribute:
        kind = getattr(import_user_module(module, name, _FORM), attribute, None)
    else:
        kind = None
    if not (inspect.isclass(kind) and issubclass(kind, SampleKind)):
        raise ConfigError(
            "`{name}` is not a kind of samples",
            code="unknown-kind",
            allowed="{kinds}, or {form}",
            name=name,
            kinds=", ".join(KINDS),
            form=_FORM,
        )
    return kind


def kind_key(name: str) -> list[object]:
    """Return what identifies a kind in the keys of the token cache: also the code of a user's
    own."""
    if name in KINDS:
        return [name]
    return [name, *fingerprint(Path(inspect.getfile(load_kind(name))))]
