"""What a shard decides in one call, gathered and turned into one batch for each table."""

from dataclasses import dataclass, field

import pyarrow as pa

from flows.steps import ledger, payloads
from flows.steps.chunk import Chunk
from flows.steps.ledger import Admission, Closing, Decision, Estimate, Rows
from flows.steps.member import Coordinates
from schemas.messages import BufferReport, Fork
from schemas.tables import DEAD_LETTERS, EXPERIENCE, GROUPS, LEDGER, TASK_DIFFICULTY


@dataclass(slots=True)
class Output:
    """Decisions and their companions, in the order in which they were made.

    `kept` holds the messages of those `admissions` that did not come with the chunk at hand.
    """

    decisions: list[Decision] = field(default_factory=list)
    closings: list[Closing] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    kept: dict[Coordinates, pa.RecordBatch] = field(default_factory=dict)
    reports: list[BufferReport | Fork] = field(default_factory=list)

    def items(self, chunk: Chunk) -> list[Rows | BufferReport | Fork]:
        """One batch for each table, and what is told to the dispatcher."""
        rows = [Rows(DEAD_LETTERS.name, letter) for letter in chunk.dead_letters]
        if self.decisions:
            rows.append(Rows(LEDGER.name, ledger.ledger(self.decisions)))
        if self.closings:
            rows.append(Rows(GROUPS.name, ledger.groups(self.closings)))
        if self.estimates:
            rows.append(Rows(TASK_DIFFICULTY.name, ledger.task_difficulty(self.estimates)))
        return [*rows, *self._experience(chunk), *self.reports]

    def _experience(self, chunk: Chunk) -> list[Rows]:
        here, before = self.admissions, []
        if self.kept:
            here = [a for a in self.admissions if a.member.place not in self.kept]
            before = [a for a in self.admissions if a.member.place in self.kept]
        parts = [(here, p) for p in payloads.take(chunk, [a.member for a in here])] if here else []
        if before:
            parts += [(before, p) for p in payloads.take_kept(self.kept, [a.member for a in before])]
        return [Rows(EXPERIENCE.name, ledger.experience(p.rows, of[p.start : p.stop])) for of, p in parts]
