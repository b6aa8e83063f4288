"""Compares methods on one recipe: the same model, warm start, data order, budget and evaluations for all.

``variants`` reads how methods are named; ``plan`` says which cells (method x staleness x seed) there are and checks
them; ``folder`` knows what is on disk; ``jobs`` runs processes side by side; ``outcomes`` reads what the runs left and
``statistics`` sums it up; ``tables``, ``charts``, ``figure`` and ``page`` show it. A cell is an ordinary
``brace train`` in a process of its own.
"""
