"""The base class and the shared field types of the schema's sections."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

Auto = Literal["auto"]


def _only_str(value: object) -> object:
    # YAML reads `model: 7` as a number, but it is a name.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_only_str)]


def split_names(text: str) -> list[str]:
    """Split text at its commas into non-empty names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _as_names(value: object) -> object:
    return split_names(value) if isinstance(value, str) else value


#: A list of names, which may also be written as comma-separated text.
Names = Annotated[list[Text], BeforeValidator(_as_names)]


class Section(BaseModel):
    """A section of the config. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=())
