"""``brace doctor NAME``: is BRACE in place in another trainer, and does a configuration let it work?

A framework is one module here with a function ``examine(request) -> Examination``, named in
:data:`brace_rl.doctor.command.FRAMEWORKS`.
"""
