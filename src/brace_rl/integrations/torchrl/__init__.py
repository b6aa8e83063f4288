"""BRACE in TorchRL: see ``docs/torchrl.md``. Users want :mod:`brace_rl.integrations.torchrl.estimator`.

That module imports TorchRL; this one, and the others beside it, do not.
"""
