"""A mode as a folder of `paceline/strategies`, for `test_new_mode.py`."""
