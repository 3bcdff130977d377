"""`paceline explain grpo`: how the rewards of a group of completions become advantages and the
clipped loss, with the functions of `task: grpo`."""

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from paceline.config.schema.grpo import Grpo
from paceline.distributed.traffic import log_calls
from paceline.explain import training
from paceline.explain.rank_topic import RankFrame, RankTopic
from paceline.explain.record import Cell, Check, DrawnRow, Tone, cells_of, number_text
from paceline.messages.pages import PageText
from paceline.rollouts.advantages import AdvantageRule, compute_advantages
from paceline.strategies.ddp.strategy import DDPStrategy
from paceline.tasks.grpo.objective import GroupObjective
from paceline.tasks.grpo.tokens import CompletionTokens

_END = "."
_LETTERS = "aeikst" + _END
_VOWELS = "aei"
_COMPLETIONS = 4
_MAX_TOKENS = 4
#: Multiplied by the number of ranks: each has another prompt, and thus its own share of the table.
_LEARNING_RATE = 2.5
_TOLERANCE = 1e-4
_SETTINGS = Grpo(num_generations=_COMPLETIONS, max_completion_length=_MAX_TOKENS, num_iterations=2)
_LOWEST, _HIGHEST = 1 - _SETTINGS.epsilon, 1 + _SETTINGS.epsilon
_ABOUT = (
    "Each rank has a prompt, and the model answers it several times. The completions of a prompt"
    " form a group. The advantage of a completion is its reward minus the mean of the group,"
    " divided by the standard deviation: no second model is needed to tell what reward to expect."
    " The loss of a token is the advantage of its completion times the ratio of its new to its old"
    " probability, with a minus sign. The ratio is clipped, so that a token whose probability has"
    " already changed much in the direction of the advantage has no gradient. The model is a table"
    " of next letters; the advantages and the loss are computed by the functions of task: grpo."
)


class GroupPolicyTopic(RankTopic):
    """Update a table of next letters twice on the same completions, one group on each rank.

    The figures: ``ranks, prompts, completions, rewards, means, deviations, advantages`` (of each
    rank), ``total_tokens``, ``ratios`` (of each rank in the second update), ``clipped`` (whether
    the token is clipped), ``losses`` (of both updates) and ``expected_losses`` (computed in another
    way).
    """

    about = _ABOUT

    def run(self) -> None:
        world = self.world
        self.policy = _make_policy()
        self.prompt = _LETTERS[world.rank % (len(_LETTERS) - 1)]
        self.completions = _generate(self.policy, self.prompt, world.rank)
        self.rewards = [_reward(each) for each in self.completions]
        self.advantages: list[float] = compute_advantages(
            np.array([self.rewards]), AdvantageRule()
        )[0].tolist()
        self.old_logps = _logps(self.policy, self.prompt, self.completions).detach()
        num_tokens = sum(map(len, self.completions))
        strategy = DDPStrategy(training.make_config("ddp"), world)
        strategy.setup(self.policy)
        strategy.setup_optimizer(training.build_adamw)
        with self.count_traffic():
            with log_calls() as self.count_calls:
                self.total = int(world.sum(float(num_tokens))[0])
            with log_calls() as self.gradient_calls:
                strategy.forward_backward(self._share_of_loss, 1)
        self.first_ratios = self.ratios
        self._step()
        first = self.share
        self._share_of_loss(0, self.policy)  # the second update is shown up to its loss
        shares = [first, self.share]
        self.losses = [sum(parts) for parts in zip(*self.gather(shares), strict=True)]
        self.title = PageText(
            "GRPO: {count} completions of one prompt on each of {ranks:rank}",
            count=_COMPLETIONS,
            ranks=world.size,
        )

    def _step(self) -> None:
        """Make a step of gradient descent. DDP has added up the gradients of the ranks."""
        weight = self.policy.weight
        assert weight.grad is not None
        with torch.no_grad():
            weight -= _LEARNING_RATE * self.world.size * weight.grad

    def _share_of_loss(self, number: int, module: nn.Module) -> torch.Tensor:
        """Return this rank's share of the loss, and keep the ratios.

        Args:
            number: number of the micro-batch; there is only one.
        """
        logps = _logps(module, self.prompt, self.completions)
        self.ratios = _by_token((logps - self.old_logps).exp(), self.completions)
        share = self._loss_sum(logps) / self.total
        self.share = float(share.detach())
        return share

    def _loss_sum(self, logps: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of this rank's tokens, as the task computes it."""
        tokens = CompletionTokens(
            logps=logps,
            entropies=torch.zeros_like(logps),
            mask=_mask(self.completions),
            advantages=torch.tensor(self.advantages),
            old_logps=self.old_logps,
            sampled_logps=self.old_logps,
            reference_logps=None,
            sum_by_row=lambda values: values.sum(dim=1),
            by_token=lambda values: values[:, None],
        )
        return GroupObjective(_SETTINGS, beta=0.0).loss(tokens)[0]

    def rank_frames(self) -> Iterator[RankFrame]:
        advantages = self._row("advantage", self.advantages)
        yield RankFrame(
            "Rollout: the model answers the prompt of each rank several times. A cell is as wide as"
            " its number of tokens; the full stop ends a completion.",
            (self._texts(),),
            phase="rollout",
            is_key=True,
        )
        yield RankFrame(
            "Rewards: the share of letters that are vowels.",
            (self._texts(), self._row("reward", self.rewards, "new")),
            phase="rewards",
        )
        yield RankFrame(
            "Advantages: reward minus the mean of the group, divided by its standard deviation.",
            (
                self._texts(),
                self._row("reward", self.rewards),
                DrawnRow("group", self._group_cells()),
                self._row("advantage", self.advantages, "new"),
            ),
            phase="rewards",
            is_key=True,
        )
        yield RankFrame(
            PageText("The ranks sum their numbers of tokens: {total} in total.", total=self.total),
            (self._texts(), advantages),
            self.count_calls,
            "tokens",
            phase="update 1",
        )
        yield RankFrame(
            PageText(
                "First update: the weights have not changed since the rollout, so all ratios are 1."
                " The loss is {loss}. The gradient of a token raises its probability if the"
                " advantage is positive, and lowers it if it is negative. The same step from one"
                " letter to the next in several completions gets the sum.",
                loss=number_text(self.losses[0]),
            ),
            (self._texts(), advantages, DrawnRow("ratio", cells_of(self.first_ratios))),
            self.gradient_calls,
            "gradient",
            phase="update 1",
            is_key=True,
        )
        yield RankFrame(
            PageText(
                "Second update on the same completions: the ratios differ. Marked ratios are"
                " clipped at {lowest} or {highest}, and their tokens have no gradient. The loss is"
                " {loss}.",
                lowest=number_text(_LOWEST),
                highest=number_text(_HIGHEST),
                loss=number_text(self.losses[1]),
            ),
            (self._texts(), advantages, DrawnRow("ratio", self._ratio_cells())),
            phase="update 2",
            is_key=True,
        )

    def _texts(self) -> DrawnRow:
        cells = (Cell(f"{self.prompt}→{each}", weight=len(each)) for each in self.completions)
        return DrawnRow("completions", tuple(cells))

    def _row(self, label: str, values: Sequence[float], tone: Tone = "") -> DrawnRow:
        cells = tuple(
            Cell(number_text(value), tone=tone, weight=len(completion))
            for value, completion in zip(values, self.completions, strict=True)
        )
        return DrawnRow(label, cells)

    def _group_cells(self) -> tuple[Cell, ...]:
        mean, deviation = statistics.mean(self.rewards), statistics.stdev(self.rewards)
        return (
            Cell(PageText("mean {mean}", mean=number_text(mean))),
            Cell(PageText("deviation {deviation}", deviation=number_text(deviation))),
        )

    def _ratio_cells(self) -> tuple[Cell, ...]:
        return tuple(
            Cell(number_text(ratio), tone="new" if is_clipped else "")
            for ratio, is_clipped in zip(self.ratios, self._are_clipped(), strict=True)
        )

    def _are_clipped(self) -> list[bool]:
        return [
            ratio > _HIGHEST if advantage > 0 else advantage < 0 and ratio < _LOWEST
            for ratio, advantage in zip(self.ratios, self._token_advantages(), strict=True)
        ]

    def _token_advantages(self) -> list[float]:
        """Return the advantage of each token, from the definition in plain Python."""
        return [
            advantage
            for completion, advantage in zip(
                self.completions, _expected_advantages(self.rewards), strict=True
            )
            for _ in completion
        ]

    def _expected_losses(self) -> list[float]:
        """Return the losses of both updates, token by token in plain Python."""
        losses = []
        for ratios in (self.first_ratios, self.ratios):
            terms = [
                -min(ratio * advantage, max(_LOWEST, min(ratio, _HIGHEST)) * advantage)
                for ratio, advantage in zip(ratios, self._token_advantages(), strict=True)
            ]
            losses.append(sum(self.gather(sum(terms))) / self.total)
        return losses

    def checks(self) -> list[Check]:
        advantages, expected = (
            self.gather_all(self.advantages),
            self.gather_all(_expected_advantages(self.rewards)),
        )
        losses, expected_losses = self.losses, self._expected_losses()
        slopes, expected_slopes = self._slopes()
        return [
            Check(
                "advantages equal (reward - mean) / standard deviation",
                advantages,
                expected,
                _are_close(advantages, expected),
            ),
            Check(
                "losses equal the sums over tokens in plain Python",
                losses,
                expected_losses,
                _are_close(losses, expected_losses),
            ),
            Check(
                "clipped tokens, and those with advantage 0, have no gradient; all others have one",
                slopes,
                expected_slopes,
                slopes == expected_slopes,
            ),
        ]

    def _slopes(self) -> tuple[list[bool], list[bool]]:
        """Return whether the second loss has a gradient at each token of all ranks, and whether it
        should have one."""
        logps = _logps(self.policy, self.prompt, self.completions).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss_sum(logps), logps)
        slopes = [value != 0 for value in _by_token(gradient, self.completions)]
        expected = [
            not is_clipped and advantage != 0
            for is_clipped, advantage in zip(
                self._are_clipped(), self._token_advantages(), strict=True
            )
        ]
        return self.gather_all(slopes), self.gather_all(expected)

    def facts(self) -> dict[str, str]:
        are_clipped = self.gather_all(self._are_clipped())
        return {
            "Tokens": str(self.total),
            "Clipped in the second update": str(sum(are_clipped)),
            "Losses": ", ".join(map(number_text, self.losses)),
        }

    def add_figures(self) -> None:
        self.figures.update(
            prompts=self.gather(self.prompt),
            completions=self.gather(self.completions),
            rewards=self.gather(self.rewards),
            means=self.gather(statistics.mean(self.rewards)),
            deviations=self.gather(statistics.stdev(self.rewards)),
            advantages=self.gather(self.advantages),
            total_tokens=self.total,
            ratios=self.gather(self.ratios),
            clipped=self.gather(self._are_clipped()),
            losses=self.losses,
            expected_losses=self._expected_losses(),
        )


def _make_policy() -> nn.Linear:
    """Return a table of the logits of the next letter."""
    policy = nn.Linear(len(_LETTERS), len(_LETTERS), bias=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        policy.weight.copy_(torch.randn(policy.weight.shape, generator=generator) / 2)
    return policy


def _generate(policy: nn.Module, prompt: str, rank: int) -> list[str]:
    """Return completions that are drawn letter by letter."""
    generator = torch.Generator().manual_seed(rank)
    completions = []
    for _ in range(_COMPLETIONS):
        text = ""
        while len(text) < _MAX_TOKENS and not text.endswith(_END):
            probabilities = policy(_one_hot((prompt + text)[-1])).softmax(dim=-1)
            number = int(torch.multinomial(probabilities, 1, generator=generator))
            text += _LETTERS[number]
        completions.append(text)
    return completions


def _one_hot(letters: str) -> torch.Tensor:
    rows = [[float(letter == each) for each in _LETTERS] for letter in letters]
    return torch.tensor(rows)[0] if len(rows) == 1 else torch.tensor(rows)


def _reward(completion: str) -> float:
    return sum(letter in _VOWELS for letter in completion) / len(completion)


def _logps(policy: nn.Module, prompt: str, completions: Sequence[str]) -> torch.Tensor:
    """Return the log-probabilities of the tokens, padded [completions, tokens]."""
    rows = []
    for text in completions:
        padded = text.ljust(_MAX_TOKENS, _END)
        logps = policy(_one_hot((prompt + padded)[:-1])).log_softmax(dim=-1)
        rows.append((logps * _one_hot(padded)).sum(dim=-1))
    return torch.stack(rows)


def _mask(completions: Sequence[str]) -> torch.Tensor:
    rows = [[float(number < len(text)) for number in range(_MAX_TOKENS)] for text in completions]
    return torch.tensor(rows)


def _by_token(values: torch.Tensor, completions: Sequence[str]) -> list[float]:
    """Return the values of the tokens of all completions, without padding."""
    numbers: list[float] = values.detach()[_mask(completions).bool()].tolist()
    return numbers


def _expected_advantages(rewards: Sequence[float]) -> list[float]:
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def _are_close(values: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(values, expected, strict=True)
    return all(math.isclose(one, two, abs_tol=_TOLERANCE) for one, two in pairs)
