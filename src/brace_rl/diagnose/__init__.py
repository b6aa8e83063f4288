"""Reads logged rollouts and says whether the critic is stale, how badly, where, and what to set.

The path of the data: :mod:`columns` (names) and :mod:`reader` (files) give :class:`~.response.Response`
objects; :mod:`collect` adds them up in bounded memory; :mod:`statistics` turns sums into figures; :mod:`findings` and
:mod:`advice` turn figures into sentences; :mod:`terminal` and :mod:`page` show them. Needs the files alone, never the
trainer that wrote them.
"""
