"""``paceline data count``: exact word and token counts over all ranks."""
