-- How fast were steps, and what of each was waiting for samples? One row, from the first group opened to the last step.
-- wait_s and train_s are means over all steps but the first, which waits for services to start. train_s is whatever is
-- not waiting: the step itself, its rows, its checkpoint, its publication.
WITH steps AS (
    SELECT
        finished_at,
        num_trajectories,
        wait_s,
        epoch(finished_at - lag(finished_at) OVER (ORDER BY step)) AS period_s
    FROM live_steps
), began AS (
    SELECT min("at") AS began_at FROM dispatches WHERE event = 'opened'
)
SELECT
    began_at,
    max(finished_at) AS ended_at,
    epoch(max(finished_at) - began_at) AS elapsed_s,
    count(finished_at) AS num_steps,
    coalesce(sum(num_trajectories), 0)::BIGINT AS num_samples,
    avg(wait_s) FILTER (period_s IS NOT NULL) AS wait_s,
    avg(period_s - wait_s) FILTER (period_s IS NOT NULL) AS train_s
FROM began LEFT JOIN steps ON true
GROUP BY began_at
