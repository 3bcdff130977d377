"""ZeRO stages 2 and 3 by FSDP2."""
