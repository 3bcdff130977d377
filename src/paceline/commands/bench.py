"""`paceline bench`: measurements on this machine."""

from paceline.commands import bench_collectives, bench_scaling, bench_tuning
from paceline.commands.options import OptionParser, set_up

_COMMANDS = {
    "collectives": (bench_collectives, "measure the latency and bandwidth of collectives"),
    "scaling": (bench_scaling, "measure the efficiency of 1, 2, 4 … ranks"),
    "tuning": (bench_tuning, "measure what each setting gains, and write the tuned config"),
}


def add_arguments(parser: OptionParser) -> None:
    for name, (module, summary) in _COMMANDS.items():
        set_up(parser.add_command(name, summary), module)
    parser.example = "paceline bench scaling --ranks 1,2"
