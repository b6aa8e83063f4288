"""Token MDPs whose values are exact, so that what a value target does to a stale critic can be seen and not guessed.

    mdp        transitions, policies, exact values and state distributions
    methods    the value targets by name
    targets    what `brace_rl.core` makes of sampled responses under each
    exact      mean, variance and fixed point of every target, the offset bound and what is measured of it
    sampling   drawing responses; moments of the one target that no recursion gives
    engine     what an engine samples and records, next to the weights it was given
    presets    the tasks
    actor_side the actor's rule in an update
    settings   how a policy learns
    learn      real PPO at an exact lag, all seeds at once
    study      one stale pair of policies, everything exact
    pairs      the same for pairs and critics that learning has made
    sweep      learning curves, and the map of where a window pays
    cells      finished curves on disk, so that a sweep can be interrupted
    draw       figures (loads matplotlib)
    readable   tables for the terminal and in Markdown
    tables     their files, CSV and Markdown
    run        what `brace oracle` does (loads rich)
    command    its options (loads click)

Needs torch, pydantic, `brace_rl.core` and `brace_rl.actor` alone, but for the last four. Nothing is imported here: take
what you need from the modules, `from brace_rl.oracle.presets import make_preset`.
"""
