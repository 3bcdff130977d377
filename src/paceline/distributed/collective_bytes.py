"""The bytes that a rank sends in a collective. Imports no torch."""


def all_reduce_bytes(size_bytes: float, num_ranks: int) -> int:
    """Return the number of bytes that a rank sends in a bandwidth-optimal all-reduce: 2(N-1)/N ×
    size (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    2009, section 3)."""
    return round(2 * (num_ranks - 1) / num_ranks * size_bytes)


def scatter_bytes(size_bytes: float, num_ranks: int) -> int:
    """Return the number of bytes that a rank sends in a reduce-scatter of ``size_bytes``, or in an
    all-gather to that size: half of an all-reduce."""
    return round((num_ranks - 1) / num_ranks * size_bytes)
