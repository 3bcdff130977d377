"""Show which samples DistributedSampler gives to each rank, and in which order.

Run: python examples/learn/03_sampler.py
"""

from collections import Counter

from torch.utils.data import DistributedSampler

SAMPLES, RANKS = range(10), 4


def show(title, epochs=(0,), call_set_epoch=True, **options):
    """Print the samples of each rank, one line per epoch."""
    samplers = [DistributedSampler(SAMPLES, RANKS, rank, **options) for rank in range(RANKS)]
    print(title)
    for epoch in epochs:
        if call_set_epoch:
            for sampler in samplers:
                sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        assert len({len(share) for share in shares}) == 1  # all ranks make as many steps
        counts = Counter(sample for share in shares for sample in share)
        twice = sorted(sample for sample in counts if counts[sample] > 1)
        never = sorted(set(SAMPLES) - set(counts))
        print(f"  epoch {epoch}: {shares}  twice {twice}  never {never}")


show("shuffle=False", shuffle=False)
show("shuffle=False, drop_last=True", shuffle=False, drop_last=True)
show("shuffle=True, without set_epoch", epochs=(0, 1), call_set_epoch=False)
show("shuffle=True, with set_epoch", epochs=(0, 1))
