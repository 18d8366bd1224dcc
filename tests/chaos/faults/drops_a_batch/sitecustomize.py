"""The sink of the ledger drops the third batch that it is given."""

from flows.connectors.delta_sink import DeltaPart
from flows.connectors.items import Tick

write_batch, seen = DeltaPart.write_batch, {}


def write_all_but_one(self, values):
    for value in values:
        if self._table == "ledger" and not isinstance(value, Tick):
            seen[id(self)] = seen.get(id(self), 0) + 1
            if seen[id(self)] == 3:
                continue
        write_batch(self, [value])


DeltaPart.write_batch = write_all_but_one
