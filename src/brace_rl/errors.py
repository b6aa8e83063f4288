"""Errors that mean "the input is wrong", which the command line prints as one line and answers with exit code 2."""


class BraceError(Exception):
    """Something a user can mend: the message says what was wrong, where, and what to do about it."""


class ConfigError(BraceError):
    """A recipe or an override cannot be used; the message names the key."""


class DataError(BraceError):
    """A data file cannot be used; the message names the file and, where there is one, the line."""


class ModelError(BraceError):
    """A model folder or name cannot be used."""


class WaitTimeoutError(BraceError):
    """Somebody waited too long; the message says who waited for whom."""


class DivergedError(BraceError):
    """Training produced numbers that are not finite."""


class StalenessError(BraceError):
    """Responses break the staleness bound or carry log-probs that cannot be what they claim."""
