"""The section ``preference`` of the schema: the losses of preference training."""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from paceline.config.schema.base import CombinationError, Section
from paceline.config.schema.tasks import ANSWER_TASKS
from paceline.core.texts import UserText

PairLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
SingleLoss = Literal["kto", "apo_zero_unpaired"]
#: The losses of each task that has a choice, the default one first.
LOSSES: dict[str, tuple[str, ...]] = {"dpo": get_args(PairLoss), "kto": get_args(SingleLoss)}
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
#: Losses that compare the two answers of a pair, which other divergences are defined for.
_OF_DIFFERENCES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft",
)  # fmt: skip
#: The settings of `task: reward`.
REWARD_KEYS = ("center_rewards_coefficient", "disable_dropout")
#: Settings that only some tasks use, and of `dpo` only some losses (empty: all).
_USES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "label_smoothing": (("dpo", "simpo"), ("robust", "exo_pair")),
    "f_divergence_type": (("dpo",), ()),
    "f_alpha_divergence_coef": (("dpo",), ()),
    "discopop_tau": (("dpo",), ("discopop",)),
    "desirable_weight": (("kto",), ()),
    "undesirable_weight": (("kto",), ()),
    "simpo_gamma": (("simpo",), ()),
    "cpo_alpha": (("simpo",), ()),
}
_SORTED = ("aot", "aot_pair", "aot_unpaired")


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _check_losses(names: list[str]) -> list[str]:
    known = [name for losses in LOSSES.values() for name in losses]
    for name in names:
        if name in _SORTED:
            raise ValueError(
                UserText(
                    "`{name}` is not supported: it sorts the rewards of a micro-batch, so the"
                    " result would depend on how the batch is divided over the ranks",
                    code="loss-sorts-rewards",
                    name=name,
                )
            )
        if name not in known:
            raise ValueError(
                UserText(
                    "`{name}` does not exist; choose from {known}",
                    code="unknown-loss",
                    name=name,
                    known=", ".join(known),
                )
            )
    return names


Losses = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_check_losses)]


class Preference(Section):
    """Settings of `task: dpo`, `orpo`, `kto`, `simpo` and `reward`, named as in TRL."""

    beta: float = Field(
        0.1,
        gt=0,
        description=(
            "Strength of the preference: for `dpo` and `kto` the deviation from the reference model"
            " costs more the higher it is; for `orpo` the weight of the odds ratio; for `simpo` the"
            " scale of the rewards (2.0 to 2.5 in its paper)."
        ),
    )
    loss_type: Losses | None = Field(
        None,
        description=(
            "Loss of `dpo`: `sigmoid` (default), `hinge`, `ipo`, `exo_pair`, `nca_pair`, `robust`,"
            " `bco_pair`, `sppo_hard`, `apo_zero`, `apo_down`, `discopop`, `sft`, `sigmoid_norm`,"
            " or a list whose weighted sum is trained; of `kto`: `kto` (default) or"
            " `apo_zero_unpaired`."
        ),
    )
    loss_weights: list[float] | None = Field(
        None, description="Weights of the losses in `loss_type`. Default: 1 each."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description=(
            "Assumed share of pairs whose answers are exchanged, for `robust` and `exo_pair`, and"
            " for `task: simpo`."
        ),
    )
    f_divergence_type: Divergence = Field(
        "reverse_kl",
        description="`dpo`: divergence from the reference model that the rewards are derived from.",
    )
    f_alpha_divergence_coef: float = Field(
        0.5, description="The exponent of `f_divergence_type: alpha_divergence`."
    )
    discopop_tau: float = Field(0.05, gt=0, description="Temperature of the loss `discopop`.")
    desirable_weight: float = Field(
        1.0, ge=0, description="`kto`: weight of the loss of desirable answers."
    )
    undesirable_weight: float = Field(
        1.0, ge=0, description="`kto`: weight of the loss of undesirable answers."
    )
    simpo_gamma: float = Field(
        0.5, ge=0, description="`simpo`: margin by which the rewards of a pair should differ."
    )
    cpo_alpha: float = Field(
        0.0,
        ge=0,
        description=(
            "`simpo`: weight of the cross entropy of the preferred answers (CPO-SimPO); TRL's"
            " CPOTrainer defaults to 1."
        ),
    )
    center_rewards_coefficient: float | None = Field(
        None,
        ge=0,
        description=(
            "`reward`: weight of the squared sum of the rewards of a pair, which keeps the mean of"
            " the rewards near 0 (Eisenstein et al., 2023; 0.01 there). Default: none."
        ),
    )
    disable_dropout: bool = Field(
        True, description="Turn off the dropout layers of the model and of the adapters."
    )

    def unused(self, task: str) -> list[str]:
        """Return the names of the settings that have been changed and that a task does not use."""
        losses = self.loss_type or [LOSSES["dpo"][0]]

        def is_used(name: str) -> bool:
            tasks, losses_of_dpo = _USES.get(name, (ANSWER_TASKS, ()))
            is_of_loss = not losses_of_dpo or not set(losses_of_dpo).isdisjoint(losses)
            return task in tasks and (task != "dpo" or is_of_loss)

        changed = [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        ]
        return [name for name in changed if not is_used(name)]

    def losses(self, task: str) -> list[tuple[str, float]]:
        """Return the losses of ``dpo`` or ``kto`` with their weights."""
        names = self.loss_type or [LOSSES[task][0]]
        return list(zip(names, self.loss_weights or [1.0] * len(names), strict=True))

    def check_task(self, task: str) -> None:
        """Raise CombinationError if a setting is not supported with a task."""
        names = self.loss_type
        known = LOSSES.get(task)
        if names and known is None and task in ANSWER_TASKS:
            raise CombinationError(
                UserText(
                    "preference.loss_type is not supported with task: {task}, which has a single"
                    " loss; remove it",
                    code="loss-type-with-task",
                    task=task,
                ),
                "task",
            )
        if task == "reward":
            for name, field in type(self).model_fields.items():
                if name in REWARD_KEYS or getattr(self, name) == field.default:
                    continue
                raise CombinationError(
                    UserText(
                        "preference.{name} is not supported with task: reward, which has"
                        " {reward_keys}; remove it",
                        code="preference-key-with-reward",
                        name=name,
                        reward_keys=", ".join(REWARD_KEYS),
                    ),
                    "task",
                )
        elif self.center_rewards_coefficient is not None:
            raise CombinationError(
                UserText(
                    "preference.center_rewards_coefficient is not supported with task: {task}: it"
                    " belongs to task: reward; remove it",
                    code="center-rewards-with-task",
                    task=task,
                ),
                "task",
            )
        for name in names or []:
            if known is not None and name not in known:
                raise CombinationError(
                    UserText(
                        "preference.loss_type: {name} is not supported with task: {task}; choose"
                        " from {known}",
                        code="loss-of-another-task",
                        name=name,
                        task=task,
                        known=", ".join(known),
                    ),
                    "task",
                )

    @model_validator(mode="after")
    def _check(self) -> "Preference":
        names = self.loss_type or []
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise CombinationError(
                UserText(
                    "loss_weights has {num_loss_weights} values, and loss_type {num_names}: give"
                    " one weight per loss",
                    code="wrong-number-of-loss-weights",
                    num_loss_weights=len(self.loss_weights),
                    num_names=len(names),
                ),
                "preference.loss_type",
                "preference.loss_weights",
            )
        if len(names) > 1 and any(name in LOSSES["kto"] for name in names):
            raise CombinationError(
                UserText(
                    "loss_type of task: kto is a single loss, not a list", code="kto-loss-list"
                ),
                "task",
                "preference.loss_type",
            )
        if "exo_pair" in names and not self.label_smoothing:
            raise CombinationError(
                UserText(
                    "loss_type: exo_pair requires label_smoothing above 0, e.g. 0.001: it compares"
                    " with a distribution over both answers",
                    code="exo-pair-without-smoothing",
                ),
                "preference.loss_type",
                "preference.label_smoothing",
            )
        others = [name for name in names if name not in _OF_DIFFERENCES]
        if others and self.f_divergence_type != "reverse_kl":
            raise CombinationError(
                UserText(
                    "f_divergence_type: {f_divergence_type} is not supported with loss_type:"
                    " {others}; it is defined for {of_differences}",
                    code="divergence-with-loss",
                    f_divergence_type=self.f_divergence_type,
                    others=others[0],
                    of_differences=", ".join(_OF_DIFFERENCES),
                ),
                "preference.loss_type",
                "preference.f_divergence_type",
            )
        return self
