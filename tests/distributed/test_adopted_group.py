"""A process group that exists before a run starts."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow


def adopt(world):
    """Adopt the default process group, which `init_communicator` did not create, and try to adopt
    it with another rank. Return the sum over the adopted group, the error, and a sum after that."""
    import torch
    import torch.distributed as dist

    from paceline.core.errors import RunError
    from paceline.distributed.communicator import init_communicator
    from paceline.distributed.environment import RankEnv

    adopted = init_communicator(RankEnv(world.rank, 2, world.rank, 2), "cpu", 30.0)
    total = adopted.sum(world.rank + 1.0)
    adopted.close()
    try:
        init_communicator(RankEnv(1 - world.rank, 2, world.rank, 2), "cpu", 30.0)
    except RunError as error:
        error_message = str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is still open
    return total, error_message, float(tensor)


def test_adopts_existing_group_and_rejects_mismatched_rank():
    for rank, (total, error_message, after) in enumerate(run_ranks(adopt, 2)):
        assert total == [3.0]
        assert f"rank {rank} of 2 in the existing process group" in error_message
        assert f"rank {1 - rank} of 2 in the environment" in error_message
        assert after == 2.0
