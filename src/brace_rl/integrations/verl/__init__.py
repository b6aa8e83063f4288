"""BRACE in verl, without a fork: see ``docs/verl.md``.

verl loads :mod:`brace_rl.integrations.verl.plugin` in every process that imports it. That module, and this one, import
neither verl nor torch.
"""
