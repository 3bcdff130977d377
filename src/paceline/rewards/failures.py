"""The errors of a run whose rewards cannot be computed."""

from paceline.config.schema.rewards import RewardEntry
from paceline.core.errors import RunError
from paceline.rewards.group import CompletionGroup
from paceline.rewards.protocol import RewardProblem


def _setting(entry: RewardEntry) -> str:
    return f"function: {entry.function}" if entry.function else f"name: {entry.name}"


def _place(group: CompletionGroup | None) -> str:
    return "no prompt" if group is None else group.place


def describe_problem(
    entry: RewardEntry, group: CompletionGroup | None, step: int, problem: RewardProblem
) -> RunError:
    """Return the error for a function that raised, or that returned no valid rewards."""
    setting, place, reason = _setting(entry), _place(group), problem["reason"]
    if problem["code"] == "reward-function-failed":
        return RunError(
            "the reward `{setting}` failed at step {step}, with the completions of {place}:"
            " {reason} ({line})",
            code="reward-function-failed",
            fix="correct it, and resume the run; the traceback is in the log of the rank",
            setting=setting,
            step=step,
            place=place,
            reason=reason,
            line=problem["line"],
        )
    if problem["code"] == "rewards-not-a-list":
        return RunError(
            "the reward `{setting}` returned {reason} at step {step}, for the completions of"
            " {place}",
            code="rewards-not-a-list",
            allowed="a list with one number or None for each completion",
            setting=setting,
            step=step,
            place=place,
            reason=reason,
        )
    if problem["code"] == "wrong-number-of-rewards":
        return RunError(
            "the reward `{setting}` returned {reason} values at step {step} for the {expected}"
            " completions of {place}",
            code="wrong-number-of-rewards",
            allowed="a list with one number or None for each completion",
            setting=setting,
            step=step,
            place=place,
            reason=reason,
            expected=0 if group is None else len(group.completions),
        )
    if problem["code"] == "reward-not-finite":
        return RunError(
            "the reward `{setting}` returned {reason} at step {step}, for a completion of {place}",
            code="reward-not-finite",
            allowed="finite numbers of 32 bits; None for a completion without a reward",
            setting=setting,
            step=step,
            place=place,
            reason=reason,
        )
    return RunError(
        "the reward `{setting}` returned {reason} instead of a number at step {step}, for a"
        " completion of {place}",
        code="reward-not-a-number",
        allowed="numbers, true and false; None for a completion without a reward",
        setting=setting,
        step=step,
        place=place,
        reason=reason,
    )


def describe_environment(
    text: str, place: str, index: int, step: int, problem: RewardProblem
) -> RunError:
    """Return the error for an environment that raised, or whose ``reset`` returned something else
    than a text.

    Args:
        text: the class, as in the config.
        place: file and row of the prompt.
        index: number of the completion in its group.
    """
    if problem["code"] == "not-an-observation":
        return RunError(
            "the environment `{text}` cannot be used at step {step}, for completion {index} of"
            " {place}: {reason}",
            code="not-an-observation",
            allowed="`reset` may return None, or a text that is added to the prompt",
            text=text,
            step=step,
            index=index,
            place=place,
            reason=problem["reason"],
        )
    return RunError(
        "the environment `{text}` failed at step {step}, for completion {index} of {place}:"
        " {reason} ({line})",
        code="environment-failed",
        fix="correct it, and resume the run; the traceback is in the log of the rank",
        text=text,
        step=step,
        index=index,
        place=place,
        reason=problem["reason"],
        line=problem["line"],
    )


def describe_environment_hang(
    text: str, place: str, index: int, step: int, limit_s: float
) -> RunError:
    """Return the error for an environment that took too long. Arguments as for
    :func:`describe_environment`."""
    return RunError(
        "the environment `{text}` took more than {limit_s} s at step {step}, for completion {index}"
        " of {place}",
        code="environment-hangs",
        fix=(
            "raise `grpo.reward_timeout_s`, or correct it; the log of the rank shows the lines that"
            " it executed"
        ),
        text=text,
        limit_s=f"{limit_s:g}",
        step=step,
        index=index,
        place=place,
    )


def describe_environment_exit(
    text: str, place: str, index: int, step: int, end: EOFError
) -> RunError:
    """Return the error for an environment whose process ended. Arguments as for
    :func:`describe_environment`."""
    return RunError(
        "the process of the environment `{text}` {exit} at step {step}, for completion {index} of"
        " {place}",
        code="environment-process-ended",
        fix="correct the class: it must neither end the process nor use too much memory",
        text=text,
        exit=str(end),
        step=step,
        index=index,
        place=place,
    )


def describe_hang(
    entry: RewardEntry, group: CompletionGroup | None, step: int, limit_s: float
) -> RunError:
    """Return the error for a reward that took too long."""
    return RunError(
        "the reward `{setting}` took more than {limit_s} s at step {step}, for the completions of"
        " {place}",
        code="reward-hangs",
        fix=(
            "raise `grpo.reward_timeout_s`, or correct it; the log of the rank shows the lines that"
            " it executed"
        ),
        setting=_setting(entry),
        limit_s=f"{limit_s:g}",
        step=step,
        place=_place(group),
    )


def describe_exit(
    entry: RewardEntry, group: CompletionGroup | None, step: int, end: EOFError
) -> RunError:
    """Return the error for a process that ended."""
    return RunError(
        "the process that computed the reward `{setting}` {exit} at step {step}, with the"
        " completions of {place}",
        code="reward-process-ended",
        fix="correct the function: it must neither end the process nor use too much memory",
        setting=_setting(entry),
        exit=str(end),
        step=step,
        place=_place(group),
    )
