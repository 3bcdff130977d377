"""`paceline doctor`: check this machine and the network between the ranks that a run would have."""

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from pydantic import JsonValue

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import EXIT_DONE, EXIT_FAILED, ConfigError, PacelineError
from paceline.core.failures import ExitRecord
from paceline.core.files import cache_dir
from paceline.core.formatting import counted
from paceline.core.log import configure_logging, log_notices
from paceline.core.stop import StopFlag
from paceline.distributed.communicator import init_communicator
from paceline.distributed.devices import Devices, accelerators, choose_devices
from paceline.distributed.environment import RankEnv, outer_launcher, scheduled_host, with_scheduler
from paceline.doctor.checks import (
    check_clock,
    check_disk,
    check_driver,
    check_frequency,
    check_host_name,
    check_interface,
    check_layers,
    check_memory,
    check_packages,
    check_writing,
)
from paceline.doctor.host_report import HostLink
from paceline.doctor.hosts import (
    HostEndpoint,
    HostsReport,
    inspect_endpoint_and_hosts,
    inspect_from_ranks,
)
from paceline.doctor.links import PairRecord, check_links, check_peer_copies, measure_network
from paceline.doctor.rates import busy_latency_s, check_rates, measure_on_ranks, measure_rates
from paceline.launch.local import LocalLauncher
from paceline.launch.passes.host_checks import (
    CheckRecord,
    CheckResult,
    check_open_files,
    check_port,
    check_shared_memory,
    check_threads,
)
from paceline.launch.rank_pool import warm_up
from paceline.launch.ranks.worker import run_guarded
from paceline.parallel.registry import uses_one_device
from paceline.planner.machine import profile
from paceline.planner.machine.profile import RatesRecord
from paceline.planner.model_profile import ModelProfile, describe

if TYPE_CHECKING:
    from paceline.cluster.rounds import Membership

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
_PRELOAD = ("paceline.launch.ranks.worker", "paceline.doctor.links")


@dataclass(frozen=True)
class DoctorOptions:
    """What to check. If not ``has_config``, ``loaded`` is a placeholder and only its section
    `parallel` is used."""

    loaded: Loaded
    has_config: bool
    num_ranks: int | None = None


class AllReduceRecord(TypedDict):
    """A :class:`~paceline.distributed.link.Link` over all ranks, as JSON, and what a small
    all-reduce between computations adds."""

    latency_s: float
    bandwidth_bytes_s: float | None
    num_ranks: int
    residual: float
    sent_bytes: int
    wall_s: float
    num_hosts: int
    busy_latency_s: float


class DoctorReport(TypedDict, total=False):
    """What `--json` prints; the ranks return the keys that they measure."""

    ok: bool
    checks: list[CheckRecord]
    links: list[PairRecord]
    all_reduce: AllReduceRecord | None
    host_links: list[HostLink]
    hosts: list[dict[str, JsonValue]]
    rates: list[RatesRecord]


@dataclass(frozen=True)
class DoctorResult:
    """Args: report: None if another rank or host prints it, or if a signal stopped the command."""

    exit_code: int
    report: DoctorReport | None = None
    checks: list[CheckResult] = field(default_factory=list)


@dataclass(frozen=True)
class HostExam:
    """What each rank checks and measures.

    Args:
        has_config: see :class:`DoctorOptions`.
        checks_host: local rank 0 also checks its host, because an outer launcher started the ranks.
        gradient_bytes: size of the config's gradients; None if it is not known.
    """

    config: Config
    device_type: str
    has_config: bool
    checks_host: bool
    gradient_bytes: int | None = None


def doctor(options: DoctorOptions) -> DoctorResult:
    """Check this machine, and measure between its ranks.

    Raises:
        ConfigError: the devices that the config requests do not exist.
        RunError: the ranks could not form a process group.
    """
    configure_logging()
    log_notices(logger, options.loaded.notices)
    outer = outer_launcher()
    parallel = with_scheduler(
        options.loaded.config.parallel, scheduled_host() if outer is None else None
    )
    options = replace(options, loaded=options.loaded.with_parallel(parallel))
    devices = _devices(options, outer)
    if outer is not None:
        return _result(devices, [], _on_ranks(options, devices, outer))
    if parallel.hosts != (1, 1):
        return _on_hosts(options, devices)
    return _on_this_host(options, devices)


def _on_this_host(options: DoctorOptions, devices: Devices) -> DoctorResult:
    if devices.count > 1:
        warm_up(_PRELOAD)
    checks, gradient_bytes = examine_host(
        options.loaded.config, options.has_config, devices.type, devices.count
    )
    if devices.count == 1:
        return _result(devices, checks, ExitRecord("done", report=_alone(devices.type)))
    return _result(devices, checks, _on_ranks(options, devices, None, gradient_bytes))


def _on_hosts(options: DoctorOptions, devices: Devices) -> DoctorResult:
    warm_up(_PRELOAD)
    hosts = _between_hosts(options, devices)
    if not hosts.blocks_ranks:
        ended = _on_ranks(options, devices, None, hosts.gradient_bytes)
        return _result(devices, hosts.checks, ended, hosts)
    if not hosts.is_first:
        logger.info("a run would fail, because of the problems that the endpoint host prints")
        return DoctorResult(EXIT_FAILED)
    logger.info("no ranks were started, because a run between these hosts would fail")
    return _result(devices, hosts.checks, ExitRecord("done"), hosts)


def _result(
    devices: Devices, checks: list[CheckResult], ended: ExitRecord, hosts: HostsReport | None = None
) -> DoctorResult:
    """Return the result of the checks of this host (or of all hosts), and of what the ranks
    measured. Under an outer launcher rank 0 prints it for all, and the endpoint host for all
    hosts."""
    if ended.status == "stopped":
        return DoctorResult(ended.exit_code)
    if ended.status == "failed":
        advice = (
            "check the host or interface that the message names; `--ranks 1` checks this host alone"
        )
        checks = [*checks, CheckResult.error("links", ended.message, advice)]
    measured = cast(DoctorReport, ended.report or {})
    checks = [*checks, *(CheckResult(**check) for check in measured.get("checks", []))]
    if not checks or (hosts is not None and not hosts.is_first):
        return DoctorResult(EXIT_DONE)
    report: DoctorReport = {
        "ok": not any(check.fatal for check in checks),
        "checks": [check.as_dict() for check in checks],
        "links": measured.get("links", []),
        "all_reduce": measured.get("all_reduce"),
        "host_links": hosts.links if hosts else measured.get("host_links", []),
        "hosts": hosts.hosts if hosts else measured.get("hosts", []),
        "rates": measured.get("rates", []),
    }
    _save_profile(devices.type, report["all_reduce"], report["rates"])
    return DoctorResult(EXIT_DONE if report["ok"] else EXIT_FAILED, report, checks)


def _between_hosts(options: DoctorOptions, devices: Devices) -> HostsReport:
    """Check this host, and measure between all hosts before any rank starts."""
    from paceline.cluster.endpoint import check_endpoint, is_listening, resolve_endpoint

    config = options.loaded.config
    check_endpoint(config.parallel)
    try:
        resolved = resolve_endpoint(config)
    except OSError as error:
        raise ConfigError(
            "`parallel.rdzv_endpoint: {rdzv_endpoint}` cannot be reached from this host: {reason}",
            code="endpoint-unreachable",
            fix="use an IP address, or a name that resolves on every host",
            rdzv_endpoint=config.parallel.rdzv_endpoint,
            reason=error.strerror or error,
        ) from error
    address, port = resolved.address, resolved.port
    is_host = (
        resolved.is_local
        and config.parallel.node_rank in ("auto", 0)
        and not is_listening(address, port, timeout_s=1.0)
    )
    endpoint = HostEndpoint(address, port, resolved.local_address, resolved.interface, is_host)
    checks, gradients = examine_host(
        config, options.has_config and is_host, devices.type, devices.count, address
    )
    return inspect_endpoint_and_hosts(endpoint, config.parallel.hosts, checks, gradients)


def examine_host(
    config: Config,
    has_config: bool,
    device_type: str,
    num_ranks: int,
    endpoint_address: str | None = None,
) -> tuple[list[CheckResult], int | None]:
    """Check everything that needs no second rank.

    Args:
        has_config: see :class:`DoctorOptions`.
        num_ranks: on this host.
        endpoint_address: address of the rendezvous endpoint; None on a single host.

    Returns:
        The checks, and the bytes of the config's gradients (None: not known).
    """
    args = config.train_args
    profile = _profile(config) if has_config else None
    sizes = None if profile is None else _sizes(config, profile)
    has_accelerator = device_type != "cpu"
    has_several_hosts = endpoint_address is not None
    checks = [
        check_packages(config),
        check_driver(config.parallel.device),
        check_memory(),
        check_threads(num_ranks),
        check_clock(has_several_hosts),
        check_frequency(),
        check_shared_memory(num_ranks, args.num_loader_processes(device_type), has_accelerator),
        check_open_files(),
        check_host_name(has_several_hosts),
        check_interface(endpoint_address),
        check_port(),
        check_writing("cache", cache_dir()),
    ]
    if has_config:
        folder = Path(config.output_dir)
        checks.append(check_writing("output_dir", folder))
        checks.append(
            check_disk(
                folder, sizes[0] if sizes else None, sizes[1] if sizes else 0, args.save_total_limit
            )
        )
    layers = None if profile is None else check_layers(profile, config, device_type)
    checks += [] if layers is None else [layers]
    if has_accelerator:
        checks.append(_peer_copies(num_ranks, device_type))
    return checks, sizes[2] if sizes else None


def _profile(config: Config) -> ModelProfile | None:
    """Return the model as `paceline plan` describes it, or None if it cannot be described."""
    try:
        return describe(config)
    except PacelineError as error:
        logger.info("the size of the model is not known: %s", error.paragraph())
        return None


def _sizes(config: Config, profile: ModelProfile) -> tuple[int, int, int]:
    """Return the bytes of a checkpoint, of `model/` and of the gradients, as `paceline plan` counts
    them."""
    shape = profile.shape
    trained = sum(tensor.size_bytes for tensor in shape.trained)
    state = shape.optimizer.element_bytes * shape.trained_elements
    model = trained if config.lora.enable else sum(tensor.size_bytes for tensor in shape.parameters)
    return trained + state, model, trained


def _peer_copies(count: int, device_type: str) -> CheckResult:
    if count < 2:
        return CheckResult.passed("peer_copies", "one device")
    corrupt = check_peer_copies(count, device_type)
    if corrupt:
        pairs = ", ".join(f"{source} → {target}" for source, target in corrupt)
        return CheckResult.error(
            "peer_copies",
            f"copies between devices arrive corrupted: {pairs}",
            "set NCCL_P2P_DISABLE=1, and see the driver's notes on IOMMU and ACS (PCI access"
            " control)",
        )
    return CheckResult.passed(
        "peer_copies", f"{counted(count * (count - 1), 'pair')} of devices, all intact"
    )


# -- ranks
def examine_rank(exam: HostExam, env: RankEnv, stop: StopFlag) -> ExitRecord:
    """Measure the network with the other ranks. A collective."""
    checks: list[CheckResult] = []
    gradients = exam.gradient_bytes
    between: DoctorReport = {}
    if exam.checks_host:
        checks, gradients, between, fatal = _check_hosts(exam, env)
        report: DoctorReport = {
            "checks": [check.as_dict() for check in checks],
            "links": [],
            "all_reduce": None,
            **between,
        }
        if fatal or env.world_size == 1:
            return ExitRecord("done", report=report if env.rank == 0 else None)
    world = init_communicator(env, exam.device_type, _TIMEOUT_S)
    try:
        network = measure_network(world)
        checks += check_links(network, gradients)
        rates = measure_on_ranks(world)
        checks += check_rates(rates)
        report = {
            "checks": [check.as_dict() for check in checks],
            "links": [pair.record() for pair in network.pairs],
            "all_reduce": cast(
                AllReduceRecord,
                {
                    **asdict(network.all_reduce),
                    "num_hosts": len(set(network.hosts)),
                    "busy_latency_s": busy_latency_s(world),
                },
            ),
            "rates": [each.record() for each in rates],
            **between,
        }
        return ExitRecord("done", report=report if world.is_rank_zero else None)
    finally:
        world.close()


def examine_member(exam: HostExam, member: "Membership", stop: StopFlag) -> ExitRecord:
    """Do the same as :func:`examine_rank` on a rank of several hosts. A failure is final: no
    restarts."""
    return replace(run_guarded(exam, member.round.env, stop, examine_rank), is_final=True)


def _check_hosts(
    exam: HostExam, env: RankEnv
) -> tuple[list[CheckResult], int | None, DoctorReport, bool]:
    """Under an outer launcher, check each host from its local rank 0 and measure between hosts.

    Returns:
        The checks, the size of the gradients, the measurements between hosts, and whether a run
        would fail.
    """

    def examine(endpoint_address: str | None) -> tuple[list[CheckResult], int | None]:
        return examine_host(
            exam.config,
            exam.has_config and env.rank == 0,
            exam.device_type,
            env.local_world_size,
            endpoint_address,
        )

    if env.world_size == env.local_world_size:
        checks, gradients = examine(None) if env.rank == 0 else ([], None)
        return checks, gradients, {}, False
    report, fatal = inspect_from_ranks(env, examine)
    if report is None:
        return [], None, {}, fatal
    return (
        report.checks,
        report.gradient_bytes,
        {"host_links": report.links, "hosts": report.hosts},
        fatal,
    )


def _on_ranks(
    options: DoctorOptions,
    devices: Devices,
    outer: RankEnv | None,
    gradient_bytes: int | None = None,
) -> ExitRecord:
    config = options.loaded.config
    exam = HostExam(config, devices.type, options.has_config, outer is not None, gradient_bytes)
    if outer is not None:
        stop = StopFlag()
        stop.install(sigint=True)
        return run_guarded(exam, outer, stop, examine_rank)
    if config.parallel.hosts != (1, 1):
        from paceline.cluster.elastic import HostAgent

        return HostAgent(config, devices.count, examine_member, exam).run()
    launcher = LocalLauncher(exam, devices.count, examine_rank)
    launcher.on_stop = "ending"
    return launcher.run()


def _devices(options: DoctorOptions, outer: RankEnv | None) -> Devices:
    parallel = options.loaded.config.parallel
    if options.num_ranks is not None:
        # `--ranks` alone means GPUs if there are any, else CPU ranks.
        device = (
            "cpu" if parallel.device == "auto" and accelerators()[0] is None else parallel.device
        )
        parallel = parallel.model_copy(
            update={"num_gpus": options.num_ranks, "mode": "auto", "device": device}
        )
    devices = choose_devices(
        parallel,
        None if outer is None else outer.local_world_size,
        uses_one_device(parallel),
    )
    for _, text in devices.notices:
        logger.info(text)
    return devices


def _alone(device_type: str) -> DoctorReport:
    """Measure the rates of a single device in this process."""
    rates = [measure_rates(torch.device(device_type))]
    return {
        "checks": [check.as_dict() for check in check_rates(rates)],
        "links": [],
        "all_reduce": None,
        "rates": [each.record() for each in rates],
    }


def _save_profile(device_type: str, link: AllReduceRecord | None, rates: list[RatesRecord]) -> None:
    """Save the measurements as this machine's profile, which the planner reads."""
    if link is None and not rates:
        return
    measured = None
    if link is not None:
        measured = profile.MeasuredLink(
            num_ranks=link["num_ranks"],
            num_hosts=link["num_hosts"],
            latency_s=link["latency_s"],
            bandwidth_bytes_s=link["bandwidth_bytes_s"],
            busy_latency_s=link["busy_latency_s"],
        )
    try:
        path = profile.save(device_type, measured, [profile.rates_from(each) for each in rates])
    except OSError as error:
        logger.warning("the measurements could not be saved for `paceline plan`: %s", error)
    else:
        logger.info("saved the measurements for `paceline plan`: %s", path)
