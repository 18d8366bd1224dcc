"""What the flows are made of: functions on Arrow batches, and small states of ids, scores and counts."""
