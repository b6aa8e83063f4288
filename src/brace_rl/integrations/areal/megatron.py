"""AReaL's Megatron engine with BRACE's actor, where AReaL's workers can import it by name."""

from areal.engine.megatron_engine import MegatronPPOActor  # type: ignore[import-not-found]

from brace_rl.integrations.areal.actor import BraceEngine


class BraceMegatronPPOActor(BraceEngine, MegatronPPOActor):  # type: ignore[misc]
    """See :class:`brace_rl.integrations.areal.actor.BracePPOActor`."""
