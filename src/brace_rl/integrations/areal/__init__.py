"""BRACE in AReaL, without a fork: see ``docs/areal.md``.

A training script takes :func:`brace_rl.integrations.areal.trainer.with_brace` and
:class:`brace_rl.integrations.areal.trainer.BracePPOTrainer`. This module imports neither AReaL nor torch.
"""
