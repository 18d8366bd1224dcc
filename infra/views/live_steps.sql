-- Optimizer steps that count: those that a crash undid, because a later incarnation resumed before them, are left out.
WITH incarnations AS (
    SELECT incarnation, min(incarnation_at) AS began_at, min(resumed_from_step) AS resumed_from
    FROM train_steps GROUP BY incarnation
)
SELECT s.*
FROM train_steps s
WHERE NOT EXISTS (
    SELECT 1 FROM incarnations i WHERE i.began_at > s.incarnation_at AND i.resumed_from < s.step
)
