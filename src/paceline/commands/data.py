"""`paceline data`: prepare a dataset, show its statistics or a preview, count words, and list the
cache."""

from paceline.commands import data_cache, data_count, data_prepare, data_preview, data_stats
from paceline.commands.options import OptionParser, set_up

_COMMANDS = {
    "count": (data_count, "count the words or tokens of files"),
    "stats": (data_stats, "show lengths, duplicates, and what each max_length would truncate"),
    "prepare": (data_prepare, "tokenize the data of a config into the cache, ahead of a run"),
    "cache": (data_cache, "list what the cache contains, and delete what was not used recently"),
    "preview": (data_preview, "show the first rows as the model sees them"),
}


def add_arguments(parser: OptionParser) -> None:
    for name, (module, summary) in _COMMANDS.items():
        set_up(parser.add_command(name, summary), module)
    parser.example = "paceline data stats examples/demo.yaml"
