-- What became of each trajectory that reached the flow? One row each: the ledger without later events and redeliveries.
SELECT * FROM ledger WHERE event IN ('admitted', 'stale', 'duplicate', 'no_signal', 'invalid')
