"""`paceline bench`: measurements on this machine."""

from paceline.commands import bench_collectives, bench_scaling, bench_tuning
from paceline.commands.options import OptionParser, add_common

_COMMANDS = {
    "collectives": (bench_collectives, "measure the latency and bandwidth of collectives"),
    "scaling": (bench_scaling, "measure the efficiency of 1, 2, 4 … ranks"),
    "tuning": (bench_tuning, "measure what each setting gains, and write the tuned config"),
}


def add_arguments(parser: OptionParser) -> None:
    for name, (module, summary) in _COMMANDS.items():
        command = parser.add_command(name, summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
        add_common(command)
    parser.example = "paceline bench scaling --ranks 1,2"
