"""A transaction is tried again where that can help, and never for ever."""

import pytest
from deltalake.exceptions import CommitFailedError, SchemaMismatchError

from infra import retries
from infra.retries import retry
from schemas.errors import LakeError


class Failing:
    """Fails `times` times with `error`, then answers 7."""

    def __init__(self, times: int, error: Exception):
        self.times = times
        self.error = error
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return 7


@pytest.mark.parametrize("error", [CommitFailedError("lost the race"), OSError("connection reset")])
def test_a_conflict_and_a_failing_store_are_tried_again(error: Exception):
    attempt = Failing(2, error)
    assert retry("a commit", attempt) == 7
    assert attempt.calls == 3


def test_what_cannot_succeed_is_not_tried_again():
    attempt = Failing(1, SchemaMismatchError("no such column"))
    with pytest.raises(LakeError, match="a commit is refused: no such column"):
        retry("a commit", attempt)
    assert attempt.calls == 1


def test_tries_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "ATTEMPTS", 3)
    attempt = Failing(99, CommitFailedError("lost the race"))
    with pytest.raises(LakeError, match="a commit failed 3 times; last: CommitFailedError: lost the race"):
        retry("a commit", attempt)


def test_tries_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "LIMIT_S", -1)
    attempt = Failing(99, OSError("no route"))
    with pytest.raises(LakeError, match="a commit failed 1 times; last: OSError: no route"):
        retry("a commit", attempt)
    assert attempt.calls == 1
