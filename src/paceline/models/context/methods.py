"""The names of the methods of context parallelism."""

#: Blocks of keys and values travel while others are computed.
RING = "ring"
#: Each rank computes some heads of all tokens.
ULYSSES = "ulysses"
#: Each rank gets all keys and values.
GATHER = "gather"
METHODS = (RING, ULYSSES, GATHER)
