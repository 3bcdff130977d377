"""Choose the method of context parallelism. Imports no torch."""

#: Names of the methods.
RING, ULYSSES, GATHER = "ring", "ulysses", "gather"
METHODS = (RING, ULYSSES, GATHER)
