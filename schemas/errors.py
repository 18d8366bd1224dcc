"""Lagoon's errors: one base, one type per boundary.

A message says what happened, what was observed, what was expected, and what to do next.

    LagoonError
    ├── SettingsError       a wrong setting; stops the process at start
    ├── ContractError       a record that breaks its schema; becomes a row, never a crash
    ├── LakeError           the lake refuses or is inconsistent
    ├── WeightStoreError    a weight version that is incomplete, altered or already taken
    ├── BrokerError         Kafka is unreachable, or refuses
    ├── DeadlineError       a wait that ended without what it waited for
    └── StackError          the local stack cannot start
"""


class LagoonError(Exception):
    """Base of every error that Lagoon raises on purpose."""


class SettingsError(LagoonError, ValueError):
    """A setting is unknown, out of bounds, or contradicts another one."""


class ContractError(LagoonError, ValueError):
    """A record does not have the shape that its schema promises."""


class LakeError(LagoonError):
    """A lake table is missing, newer than this code, or refuses a commit."""


class WeightStoreError(LagoonError):
    """A weight version is incomplete, altered, or already published with other content."""


class BrokerError(LagoonError):
    """Kafka is unreachable, or refuses a request."""


class DeadlineError(LagoonError, TimeoutError):
    """A wait ended at its limit; the message gives the reason and what was decided."""


class StackError(LagoonError):
    """A part of the local stack cannot be started."""
