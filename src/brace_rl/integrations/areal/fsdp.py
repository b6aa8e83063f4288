"""AReaL's FSDP engine with BRACE's actor, where AReaL's workers can import it by name."""

from areal.engine.fsdp_engine import FSDPPPOActor  # type: ignore[import-not-found]

from brace_rl.integrations.areal.actor import BraceEngine


class BraceFSDPPPOActor(BraceEngine, FSDPPPOActor):  # type: ignore[misc]
    """See :class:`brace_rl.integrations.areal.actor.BracePPOActor`."""
