"""What can go wrong, by what a caller can do about it."""


class KvbmError(Exception):
    """Any error of the block manager."""


class InvalidError(KvbmError, ValueError):
    """An argument is wrong: the message names it and what is valid."""


class SettingsError(InvalidError):
    """A setting is unknown or invalid: the message names it, where it came from and what is valid."""


class UnavailableError(KvbmError):
    """The system lacks what was asked for: memory, a writable directory, a reachable store."""


class FullError(KvbmError):
    """No room: every block that could leave is in use. Go on without saving."""


class ClosedError(KvbmError):
    """The manager is closed."""


class StaleError(KvbmError):
    """A reset came in between: what was asked for is of past weights. Ask again."""
