"""AReaL's Archon engine with BRACE's actor, where AReaL's workers can import it by name."""

from areal.experimental.engine.archon_engine import ArchonPPOActor  # type: ignore[import-not-found]

from brace_rl.integrations.areal.actor import BraceEngine


class BraceArchonPPOActor(BraceEngine, ArchonPPOActor):  # type: ignore[misc]
    """See :class:`brace_rl.integrations.areal.actor.BracePPOActor`."""
