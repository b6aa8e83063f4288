"""Measurements anyone can repeat: each returns plain rows, printed by `brace bench`."""
