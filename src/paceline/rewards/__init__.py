"""Rewards for the completions of a model: functions of the user, built-in ones, and reward models.

Functions run in processes of their own (:mod:`paceline.rewards.worker`), which a rank starts with a
:class:`~paceline.rewards.scorer.RewardScorer`. Only :mod:`paceline.rewards.reward_model` imports
torch.
"""
