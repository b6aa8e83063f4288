"""BRACE inside other trainers: one folder or file per framework, all over :mod:`brace_rl.integrations.token_level`.

Nothing here imports a framework before it is used.
"""
