-- Trajectories in optimizer steps that count (see live_steps).
SELECT t.*
FROM train_samples t
SEMI JOIN live_steps s ON s.step = t.step AND s.incarnation = t.incarnation
