"""Hypothesis strategies for the contracts."""

from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from schemas.names import ErrorKind, Origin, ResultStatus, Status, StopReason
from schemas.trajectory import Reward, Trajectory, Turn, WeightVersionSpan

int32s = st.integers(0, 2**31 - 1)
versions = st.integers(0, 2**40)
float32s = st.floats(-1e6, 1e6, width=32)
seconds = st.floats(0, 1e5, width=32)
texts = st.text(max_size=20)
times = st.integers(0, 4_000_000_000_000_000).map(
    lambda us: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)

turns = st.builds(
    Turn,
    action_start=int32s,
    action_end=int32s,
    observation_end=int32s,
    tool=st.none() | texts,
    arguments=st.none() | texts,
    result_status=st.sampled_from(ResultStatus),
    reward=float32s,
    latency_s=seconds,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any trajectory that fits the schema's types: token columns of one length, everything else free."""
    tokens = draw(st.lists(int32s, max_size=12))
    same_length = {"min_size": len(tokens), "max_size": len(tokens)}
    return Trajectory(
        trajectory_id=draw(st.uuids()).hex,
        group_id=draw(st.uuids()).hex,
        group_index=draw(int32s),
        group_size=draw(int32s),
        task_id=draw(texts),
        task_family=draw(texts),
        environment=draw(texts),
        attempt=draw(int32s),
        parent_id=draw(st.none() | texts),
        origin=draw(st.sampled_from(Origin)),
        producer=draw(texts),
        content_hash=draw(texts),
        dispatch_weight_version=draw(versions),
        min_weight_version=draw(versions),
        max_weight_version=draw(versions),
        weight_version_spans=tuple(draw(st.lists(st.builds(WeightVersionSpan, int32s, int32s, versions), max_size=3))),
        status=draw(st.sampled_from(Status)),
        stop_reason=draw(st.sampled_from(StopReason)),
        error_kind=draw(st.none() | st.sampled_from(ErrorKind)),
        error=draw(st.none() | texts),
        reward=draw(st.none() | float32s),
        rewards=tuple(draw(st.lists(st.builds(Reward, texts, float32s), max_size=2))),
        token_ids=tuple(tokens),
        action_mask=tuple(draw(st.lists(st.booleans(), **same_length))),
        behavior_logprobs=tuple(draw(st.lists(float32s, **same_length))),
        turns=tuple(draw(st.lists(turns, max_size=2))),
        messages=tuple(draw(st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=2))),
        num_prompt_tokens=draw(int32s),
        num_generated_tokens=draw(int32s),
        accelerator_s=draw(seconds),
        environment_s=draw(seconds),
        started_at=draw(times),
        finished_at=draw(times),
    )
