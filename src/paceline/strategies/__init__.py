"""The catalogue: every way to train, each in its own folder. The core does not import it;
:mod:`paceline.parallel.registry` names the specs."""
