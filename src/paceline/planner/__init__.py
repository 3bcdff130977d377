"""What a run takes before it starts: memory, traffic and time under every mode, and the mode that
``auto`` takes.

Importing the package imports no torch.
"""
