"""The forms in which a model can be exported, by name."""

from paceline.inference.exports.adapter import AdapterForm
from paceline.inference.exports.core.forms import ExportForm
from paceline.inference.exports.full import FullForm
from paceline.inference.exports.quantized import SCHEMES, QuantizedForm


def form_named(name: str) -> ExportForm:
    """Return a form by its name in the output of the command."""
    if name == FullForm.name:
        return FullForm()
    if name == AdapterForm.name:
        return AdapterForm()
    for scheme in SCHEMES:
        if name == scheme:
            return QuantizedForm(scheme)
    raise ValueError(name)


def chosen_form(
    *,
    merge: bool = False,
    dtype: str | None = None,
) -> ExportForm:
    """Return the form that the options of the command choose.

    Raises:
        ConfigError: they exclude each other.
    """
    return FullForm(merge, dtype or "auto")
