"""Names that people know a dataset by, and where it is on the Hugging Face hub."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetAlias:
    """A dataset on the hub; ``name`` is its configuration, ``split`` the split used where none is
    asked for."""

    repo: str
    name: str | None = None
    split: str | None = None


HUB_NAMES: dict[str, DatasetAlias] = {
    # instructions
    "alpaca": DatasetAlias("tatsu-lab/alpaca"),
    "alpaca-en": DatasetAlias("tatsu-lab/alpaca"),
    "alpaca-en-demo": DatasetAlias("llamafactory/alpaca_en"),
    "alpaca-zh": DatasetAlias("llamafactory/alpaca_zh"),
    "alpaca-zh-demo": DatasetAlias("llamafactory/alpaca_zh"),
    "alpaca-cleaned": DatasetAlias("yahma/alpaca-cleaned"),
    "alpaca-gpt4": DatasetAlias("vicgalle/alpaca-gpt4"),
    "alpaca-gpt4-en": DatasetAlias("llamafactory/alpaca_gpt4_en"),
    "alpaca-gpt4-zh": DatasetAlias("llamafactory/alpaca_gpt4_zh"),
    "dolly": DatasetAlias("databricks/databricks-dolly-15k"),
    "dolly-15k": DatasetAlias("databricks/databricks-dolly-15k"),
    "belle-1m": DatasetAlias("BelleGroup/train_1M_CN"),
    "code-alpaca": DatasetAlias("sahil2801/CodeAlpaca-20k"),
    "open-orca": DatasetAlias("Open-Orca/OpenOrca"),
    "lima": DatasetAlias("GAIR/lima"),
    # chats
    "sharegpt": DatasetAlias("RyokoAI/ShareGPT52K"),
    "guanaco": DatasetAlias("timdettmers/openassistant-guanaco"),
    "oasst": DatasetAlias("timdettmers/openassistant-guanaco"),
    "openhermes": DatasetAlias("teknium/OpenHermes-2.5"),
    "openhermes-2.5": DatasetAlias("teknium/OpenHermes-2.5"),
    "ultrachat": DatasetAlias("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "ultrachat-200k": DatasetAlias("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "slimorca": DatasetAlias("Open-Orca/SlimOrca"),
    "capybara": DatasetAlias("trl-lib/Capybara"),
    "no-robots": DatasetAlias("HuggingFaceH4/no_robots"),
    "smoltalk": DatasetAlias("HuggingFaceTB/smoltalk", "all"),
    "tulu-3": DatasetAlias("allenai/tulu-3-sft-mixture"),
    # mathematics
    "gsm8k": DatasetAlias("openai/gsm8k", "main"),
    "metamathqa": DatasetAlias("meta-math/MetaMathQA"),
    "openr1-math": DatasetAlias("open-r1/OpenR1-Math-220k", "default"),
    # plain text
    "wikitext": DatasetAlias("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-2": DatasetAlias("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103": DatasetAlias("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "tinystories": DatasetAlias("roneneldan/TinyStories"),
    "fineweb-sample": DatasetAlias("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu-sample": DatasetAlias("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "cosmopedia-sample": DatasetAlias("HuggingFaceTB/cosmopedia-100k"),
}


def find_hub_name(name: str) -> DatasetAlias | None:
    """The dataset that ``name`` stands for; case, dashes, underscores and blanks do not matter."""
    return _BY_PLAIN.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


_BY_PLAIN = {_plain(name): one for name, one in HUB_NAMES.items()}
