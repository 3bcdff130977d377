"""Preference training: DPO, ORPO, KTO and SimPO."""
