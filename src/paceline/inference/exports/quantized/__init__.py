"""Exports with quantized weights, through auto-round."""
