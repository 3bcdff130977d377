"""The key under which the log-probabilities of the reference model are stored."""

from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.data.cache import fingerprint, key_of
from paceline.data.kinds.pair import PreferenceTransform
from paceline.data.sources.opening import with_slashes
from paceline.data.text.token_dataset import TokenDataset
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder
from paceline.models.weights.stored_files import weight_files


def reference_key(config: Config, dataset: TokenDataset) -> str | None:
    """Return the key of the values of a dataset: it depends on the weights with which the training
    starts, on the tokens, and on the precision, not on the strategy. None if the files of the model
    are not known."""
    folder = config_folder(resolve_model(config.model))
    if folder is None or config.trust_remote_code:
        return None
    args, lora = config.train_args, config.lora
    # Earlier versions paired a sample that is alone in the last group with itself.
    transform = dataset.transform
    assert isinstance(transform, PreferenceTransform)
    size = transform.mismatch_size
    lone = ["paired with the sample before"] if size and len(dataset) % size == 1 else []
    return key_of(
        {
            "tokens": dataset.folder.name,
            "samples": None if dataset.indices is None else dataset.indices.tolist(),
            "mismatched": [size, transform.max_length, *lone],
            "model": _files(folder),
            # Weights that no file has are drawn from the seed.
            "seed": None if weight_files(folder) and not config.adds_tokens else args.seed,
            "new tokens": [config.new_tokens, config.new_special_tokens],
            "precision": [args.precision, lora.enable],
            "quantize": [lora.enable, lora.quantize],
            "adapter": _adapter(config),
        }
    )


def _files(folder: Path) -> list[Any]:
    files = [folder / "config.json", *weight_files(folder), *sorted(folder.glob("*.bin"))]
    return [[file.name, *fingerprint(file)] for file in files if file.is_file()]


def _adapter(config: Config) -> list[Any] | None:
    """Return what the function of new or loaded adapters depends on; those that are initialized as
    usual do not change the model."""
    lora = config.lora
    if not lora.enable or lora.adapter is None:
        return None
    folder = Path(with_slashes(lora.adapter)).expanduser()
    files = sorted(folder.glob("adapter*")) if folder.is_dir() else []
    return [str(lora.adapter), [[file.name, *fingerprint(file)] for file in files]]
