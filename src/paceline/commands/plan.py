"""`paceline plan`: estimate memory, traffic and time of each parallel mode."""

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.options import (
    AnyText,
    Integer,
    OptionParser,
    add_config,
    load_fitted_config,
    print_notices,
)
from paceline.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.simulation.records import SimulatedPart


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--world-size",
        Integer(),
        "N",
        "number of ranks (default: number of devices of this machine)",
    )
    parser.add_option(
        "--device-memory",
        AnyText("a size, such as 80GB or 24GiB"),
        "SIZE",
        "memory of each device (default: the memory of this machine's devices)",
    )
    parser.add_option(
        "--device",
        AnyText("a name of the device table, such as H100"),
        "NAME",
        "device to plan for (default: this machine's devices)",
    )
    parser.add_flag(
        "--search",
        "also list the set-ups that no other beats in both time and memory, over modes,"
        " micro-batches, recomputation and offloading",
    )
    parser.add_option(
        "--budget",
        AnyText("a size, such as 24GB"),
        "SIZE",
        "memory of each device that the run may use (default: all of it)",
    )
    parser.add_option(
        "--deadline",
        AnyText("a time, such as 8h, 90min or 2d"),
        "TIME",
        "also list the cheapest machines of the device table that finish the run in this time",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="[NAME=]PRICE",
        help="price of a device per hour, for all devices or for one, such as H100-SXM=2.5;"
        " repeatable (default: device hours are compared)",
    )
    parser.add_option(
        "--network",
        AnyText("a network, such as rail:32 or fat-tree:4:2"),
        "KIND[:HOSTS[:OVERSUBSCRIPTION]]",
        "switches between hosts: rail or fat-tree, the hosts of a group of leaf switches, and"
        " the oversubscription above them (default: all hosts at the same rate)",
    )
    parser.add_option(
        "--storage",
        AnyText("a size per second, such as 2GB"),
        "SIZE",
        "what a host writes to and reads from storage in a second, for the goodput with"
        " recovery.mtbf_hours (default: 2GB)",
        default="2GB",
    )
    parser.add_option(
        "--restart-time",
        AnyText("a time, such as 2min"),
        "TIME",
        "from a failure to running ranks, without reading the checkpoint (default: 2min)",
        default="2min",
    )
    parser.add_option(
        "--calibrate",
        AnyText("the folder of a finished run"),
        "RUN",
        "fit the predicted times to finished runs on this machine; later plans and `mode:"
        " auto` use the result. Needs no config, and prints no plan",
        nargs="+",
    )
    parser.add_flag("--no-history", "ignore earlier runs on this machine")
    parser.add_flag(
        "--simulate",
        "also simulate two steps of the configured mode (else of the chosen one) on fake"
        " tensors: memory by kind, messages, FLOPs and the least time; needs the CPU build of torch"
        " and a C++ compiler",
    )
    parser.add_flag(
        "--serve", "answer requests from standard input, one JSON per line; needs no config"
    )
    parser.example = "paceline plan examples/demo.yaml --world-size 8 --device-memory 80GB"


def run(args: Namespace) -> int:
    """Print the plan."""
    if args.calibrate:
        return _calibrate(args)
    if args.serve:
        from paceline.planner.serve import serve

        return serve()
    from paceline.planner.api import make_plan
    from paceline.planner.search.options import parse_options

    loaded = load_fitted_config(args)
    print_notices(loaded.notices)
    options = parse_options(
        args.search,
        args.budget,
        args.deadline,
        args.price,
        args.network,
        args.storage,
        args.restart_time,
    )
    plan = make_plan(
        loaded.config,
        args.world_size,
        args.device_memory,
        args.device,
        options,
        uses_history=not args.no_history,
    )
    simulation = None
    if args.simulate:
        from paceline.simulation.run import simulate_plan

        simulation = simulate_plan(plan)
    if args.json:
        simulated: SimulatedPart = {} if simulation is None else simulation.as_dict()
        print(json.dumps({**plan.as_dict(), **simulated}, indent=2))
    else:
        from paceline.commands.reports import open_console
        from paceline.planner.search_table import print_search
        from paceline.planner.table import plan_table

        console = open_console()
        console.print(plan_table(plan))
        print_search(console, plan)
        if simulation is not None:
            from paceline.simulation.table import simulation_table

            console.print(simulation_table(simulation, plan.machine))
    return EXIT_DONE


def _calibrate(args: Namespace) -> int:
    """Fit the times to finished runs, and print each run's error before and after."""
    from paceline.planner.machine import calibration
    from paceline.planner.machine.history import read_run

    runs = [read_run(Path(folder)) for folder in args.calibrate]
    fitted = calibration.calibrate(runs)
    path = calibration.save(fitted)
    rows = [
        {
            "run": run.output_dir,
            "measured_s": run.measured_s,
            "predicted_s": run.predicted_s,
            "calibrated_s": fitted.seconds(run.parts_s),
        }
        for run in runs
    ]
    names = ("computation", "launches", "traffic", "update")
    factors = {name: getattr(fitted, name) for name in names}
    if args.json:
        print(json.dumps({"path": str(path), "factors": factors, "runs": rows}, indent=2))
        return EXIT_DONE
    for row in rows:
        print(
            f"{row['run']}: measured {row['measured_s']:.4g} s per step, predicted"
            f" {row['predicted_s']:.4g} s, calibrated {row['calibrated_s']:.4g} s"
        )
    text = ", ".join(f"{name} × {factor:.3g}" for name, factor in factors.items())
    print(f"calibration on {fitted.device}: {text}\nsaved for later plans: {path}")
    return EXIT_DONE
