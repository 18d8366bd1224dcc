"""How much may be under way."""

from flows.steps.supply import Supply, staleness_limit
from schemas.settings import Settings


def settings(**loop: int) -> Settings:
    return Settings.model_validate(
        {
            "loop": {"group_size": 8, "batch_size": 8, "max_staleness": 3, **loop},
            "learner": {"sync_interval_start": 1},
            "curate": {"epoch_s": 1},
        }
    )


def test_the_limit_does_not_know_the_version_so_a_resume_has_the_same() -> None:
    assert staleness_limit(batch_size=8, max_staleness=3, sync_interval=1) == 32  # not (3 + 100 + 1) * 8 = 832
    assert staleness_limit(batch_size=8, max_staleness=3, sync_interval=5) == 160


def test_the_window_starts_at_what_some_updates_need() -> None:
    assert Supply.of(settings()).window == 20  # updates_ahead 2.5 * 8
    assert Supply.of(settings(max_staleness=0)).window == 8  # the limit is one batch


def test_groups_fill_the_window_beside_what_is_available() -> None:
    supply = Supply(window=40)
    assert supply.num_groups(0, 8) == 5
    assert supply.num_groups(3, 8) == 2
    supply.available = 17
    assert supply.num_groups(0, 8) == 2
    assert supply.num_groups(9, 8) == 0


def test_the_window_grows_by_a_group_while_the_learner_lacks_a_batch_up_to_the_limit() -> None:
    supply, config = Supply.of(settings()), settings()
    grown = []
    for second in range(4):
        supply.note_learner(7, second * 1000, config)
        grown.append(supply.window)
    assert grown == [28, 32, 32, 32]


def test_the_window_halves_while_there_is_a_backlog_but_keeps_a_batch() -> None:
    supply, config = Supply(window=32), settings()
    shrunk = []
    for second in range(3):
        supply.note_learner(21, second * 1000, config)  # more than 2.5 * 8
        shrunk.append(supply.window)
    assert shrunk == [16, 8, 8]


def test_in_between_the_window_stays() -> None:
    supply = Supply(window=24)
    supply.note_learner(16, 0, settings())
    assert supply.window == 24


def test_many_stale_outcomes_shrink_the_window() -> None:
    supply, config = Supply(window=32), settings()
    supply.outcomes, supply.stale = 100, 11
    supply.note_learner(16, 0, config)
    assert supply.window == 16
    supply.note_learner(16, 1000, config)  # nothing new was stale
    assert supply.window == 16


def test_what_the_learner_cannot_have_counted_yet_is_in_transit() -> None:
    supply, config = Supply(window=100), settings()
    supply.admitted = 10
    supply.note_time(1_000)
    supply.admitted = 30
    supply.note_time(5_000)
    supply.note_learner(12, 6_000, config)  # it has seen what was admitted two epochs before: by second 4
    assert supply.in_transit == 20
    supply.note_learner(30, 8_000, config)
    assert supply.in_transit == 0


def test_a_silent_learner_does_not_let_production_go_on() -> None:
    supply = Supply(window=32)
    for second in range(10):
        supply.admitted += 8
        supply.note_time(second * 1000)
    assert supply.num_groups(0, 8) == 0


def test_history_does_not_grow_with_time() -> None:
    supply, config = Supply(window=32), settings()
    for second in range(1000):
        supply.admitted += 1
        supply.note_time(second * 1000)
        supply.note_learner(8, second * 1000, config)
    assert len(supply.history) < 10
