"""How the optimizer of a run is built, and the optimizers that torch does not have, or not in the
form that the strategies need."""
