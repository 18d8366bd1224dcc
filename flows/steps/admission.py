"""When a trajectory is too old, or from a future that nobody knows of."""

from flows.steps.member import Member


def version_at(member: Member, learner_version: int) -> int:
    """The learner's version as far as `member` is concerned.

    A rollout may load a version before its summary has come by `weights`: the trajectory then proves the version, but
    to itself alone, so that one bad row cannot make others old.
    """
    return max(learner_version, member.max_weight_version)


def from_the_future(member: Member, learner_version: int, max_staleness: int) -> str | None:
    """Why `member` cannot be believed, or None.

    Summaries may lag, but not by more versions than a trajectory may: newer than learner_version + max_staleness + 1
    is no delay. Before the first summary (version 0) nothing can be said.
    """
    newest = learner_version + max_staleness + 1
    if not learner_version or member.max_weight_version <= newest:
        return None
    return f"weight version {member.max_weight_version} is not published; the newest known is {learner_version}"


def too_old(
    member: Member, learner_version: int, max_staleness: int, min_weight_version: int, directive_id: str | None
) -> str | None:
    """Why `member` may not be trained on any more, or None.

    Staleness = learner version - min_weight_version, in versions; `min_weight_version` is the order of a directive.
    """
    if member.min_weight_version < min_weight_version:
        return f"below weight version {min_weight_version}, the least by directive {directive_id}"
    staleness = version_at(member, learner_version) - member.min_weight_version
    return f"staleness {staleness} is above {max_staleness}" if staleness > max_staleness else None
