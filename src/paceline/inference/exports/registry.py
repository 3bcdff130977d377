"""The forms in which a model can be exported, by name."""

from paceline.inference.exports.core.forms import ExportForm
from paceline.inference.exports.full import FullForm
from paceline.inference.exports.gguf.gguf_form import GgufForm
from paceline.inference.exports.gguf.tensor_types import KINDS
from paceline.inference.exports.ollama.ollama_form import OllamaForm
from paceline.inference.exports.quantized import SCHEMES, QuantizedForm


def form_named(name: str) -> ExportForm:
    """Return a form by its name in the output of the command."""
    if name == FullForm.name:
        return FullForm()
    for scheme in SCHEMES:
        if name == scheme:
            return QuantizedForm(scheme)
    for kind in KINDS:
        if name == f"gguf-{kind}":
            return GgufForm(kind)
        if name == f"ollama-{kind}":
            return OllamaForm(kind)
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
