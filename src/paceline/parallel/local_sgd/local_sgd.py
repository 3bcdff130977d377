"""`local_sgd`: workers train on their own, and average their parameters every so many steps."""

import torch

from paceline.parallel.local_sgd.schedule import fragment
from paceline.parallel.local_sgd.strategy import LocalSGDBase
from paceline.parallel.local_sgd.sync import FlatParams, GroupMean, PendingSync


class LocalSGDStrategy(LocalSGDBase):
    """Stich, "Local SGD Converges Fast and Communicates Little" (2019), algorithm 1; with
    ``warmup_steps`` post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
    2020, section 3).

    Overlapped: after k more steps each worker adds to its parameters how far, when the average was
    taken, they lay from it; its steps since then are kept (Zhou et al., "DaSGD: Squeezing SGD
    Parallelization Performance in Distributed Training Using Delayed Averaging", 2020, section 3).
    """

    name = "local_sgd"
    flights_are_shared = False  # each worker's correction

    def depart(self, number: int) -> PendingSync:
        message = self.vector.read(*self.share_of(number))
        own = message.clone() if self.rhythm.overlap else None
        return PendingSync(GroupMean(message, self.far), own)

    def arrive(self, number: int, landed: torch.Tensor) -> None:
        start, stop = fragment(self.vector.size, self.rhythm.fragments, number)
        values = self.hand_on(landed, start, stop)
        if self.rhythm.overlap:
            values = self.vector.read(start, stop).add_(values)
        self.vector.write(start, values)
        if self.local.average_moments:
            for moments in self._moments():
                mean = GroupMean(moments.read(*self.share_of(number)), self.far).value()
                moments.write(start, self.hand_on(mean, start, stop))

    def _moments(self) -> list[FlatParams]:
        """The optimizer's state of each kind that has an element for each of a parameter's."""
        states = [self.optimizer.state.get(one, {}) for one in self.trained.values()]
        kinds = sorted({key for state in states for key in state} - {"step"})
        shapes = [one.shape for one in self.trained.values()]
        found = []
        for kind in kinds:
            tensors = [state.get(kind) for state in states]
            if all(
                isinstance(one, torch.Tensor) and one.shape == shape
                for one, shape in zip(tensors, shapes, strict=True)
            ):
                found.append(FlatParams(tensors))
        return found
