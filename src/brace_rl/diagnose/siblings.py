"""V of several responses to one prompt: what they share, a critic must value alike."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from brace_rl.diagnose.response import Bools, Floats, Ints, Response

REMEMBERED = 4096
"""First responses kept to be compared with later ones to the same prompt ..."""
COMPARED = 64
"""... and how many of their tokens."""


class Siblings:
    """Compares V of responses to the same prompt, under the same critic, around the first token where they differ.

    Up to that token they share a state, so V before it agrees; V after it need not.

    Attributes:
        pairs: compared; the token where they differ and the next two must be policy tokens, because entries beside tool
            output are moved by a shift of the column in a way of their own.
        differences: summed ``|V - V'|`` at these three.
        earlier_pairs: pairs with a policy token before the one where they differ.
        earlier_difference: summed ``|V - V'|`` at the last of these. Where it is not small, the critics themselves
            differ, and nothing can be said about a shift.
    """

    def __init__(self) -> None:
        self.pairs = 0
        self.differences: Floats = np.zeros(3)
        self.earlier_pairs = 0
        self.earlier_difference = 0.0
        self._first: OrderedDict[tuple[str, int | None], tuple[Ints, Bools, Floats]] = OrderedDict()

    def add(self, response: Response) -> None:
        """Compare with the first response to its prompt; needs ``prompt_id``, ``token_ids`` and ``values``."""
        if response.prompt_id is None or response.values is None or response.token_ids is None:
            return
        tokens, mask, values = response.token_ids, response.policy_mask, response.values
        mine = tokens[:COMPARED].copy(), mask[:COMPARED].copy(), values[:COMPARED].copy()
        other = self._first.setdefault((response.prompt_id, response.current_version), mine)
        if len(self._first) > REMEMBERED:
            self._first.popitem(last=False)
        shorter = min(len(mine[0]), len(other[0]))
        differs = np.flatnonzero(mine[0][:shorter] != other[0][:shorter])
        if not len(differs):
            return
        place = int(differs[0])
        at = slice(place, place + 3)
        if place + 3 > shorter or not (mine[1][at] & other[1][at]).all():
            return
        self.pairs += 1
        self.differences += np.abs(mine[2][at] - other[2][at])
        shared = np.flatnonzero(mine[1][:place] & other[1][:place])
        if len(shared):
            self.earlier_pairs += 1
            self.earlier_difference += float(abs(mine[2][shared[-1]] - other[2][shared[-1]]))
