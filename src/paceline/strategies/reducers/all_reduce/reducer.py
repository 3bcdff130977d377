"""Sum buckets of gradients over the replicas with one of Paceline's all-reduce algorithms."""

import torch

from paceline.distributed.comm_thread import PendingComm
from paceline.parallel.buckets.reducer import GradientReducer
from paceline.strategies.reducers.all_reduce.run import all_reduce


class AllReduceReducer(GradientReducer):
    """Sums each bucket with ``parallel.all_reduce_algorithm``."""

    def start(self, number: int, flat: torch.Tensor) -> PendingComm:
        algorithm = self.config.parallel.all_reduce_algorithm
        return self.comm_thread.submit(lambda group: all_reduce(group, flat, algorithm))
