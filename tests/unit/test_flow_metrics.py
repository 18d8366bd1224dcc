"""Counters of the flows follow the rows that they write."""

from prometheus_client import REGISTRY

from flows.metrics import note_curated
from flows.steps.decode import decode
from flows.steps.shard import Shard
from flows.steps.validate import validate
from schemas.ids import shard_of
from tests.samples import broken, clock, group, message
from tests.unit.curation import SETTINGS, Log


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_counters_follow_the_rows() -> None:
    shard = shard_of("add/7")
    before = value("lagoon_trajectory_events_total", event="admitted")
    letters = value("lagoon_dead_letters_total", kind="undecodable")
    closed = value("lagoon_closed_groups_total", closed_by="complete")
    messages = [message(group("m", [0.0, 1.0]), 0), broken(1), clock(0, 1)]
    note_curated(Shard(SETTINGS, Log()).curate(validate(decode(shard, messages, {}), ())))
    assert value("lagoon_trajectory_events_total", event="admitted") == before + 2
    assert value("lagoon_dead_letters_total", kind="undecodable") == letters + 1
    assert value("lagoon_closed_groups_total", closed_by="complete") == closed + 1
    assert value("lagoon_live_trajectories", shard="s010") == 2
