"""``NAME[:KEY=VALUE]...``: a method with constants of its own, which is a row of its own. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brace_rl.config import AlgorithmConfig, Config, section_class
from brace_rl.errors import ConfigError
from brace_rl.methods import own_settings
from brace_rl.section import did_you_mean

METHOD_KEYS: Mapping[str, Sequence[str]] = {
    "optim": (
        "critic_updates",
        "freeze_critic_attention",
        "critic_warmup_until",
        "actor_lr",
        "critic_lr",
        "lr_warmup_steps",
        "lr_reference_staleness",
        "lr_ess_scaling",
    ),
}
"""Keys in which methods may differ outside ``algorithm`` and ``actor``, which are a method's own."""

LONGEST_STEM = 80
"""Characters of a method in the name of a folder; a digest tells longer ones apart."""

_UNSAFE = re.compile(r"[^A-Za-z0-9+._-]")


@dataclass(frozen=True)
class Variant:
    """A method as it is compared.

    Attributes:
        name: of its row: the method and what is set, as given.
        method: what ``brace train --method`` takes.
        settings: ``section.key`` -> text, over the recipe, the method and the settings of all.
    """

    name: str
    method: str
    settings: Mapping[str, str]

    @property
    def stem(self) -> str:
        """The name as part of a folder's."""
        return _UNSAFE.sub("_", self.name.replace(":", ".").replace("=", "-"))[:LONGEST_STEM]


def parse_variant(text: str) -> Variant:
    """A variant as people write it: ``estr:tau=0.5``, ``brace+icepop:high=3:window=20``, ``ppo:optim.actor_lr=1e-5``.

    A key with a dot is ``section.key``. Any other is an option of the method's actor rule if that has one of the name,
    else a key of ``algorithm``.

    Raises:
        ConfigError: no such method or key, a key without a value or given twice, one that the method is made of, or one
            that all methods of a comparison share; one line.
    """
    method, *words = (word.strip() for word in text.split(":"))
    own = own_settings(method)
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"method {text!r}: {word!r} is not KEY=VALUE, as in estr:tau=0.5")
        setting = _setting(text, str(own["actor.rule"]), key)
        if setting in own:
            raise ConfigError(
                f"method {text!r}: {setting} = {own[setting]} is part of what {method} is; use a method with another"
            )
        if setting in settings:
            raise ConfigError(f"method {text!r}: {setting} is given twice")
        settings[setting] = value
    name = ":".join([method, *("=".join(part.strip() for part in word.split("=", 1)) for word in words)])
    return Variant(name, method, settings)


def _setting(text: str, rule: str, key: str) -> str:
    """``section.key`` of a key as given."""
    options = list(section_class("actor", {"actor": {"rule": rule}}).model_fields)
    sections: dict[str, Sequence[str]] = {"actor": options, "algorithm": list(AlgorithmConfig.model_fields)}
    sections |= METHOD_KEYS
    if "." not in key:
        for section in ("actor", "algorithm"):
            if key in sections[section]:
                return f"{section}.{key}"
        known = [*options, *sections["algorithm"]]
        raise ConfigError(f"method {text!r}: no setting {key!r}{did_you_mean(key, known)}")
    section, _, name = key.partition(".")
    if name in sections.get(section, ()):
        return key
    field = Config.model_fields.get(section)
    if section not in ("actor", "algorithm") and field and name in type(field.default).model_fields:
        raise ConfigError(f"method {text!r}: {key} is the same for all methods of a comparison; give it as --{key}")
    known = [f"{section}.{name}" for section, names in sections.items() for name in names]
    raise ConfigError(f"method {text!r}: no setting {key!r}{did_you_mean(key, known)}")
