"""The passes and checks that :mod:`paceline.launch.plan` lists. A pass takes a draft of the run
and returns the next one; a check raises ConfigError, or returns the notices to log, if any."""
