"""A flow under a clock that its own source sets two hours forward whenever it is asked, five times; then it ends.

Started by test_clock_jumps: Bytewax reads the clock before it asks a source, so each jump lies between two readings.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource
from bytewax.testing import TestingSink, run_main

from flows.connectors.epochs import EpochPart, Never
from tests.shifted_clock import PLACE, set_clock

HOURS, TIMES = 7200, 5


class Source(FixedPartitionedSource[Any, Any]):
    """One partition."""

    def list_parts(self) -> list[str]:
        return ["00000/jumps"]

    def build_part(self, step_id: str, for_part: str, resume_state: Any) -> EpochPart:
        return Part(for_part, 1, Never())


class Part(EpochPart):
    """Emits nothing, and sets the clock."""

    num_asked = 0

    def pull(self, max_items: int, max_bytes: int) -> list[Any]:
        self.num_asked += 1
        set_clock(Path(os.environ[PLACE]), self.num_asked * HOURS)
        return []

    def position(self) -> None:
        """It has none."""

    def at_end(self) -> bool:
        return self.num_asked >= TIMES


if __name__ == "__main__":
    flow = Dataflow("forward")
    op.output("keep", op.input("jump", flow, Source()), TestingSink([]))
    run_main(flow, epoch_interval=timedelta(seconds=0.2))
