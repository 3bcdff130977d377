"""``paceline plan --assume``: estimate a set-up that Paceline may not train.

Imports no torch.
"""
