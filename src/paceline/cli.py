"""The verbs: parse, call one function, print."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_SIGINT,
    ConfigError,
    PacelineError,
    nearest,
)

USAGE = """\
usage: paceline VERB …

  sft, train   CONFIG.yaml [key=value …]     train what the file says (--dry-run, --allow-config-change, --debug)
  plan         CONFIG.yaml [key=value …]     memory, traffic, time of each mode (--world-size N, --device-memory 80GB, …)
  verify       CONFIG.yaml [key=value …]     certify that the strategies agree (--modes a,b, --world-size N, --steps N, …)
  doctor       [CONFIG.yaml] [key=value …]   look at this machine and the links between its ranks (--ranks N)
  watch        RUN                           follow a run from another terminal (--once)
  ui           [FOLDER]                      see and start runs in a browser (--port P, --host H, --no-browser)
  generate     RUN "a question"              answer with a run's model (--max-new-tokens N, --temperature T, --system TEXT)
  export       RUN --merge --output DIR      write the merged model, ready for plain transformers
  inspect      CHECKPOINT                    what a checkpoint holds, and its digest
  explain      all-reduce                    an algorithm on real ranks (broadcast, ddp, zero, dp; --output PAGE.html)
  data         count FILE …                  count words over all ranks (--ranks N, --by tokens, --output FILE.tsv, …)
  data         stats CONFIG.yaml [key=value …]  lengths, duplicates, what each max_length would cut (--output PAGE.html)
  data         preview CONFIG.yaml [key=value …]  the first rows as the model will see them (--rows N)
  slurm        CONFIG.yaml [key=value …]     a script for Slurm (--nodes N, --gpus-per-node N, --time 4:00:00, --submit, …)
  kubernetes   CONFIG.yaml [key=value …]     manifests for Kubernetes (--nodes N, --gpus-per-node N, --image IMAGE, --variant …)
  ray          CONFIG.yaml --num-workers N   train on a Ray cluster (--address, --max-failures, …: `paceline ray --help`)
  bench        collectives                   their latency and bandwidth (--ranks 2,4, --sizes 1KB,25MB, --output …)

Every verb takes --json: the result alone on standard output. Keys: docs/config.md.
The shortest run: paceline sft model=builtin:qwen2-tiny dataset=builtin:python-docs
"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 1 failed, 2 wrong usage or config, 130/143
    stopped by a signal."""
    started_at = _process_start()
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in tokens
    try:
        return _dispatch(tokens, started_at)
    except PacelineError as error:
        _print_error(error.paragraph())
        if debug:
            raise
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "\nstopped before the training began; nothing was written to output_dir",
            file=sys.stderr,
        )
        return EXIT_SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if debug:
            raise
        _print_error(
            f"{type(error).__name__}: {error}. This was not expected; run again with --debug for"
            " the whole traceback."
        )
        return EXIT_FAILED


def entry() -> None:
    """The console script: as :func:`main`, without the second that taking down an interpreter full
    of torch costs."""
    code = main()
    atexit._run_exitfuncs()  # multiprocessing's own: the semaphores it made
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _dispatch(tokens: list[str], started_at: float) -> int:
    if not tokens or tokens[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return EXIT_DONE
    if tokens[0] == "--version":
        from paceline.version import __version__

        print(__version__)
        return EXIT_DONE
    verb, rest = tokens[0], tokens[1:]
    if verb not in _VERBS:
        near = nearest(verb, _VERBS)
        raise ConfigError(
            f"`paceline {verb}` is no verb",
            allowed=", ".join(_VERBS),
            fix=f"type `paceline {near or '--help'}`",
        )
    if "-h" in rest or "--help" in rest:
        print(_help(verb), end="")
        return EXIT_DONE
    return _VERBS[verb](rest, started_at)


def _train(tokens: list[str], started_at: float) -> int:
    from paceline.api import Options, run
    from paceline.config.load import load_config, to_yaml
    from paceline.config.overrides import split_cli

    names = ("json", "debug", "dry-run", "allow-config-change")
    flags, tokens = _take_flags(tokens, *names)
    for token in tokens:
        if token.startswith("--") and (
            near := nearest(token[2:].replace("_", "-"), names, cutoff=0.8)
        ):
            raise ConfigError(f"there is no flag `{token}`", fix=f"did you mean `--{near}`?")
    path, overrides = split_cli(tokens)
    loaded = load_config(path, overrides)
    options = Options(flags["dry-run"], flags["debug"], flags["allow-config-change"])
    result = run(loaded, options, started_at)
    if options.dry_run:
        print(
            json.dumps(result.resolved, indent=2) if flags["json"] else to_yaml(loaded.config),
            end="",
        )
    elif flags["json"]:
        print(json.dumps(result.report, indent=2))
    return result.exit_code


def _plan(tokens: list[str], _: float) -> int:
    from paceline.config.load import load_config
    from paceline.config.overrides import split_cli
    from paceline.models.positions import fit_length
    from paceline.planner.api import make_plan

    names: dict[str, Callable[[str], Any]] = {
        "world-size": int,
        "device-memory": str,
        "device": str,
    }
    flags, tokens = _take_flags(tokens, "json", "debug")
    values, tokens = _take_values(tokens, names)
    for token in tokens:
        flag = token[2:].partition("=")[0].replace("_", "-")
        if token.startswith("--") and (
            near := nearest(flag, [*names, "json", "debug"], cutoff=0.8)
        ):
            raise ConfigError(f"there is no flag `{token}`", fix=f"did you mean `--{near}`?")
    path, overrides = split_cli(tokens)
    loaded = fit_length(load_config(path, overrides))
    for level, text in loaded.notices:
        print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr)
    plan = make_plan(
        loaded.config, values.get("world-size"), values.get("device-memory"), values.get("device")
    )
    if flags["json"]:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        from paceline.planner.table import show

        show(plan)
    return EXIT_DONE


def _verify(tokens: list[str], _: float) -> int:
    from paceline.config.load import load_config
    from paceline.config.overrides import split_cli
    from paceline.models.positions import fit_length
    from paceline.verify.run import Request, verify

    flags, tokens = _take_flags(tokens, "json", "debug")
    values, tokens = _take_values(
        tokens, {"modes": str, "world-size": int, "steps": int, "output": Path}
    )
    path, overrides = split_cli(tokens)
    request = Request(**{key.replace("-", "_"): value for key, value in values.items()})
    result = verify(fit_length(load_config(path, overrides)), request)
    if result.certificate is not None and flags["json"]:
        print(json.dumps(result.certificate, indent=2))
    elif result.certificate is not None:
        from paceline.verify.table import print_certificate

        print_certificate(result.certificate)
    return result.exit_code


def _watch(tokens: list[str], _: float) -> int:
    from paceline.observe.watch import watch

    flags, tokens = _take_flags(tokens, "once", "json", "debug")
    run = _exactly(tokens, "watch", "RUN")[0]
    return watch(Path(run), sys.stderr if flags["json"] else sys.stdout, once=flags["once"])


def _ui(tokens: list[str], _: float) -> int:
    from paceline.commands.ui import serve
    from paceline.web.binding import PORT, check_port

    flags, tokens = _take_flags(tokens, "no-browser", "json", "debug")
    values, tokens = _take_values(tokens, {"port": check_port, "host": str})
    folder = Path(_exactly(tokens, "ui", "FOLDER")[0]) if tokens else None
    host = values.get("host", "127.0.0.1")
    return serve(
        folder,
        values.get("port", PORT),
        host,
        browser=not flags["no-browser"],
        as_json=flags["json"],
    )


def _generate(tokens: list[str], _: float) -> int:
    from paceline.inference.generate import generate

    flags, tokens = _take_flags(tokens, "json", "debug", "serve")
    if flags["serve"]:
        from paceline.inference.chat_server import serve

        values, tokens = _take_values(tokens, {"device": str})
        return serve(Path(_exactly(tokens, "generate", "RUN")[0]), **values)
    values, tokens = _take_values(
        tokens, {"max-new-tokens": int, "temperature": float, "system": str, "seed": int}
    )
    run, question = _exactly(tokens, "generate", "RUN", "QUESTION")
    # what libraries print as they are imported is no answer
    with contextlib.redirect_stdout(sys.stderr):
        answer = generate(
            Path(run), question, **{key.replace("-", "_"): value for key, value in values.items()}
        )
    print(
        json.dumps({"question": question, "answer": answer}, ensure_ascii=False)
        if flags["json"]
        else answer
    )
    return EXIT_DONE


def _export(tokens: list[str], _: float) -> int:
    from paceline.inference.export import export

    flags, tokens = _take_flags(tokens, "json", "debug", "merge")
    values, tokens = _take_values(tokens, {"output": str, "dtype": str})
    run = _exactly(tokens, "export", "RUN")[0]
    with contextlib.redirect_stdout(sys.stderr):
        folder = export(Path(run), merge=flags["merge"], **values)
    print(json.dumps({"path": str(folder)}) if flags["json"] else f"written: {folder}")
    return EXIT_DONE


def _inspect(tokens: list[str], _: float) -> int:
    import tempfile

    from paceline.checkpoint import store
    from paceline.checkpoint.remote import fetch_checkpoint, is_url

    flags, tokens = _take_flags(tokens, "json", "debug")
    given = _exactly(tokens, "inspect", "CHECKPOINT")[0]

    def warn(text: str) -> None:
        print(f"warning: passed over: {text}", file=sys.stderr)

    with tempfile.TemporaryDirectory() if is_url(given) else contextlib.nullcontext() as folder:
        path = (
            fetch_checkpoint(given, Path(folder), warn, "CHECKPOINT")
            if folder
            else store.find(Path(given), warn)
        )
        found = store.inspect(path)
    if flags["json"]:
        print(json.dumps(found, indent=2))
        return EXIT_DONE
    print(given if is_url(given) else path)
    print(f"step {found['step']}, written by {found['strategy']} on {found['world_size']} ranks")
    print(f"digest        {found['digest']}\nmodel_digest  {found['model_digest']}")
    for name, one in found["tensors"].items():
        print(f"  {one['sha256'][:12]}  {one['dtype']:<5} {one['shape']!s:<16} {name}")
    return EXIT_DONE


def _explain(tokens: list[str], _: float) -> int:
    from paceline.explain.run import TOPICS, explain, make_request

    flags, tokens = _take_flags(tokens, "json", "debug")
    values, tokens = _take_values(
        tokens, {"ranks": int, "elements": int, "algorithm": str, "output": str}
    )
    topic = _exactly(tokens, "explain", " | ".join(TOPICS))[0]
    return explain(make_request(topic, values), flags["json"])


def _doctor(tokens: list[str], _: float) -> int:
    from paceline.config.overrides import split_cli
    from paceline.doctor.run import doctor, make_request

    flags, tokens = _take_flags(tokens, "json", "debug")
    values, tokens = _take_values(tokens, {"ranks": str})
    path, overrides = split_cli(tokens)
    return doctor(make_request(path, overrides, values.get("ranks")), flags["json"])


def _bench(tokens: list[str], _: float) -> int:
    from paceline.bench.collectives import bench, make_request

    flags, tokens = _take_flags(tokens, "json", "debug")
    values, tokens = _take_values(
        tokens, {"ranks": str, "sizes": str, "algorithms": str, "output": str}
    )
    what = _exactly(tokens, "bench", "collectives")[0]
    return bench(make_request(what, values), flags["json"])


def _data(tokens: list[str], _: float) -> int:
    from paceline.commands.data import COUNT_VALUES, check_action, count, make_request

    flags, tokens = _take_flags(tokens, "json", "debug")
    action = check_action(tokens)
    if action == "count":
        values, files = _take_values(tokens[1:], COUNT_VALUES)
        return count(make_request(files, values), flags["json"])
    if action == "preview":
        return _data_preview(tokens[1:], flags["json"])
    from paceline.commands.data_stats import show_stats

    values, tokens = _take_values(tokens[1:], {"output": str})
    return show_stats(tokens, values.get("output"), flags["json"])


def _data_preview(tokens: list[str], as_json: bool) -> int:
    from paceline.config.load import load_config
    from paceline.config.overrides import split_cli
    from paceline.models.positions import fit_length
    from paceline.tasks.preview import as_text, preview

    values, tokens = _take_values(tokens, {"rows": int})
    loaded = fit_length(load_config(*split_cli(tokens)))
    found = preview(loaded.config, **values)
    for level, text in [*loaded.notices, *found["notices"]]:
        print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr)
    print(json.dumps(found, ensure_ascii=False) if as_json else as_text(found))
    return EXIT_DONE


def _slurm(tokens: list[str], _: float) -> int:
    from paceline.cluster.jobs.slurm import VALUES, check_slurm_options, make_request, slurm
    from paceline.config.overrides import split_cli

    flags, tokens = _take_flags(tokens, "json", "debug", "submit")
    values, tokens = _take_values(tokens, VALUES)
    check_slurm_options(tokens)
    path, overrides = split_cli(tokens)
    return slurm(make_request(path, overrides, values), flags["submit"], flags["json"])


def _kubernetes(tokens: list[str], _: float) -> int:
    from paceline.cluster.jobs.kubernetes import kubernetes, print_runtime
    from paceline.cluster.jobs.kubernetes_options import (
        FLAGS,
        VALUES,
        check_kubernetes_options,
        make_options,
    )
    from paceline.config.overrides import split_cli
    from paceline.planner.upper_bound import at_most

    flags, tokens = _take_flags(tokens, "json", "debug", *FLAGS)
    values, tokens = _take_values(tokens, VALUES)
    check_kubernetes_options(tokens)
    if flags["runtime-manifest"]:
        return print_runtime(values, flags["coscheduling"], tokens, flags["json"])
    path, overrides = split_cli(tokens)
    return kubernetes(make_options(path, overrides, values, flags, at_most), flags["json"])


def _ray(tokens: list[str], _: float) -> int:
    from paceline.commands.ray import FLAGS, VALUES, check_ray_options, make_options, train_on_ray
    from paceline.config.overrides import split_cli

    flags, tokens = _take_flags(tokens, *FLAGS)
    values, tokens = _take_values(tokens, VALUES)
    check_ray_options(tokens)
    path, overrides = split_cli(tokens)
    return train_on_ray(make_options(path, overrides, values, flags), flags["json"])


def _help(verb: str) -> str:
    if verb == "ray":
        from paceline.commands.ray import HELP

        return HELP
    return USAGE


_VERBS: dict[str, Callable[[list[str], float], int]] = {
    "sft": _train,
    "train": _train,
    "plan": _plan,
    "verify": _verify,
    "watch": _watch,
    "ui": _ui,
    "generate": _generate,
    "export": _export,
    "inspect": _inspect,
    "explain": _explain,
    "bench": _bench,
    "doctor": _doctor,
    "data": _data,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "ray": _ray,
}


def _take_flags(tokens: list[str], *names: str) -> tuple[dict[str, bool], list[str]]:
    def name_of(token: str) -> str:
        return token[2:].replace("_", "-") if token.startswith("--") else ""

    given = {name_of(one) for one in tokens}
    return {name: name in given for name in names}, [
        one for one in tokens if name_of(one) not in names
    ]


def _take_values(
    tokens: list[str], kinds: dict[str, Callable[[str], Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Options with a value, as ``--name value`` or ``--name=value``."""
    values: dict[str, Any] = {}
    rest = []
    left = iter(tokens)
    for token in left:
        name, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--") or name.replace("_", "-") not in kinds:
            rest.append(token)
            continue
        name = name.replace("_", "-")
        if not equals:
            value = next(left, "")
        try:
            values[name] = kinds[name](value)
        except ValueError as error:
            raise ConfigError(
                f"`--{name} {value}` is not of type {kinds[name].__name__}"
            ) from error
    return values, rest


def _exactly(tokens: list[str], verb: str, *names: str) -> list[str]:
    unknown = [one for one in tokens if one.startswith("--")]
    if unknown or len(tokens) != len(names):
        got = " ".join(tokens) or "nothing"
        raise ConfigError(
            f"`paceline {verb}` was given {got}",
            allowed=f"paceline {verb} {' '.join(names)}",
            fix="see `paceline --help`",
        )
    return tokens


def _print_error(text: str) -> None:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    with contextlib.suppress(OSError, ValueError):
        print(f"\033[1;31merror:\033[0m {text}" if colour else f"error: {text}", file=sys.stderr)


def _process_start() -> float:
    """When this process began, in seconds since the epoch: Python's own start-up counts in the time
    to the first step."""
    try:
        with open("/proc/self/stat") as handle:
            ticks = int(handle.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as handle:
            uptime_s = float(handle.read().split()[0])
        return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


if __name__ == "__main__":
    entry()
