-- How busy was each kind of service from the first group opened to the last step? One row per phase, accelerator seconds.
-- An interval that lies partly inside counts by that part.
WITH inside AS (
    SELECT
        u.phase,
        u.busy_s,
        u.idle_s,
        greatest(0, epoch(least(u.ended_at, p.ended_at) - greatest(u.started_at, p.began_at)))
            / nullif(epoch(u.ended_at - u.started_at), 0) AS share
    FROM usage_intervals u CROSS JOIN pace p
)
SELECT
    phase,
    sum(busy_s * share) AS busy_s,
    sum(idle_s * share) AS idle_s,
    sum(busy_s * share) / nullif(sum((busy_s + idle_s) * share), 0) AS busy_share
FROM inside
GROUP BY phase
ORDER BY phase
