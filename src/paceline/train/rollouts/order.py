"""The order of prompts for which several completions are generated."""

import numpy as np

from paceline.data.order.base import Keys, Order, keys_of
from paceline.data.order.samples import SampleOrder


class CompletionOrder(Order):
    """The prompts of each step, each as often as it has completions. An epoch has each prompt once;
    its last step may have fewer prompts. Several steps in a row may have the same prompts.

    Args:
        num_prompts: number of prompts.
        batch_size: number of completions of a global batch.
        num_generations: number of completions of a prompt.
        num_iterations: number of steps that have the same prompts.
        lengths: as for :class:`~paceline.data.order.base.Order`.
    """

    steps_per_epoch: int

    def __init__(
        self,
        num_prompts: int,
        batch_size: int,
        seed: int,
        num_generations: int,
        num_iterations: int,
        lengths: np.ndarray | None = None,
        shuffle: bool = True,
    ) -> None:
        self.prompts_per_step = batch_size // num_generations
        self._prompts = SampleOrder(num_prompts, self.prompts_per_step, seed, None, shuffle)
        steps = self._prompts.steps_per_epoch * num_iterations
        super().__init__(num_prompts, batch_size, seed, steps, lengths)
        self.num_generations, self.num_iterations = num_generations, num_iterations
        self._single = SampleOrder(num_prompts, 1, seed, None, shuffle)

    def first_step(self, step: int) -> int:
        """Return the first of the steps that have the same prompts as ``step``."""
        return step - step % self.num_iterations

    def prompts(self, step: int) -> np.ndarray:
        """Return the indices of the prompts of a step, int64 [prompts]."""
        return self._prompts.global_batch(step // self.num_iterations)[:, 1]

    def prompts_from(self, position: int, count: int) -> np.ndarray:
        """Return consecutive prompts, counted from 0 over all epochs, int64 [count]."""
        keys = [self._single.global_batch(position + number) for number in range(count)]
        return np.concatenate(keys)[:, 1]

    def global_batch(self, step: int) -> Keys:
        epoch, _ = self._prompts.position(step // self.num_iterations)
        return keys_of(epoch, self.prompts(step).repeat(self.num_generations))

    def rows_read(self, step: int) -> int:
        return sum(
            self._prompts.rows_read(number) * self.num_generations * times
            for number, times in self._full_and_partial(step)
        )

    def times_read(self, step: int) -> np.ndarray:
        times = self._prompts.times_read(-(-step // self.num_iterations))
        return times * self.num_generations

    def _full_and_partial(self, step: int) -> list[tuple[int, int]]:
        """Return pairs of a number of rollouts and how many updates have used all of them up to
        ``step``, without the updates of other pairs."""
        rollouts, updates = divmod(step, self.num_iterations)
        return [(rollouts, self.num_iterations - updates), (rollouts + (updates > 0), updates)]
