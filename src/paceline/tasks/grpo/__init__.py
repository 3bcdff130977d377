"""`task: grpo` and `task: rloo`: reinforcement learning on completions that the model generates."""
