"""The base class and the shared field types of the schema's sections."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from paceline.core.texts import UserText

Auto = Literal["auto"]
#: What `report_to` may name.
Logger = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet_ml"]


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


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_patterns(patterns: list[str]) -> list[str]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                UserText(
                    "`{pattern}` is not a valid regular expression: {reason}",
                    code="invalid-regular-expression",
                    pattern=pattern,
                    reason=error,
                )
            ) from None
    return patterns


#: Regular expressions that are searched for in the names of parameters; one may be written without
#: a list.
Patterns = Annotated[list[Text], BeforeValidator(_as_list), AfterValidator(_check_patterns)]


class CombinationError(ValueError):
    """Keys that are not supported together. ``keys``: their dotted names."""

    def __init__(self, text: UserText, *keys: str) -> None:
        super().__init__(text)
        self.keys = keys


class Section(BaseModel):
    """A section of the config. Unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    def with_derived(self, values: Mapping[str, object]) -> Self:
        """Return a copy with values that Paceline determined. They do not count as set by the
        user, so that ``model_fields_set`` still has what the user set."""
        copy = self.model_copy(update=dict(values))
        copy.model_fields_set.intersection_update(self.model_fields_set)
        return copy
