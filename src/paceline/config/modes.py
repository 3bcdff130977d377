"""Accepted spellings of `parallel.mode`: `ZeRO-3`, `FSDP2`, `deepspeed_zero2`, `tp` and others."""

import re

#: Mode → its spellings, without separators.
_SPELLINGS = {
    "auto": "auto",
    "single": "single none no singledevice singlegpu onedevice",
    "dp": "dp dataparallel",
    "ddp": "ddp distributeddataparallel multigpu multicpu multinpu multixpu zero0 noshard",
    "zero1": "zero1 zeroredundancyoptimizer shardedoptimizer zerostage1",
    "zero2": "zero2 shardgradop zerostage2",
    "zero3": (
        "zero3 zerostage3 fsdp fsdp1 fsdp2 fullshard fullyshard fullyshardeddataparallel hsdp"
        " hybridshard"
    ),
    "deepspeed": "deepspeed ds",
    "tensor": "tensor tp tensorparallel tensorparallelism",
    "pipeline": "pipeline pp pipelineparallel pipelineparallelism",
    "context": "context cp contextparallel contextparallelism",
    "hybrid": "hybrid 3d nd",
    "local_sgd": "localsgd",
    "diloco": "diloco",
    "parameter_server": "parameterserver ps rpc",
}
MODES = tuple(_SPELLINGS)
_MODES = {spelling: mode for mode, names in _SPELLINGS.items() for spelling in names.split()}
#: `deepspeed_zero2`, `deepspeed-stage-3-offload`, `ds_z3`, `zero3_offload`
_STAGE = re.compile(r"^(deepspeed|ds)?(?:zero|stage|zerostage|z)([0-3])(?:cpu)?(offload)?$")


def read_mode(text: str) -> dict[str, str | int]:
    """Return the settings of `parallel` for a spelling of the mode, including the mode itself.

    A custom strategy (``./file.py:SPEC``) and an unknown spelling are returned unchanged; the
    registry of strategies rejects the latter.
    """
    text = text.strip()
    plain = _plain(text)
    stage = _STAGE.match(plain)
    if plain not in _MODES and stage is not None:
        return stage_settings(int(stage[2]), deepspeed=bool(stage[1]), offload=bool(stage[3]))
    return {"mode": _MODES.get(plain, text)}


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text).lower()


def stage_settings(stage: int, deepspeed: bool, offload: bool = False) -> dict[str, str | int]:
    """Return the settings of `parallel` for a ZeRO stage, run by DeepSpeed or by Paceline's own
    strategies.

    Stage 0 shards nothing, which is `ddp`. Below stage 3, DeepSpeed offloads only the optimizer
    state.
    """
    if stage == 0:
        return {"mode": "ddp"}
    settings: dict[str, str | int] = (
        {"mode": "deepspeed", "deepspeed_stage": stage} if deepspeed else {"mode": f"zero{stage}"}
    )
    if offload:
        settings["cpu_offload"] = "optimizer" if deepspeed and stage < 3 else "all"
    return settings


def is_hsdp(text: str) -> bool:
    """Return whether a spelling of the mode requests shards within each host and replicas across
    hosts."""
    return _plain(text) in ("hsdp", "hybridshard")
