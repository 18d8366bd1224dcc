"""The judges: they compare what a run left behind with records that Lagoon had no hand in."""

from tests.chaos.judge.loop import judge_learner, judge_loop
from tests.chaos.judge.stream import accounted, judge_stream
from tests.chaos.verdict import Verdict

__all__ = ["Verdict", "accounted", "judge_learner", "judge_loop", "judge_stream"]
