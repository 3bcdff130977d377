"""The forms in which a model can be exported, by name. The packages of a form are imported only if
it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.inference.exports.core.forms import ExportForm
from paceline.inference.exports.full import FullForm

#: The type for `--ollama` without `--gguf`: its answers hardly differ from the model's.
_OLLAMA_TYPE = "q8_0"


@dataclass(frozen=True)
class FormOptions:
    """The options of the command that choose a form.

    Args:
        merge: merge the adapter into a model of transformers.
        adapter: check and copy the adapter.
        gguf: type of the weights in a GGUF file.
        quantize: scheme of quantized weights.
        ollama: write a GGUF file with a Modelfile.
        dtype: dtype of the weights of a model of transformers.
    """

    merge: bool = False
    adapter: bool = False
    gguf: str | None = None
    quantize: str | None = None
    ollama: bool = False
    dtype: str = "auto"

    @property
    def chosen(self) -> list[str]:
        """The options that choose a form."""
        is_given = {
            "--merge": self.merge,
            "--adapter": self.adapter,
            "--gguf": self.gguf is not None,
            "--quantize": self.quantize is not None,
            "--ollama": self.ollama,
        }
        return [option for option, given in is_given.items() if given]


def form_named(name: str) -> ExportForm:
    """Return a form by its name in the output of the command."""
    family, _, kind = name.partition("-")
    if family == "gguf":
        from paceline.inference.exports.gguf.gguf_form import GgufForm

        return GgufForm(kind)
    if family == "ollama":
        from paceline.inference.exports.ollama.ollama_form import OllamaForm

        return OllamaForm(kind)
    if family == "adapter":
        from paceline.inference.exports.adapter import AdapterForm

        return AdapterForm()
    if name == FullForm.name:
        return FullForm()
    from paceline.inference.exports.quantized.form import QuantizedForm
    from paceline.inference.exports.quantized.layers import SCHEMES

    return next(QuantizedForm(scheme) for scheme in SCHEMES if scheme == name)


def choose_form(options: FormOptions) -> ExportForm:
    """Return the form that options of the command choose: without any, the full model.

    Raises:
        ConfigError: they exclude each other.
    """
    chosen = options.chosen
    if len(chosen) > 1 and set(chosen) != {"--gguf", "--ollama"}:
        raise ConfigError(
            "`{first}` and `{second}` choose different forms of the export",
            code="several-export-forms",
            allowed="one of --merge, --adapter, --gguf, --quantize and --ollama; --ollama also with"
            " --gguf",
            fix="run the command once for each form",
            first=chosen[0],
            second=chosen[1],
        )
    if options.dtype != "auto" and chosen not in ([], ["--merge"]):
        raise ConfigError(
            "`--dtype {dtype}` is not supported with `{option}`, which chooses how weights are"
            " stored",
            code="dtype-with-export-form",
            fix="remove --dtype",
            dtype=options.dtype,
            option=chosen[0],
        )
    if options.ollama:
        return form_named(f"ollama-{options.gguf or _OLLAMA_TYPE}")
    if options.gguf is not None:
        return form_named(f"gguf-{options.gguf}")
    if options.adapter:
        return form_named("adapter")
    if options.quantize is not None:
        return form_named(options.quantize)
    return FullForm(options.merge, options.dtype)
