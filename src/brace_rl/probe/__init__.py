"""``brace probe``: true values of a run's policies at saved states, by playing on from there.

From the state ``s`` before a policy token, fresh continuations under the run's newest actor (pi) and under an older one
(mu) give ``V^pi(s)`` and ``V^mu(s)`` without bias; with the critic's ``V(s)`` beside them ``b = V^pi - V^mu``,
``g_pi = V - V^pi`` and ``g_mu = V - V^mu`` follow. The paper draws them over the position in its Figure 2a.
"""
