"""The words of the contracts: every enumerated value, once."""

from enum import StrEnum

SCHEMA_VERSION = 1
"""Version of the trajectory schema that this code writes; it reads every version up to this one."""

NUM_SHARDS = 16
"""Curation shards. Fixed for ever: state, group placement and replay depend on it."""


class Origin(StrEnum):
    """Why an episode was rolled out."""

    ROLLOUT = "rollout"
    EVAL = "eval"
    COUNTERFACTUAL = "counterfactual"
    IMPORT = "import"


class Status(StrEnum):
    """How an episode ended. Only an infrastructure failure (`failed`) may have no reward."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"


class StopReason(StrEnum):
    """What ended an episode."""

    ANSWER = "answer"
    MAX_TURNS = "max_turns"
    TURN_TOKENS = "turn_tokens"
    CONTEXT = "context"
    EPISODE_TIMEOUT = "episode_timeout"
    ERROR = "error"
    SHUTDOWN = "shutdown"
    STALE = "stale"


class ErrorKind(StrEnum):
    """Whose failure it was: the first three are the agent's, the others the infrastructure's."""

    MALFORMED_CALL = "malformed_call"
    TOOL_ERROR = "tool_error"
    AGENT_TIMEOUT = "agent_timeout"
    ENGINE = "engine"
    ENVIRONMENT = "environment"
    VERIFIER = "verifier"
    SHUTDOWN = "shutdown"
    STALE_IN_FLIGHT = "stale_in_flight"


INFRASTRUCTURE_ERRORS = frozenset(
    {ErrorKind.ENGINE, ErrorKind.ENVIRONMENT, ErrorKind.VERIFIER, ErrorKind.SHUTDOWN, ErrorKind.STALE_IN_FLIGHT}
)
"""Failures without a reward: kept, counted, retried; they vote in no baseline."""


class ResultStatus(StrEnum):
    """What came back for a turn's tool call; `none` for a turn without a call."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    NONE = "none"


class Event(StrEnum):
    """An event in a trajectory's life (ledger). The first five are admission outcomes: exactly one per trajectory."""

    ADMITTED = "admitted"
    STALE = "stale"
    DUPLICATE = "duplicate"
    NO_SIGNAL = "no_signal"
    INVALID = "invalid"
    EVICTED = "evicted"
    EXPIRED = "expired"
    REDELIVERED = "redelivered"


OUTCOMES = (Event.ADMITTED, Event.STALE, Event.DUPLICATE, Event.NO_SIGNAL, Event.INVALID)


class Service(StrEnum):
    """The kinds of process that make up a run."""

    CURATE = "curate"
    DISPATCH = "dispatch"
    RECORDS = "records"
    ROLLOUT = "rollout"
    LEARNER = "learner"
    EVALUATOR = "evaluator"
    MAINTENANCE = "maintenance"
    WARDEN = "warden"


class Phase(StrEnum):
    """What an accelerator was doing in a usage interval."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    EVAL = "eval"


class Header(StrEnum):
    """Kafka headers of a `trajectories` message; values are ASCII decimal or text."""

    SCHEMA_VERSION = "lagoon-schema"
    NUM_ROWS = "lagoon-rows"
    NUM_TOKENS = "lagoon-tokens"
    OUTBOX = "lagoon-outbox"
    SEQUENCE = "lagoon-seq"
    SHARD = "lagoon-shard"
    CLAIM = "lagoon-claim"
