"""A process group that exists before the run."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow


def adopt(world):
    """``world``'s group is the default process group of these two processes: whoever made it was
    not `init_communicator`."""
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
        refused = str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group is still open
    return total, refused, float(tensor)


def test_an_existing_group_is_adopted_and_a_differing_one_is_refused():
    for rank, (total, refused, after) in enumerate(run_ranks(adopt, 2)):
        assert total == [3.0]
        assert f"rank {rank} of 2 in the existing process group" in refused
        assert f"rank {1 - rank} of 2 in the environment" in refused
        assert after == 2.0
