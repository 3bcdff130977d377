"""The memory and the time of set-ups that Paceline may not train."""
