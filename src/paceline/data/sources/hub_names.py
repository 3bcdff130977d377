"""Names that people know a dataset by, and where it is on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HubName:
    """A dataset on the hub; ``name`` is its configuration, ``split`` the split used where none is
    asked for."""

    repo: str
    name: str | None = None
    split: str | None = None


HUB_NAMES: dict[str, HubName] = {
    # instructions
    "alpaca": HubName("tatsu-lab/alpaca"),
    "alpaca-en": HubName("tatsu-lab/alpaca"),
    "alpaca-en-demo": HubName("llamafactory/alpaca_en"),
    "alpaca-zh": HubName("llamafactory/alpaca_zh"),
    "alpaca-zh-demo": HubName("llamafactory/alpaca_zh"),
    "alpaca-cleaned": HubName("yahma/alpaca-cleaned"),
    "alpaca-gpt4": HubName("vicgalle/alpaca-gpt4"),
    "alpaca-gpt4-en": HubName("llamafactory/alpaca_gpt4_en"),
    "alpaca-gpt4-zh": HubName("llamafactory/alpaca_gpt4_zh"),
    "dolly": HubName("databricks/databricks-dolly-15k"),
    "dolly-15k": HubName("databricks/databricks-dolly-15k"),
    "belle-1m": HubName("BelleGroup/train_1M_CN"),
    "code-alpaca": HubName("sahil2801/CodeAlpaca-20k"),
    "open-orca": HubName("Open-Orca/OpenOrca"),
    "lima": HubName("GAIR/lima"),
    # chats
    "sharegpt": HubName("RyokoAI/ShareGPT52K"),
    "guanaco": HubName("timdettmers/openassistant-guanaco"),
    "oasst": HubName("timdettmers/openassistant-guanaco"),
    "openhermes": HubName("teknium/OpenHermes-2.5"),
    "openhermes-2.5": HubName("teknium/OpenHermes-2.5"),
    "ultrachat": HubName("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "ultrachat-200k": HubName("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "slimorca": HubName("Open-Orca/SlimOrca"),
    "capybara": HubName("trl-lib/Capybara"),
    "no-robots": HubName("HuggingFaceH4/no_robots"),
    "smoltalk": HubName("HuggingFaceTB/smoltalk", "all"),
    "tulu-3": HubName("allenai/tulu-3-sft-mixture"),
    # mathematics
    "gsm8k": HubName("openai/gsm8k", "main"),
    "metamathqa": HubName("meta-math/MetaMathQA"),
    "openr1-math": HubName("open-r1/OpenR1-Math-220k", "default"),
    # plain text
    "wikitext": HubName("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-2": HubName("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103": HubName("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "tinystories": HubName("roneneldan/TinyStories"),
    "fineweb-sample": HubName("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu-sample": HubName("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "cosmopedia-sample": HubName("HuggingFaceTB/cosmopedia-100k"),
}


def find_hub_name(name: str) -> HubName | None:
    """The dataset that ``name`` stands for; case, dashes, underscores and blanks do not matter."""
    return _BY_PLAIN.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


_BY_PLAIN = {_plain(name): one for name, one in HUB_NAMES.items()}
