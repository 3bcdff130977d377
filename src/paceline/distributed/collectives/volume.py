"""How much a collective moves: numbers alone, no torch here."""


def all_reduce_bytes(size_bytes: float, num_ranks: int) -> int:
    """Bytes one rank sends in a bandwidth-optimal all-reduce of ``size_bytes``: 2(N-1)/N of them
    (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009,
    section 3)."""
    return round(2 * (num_ranks - 1) / num_ranks * size_bytes)


def scatter_bytes(size_bytes: float, num_ranks: int) -> int:
    """Bytes one rank sends in a reduce-scatter of, or an all-gather to, ``size_bytes``: half of an
    all-reduce."""
    return round((num_ranks - 1) / num_ranks * size_bytes)
