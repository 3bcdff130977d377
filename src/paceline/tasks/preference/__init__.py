"""Preference training: DPO, ORPO, KTO, SimPO and reward models."""
