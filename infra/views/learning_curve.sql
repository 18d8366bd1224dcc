-- How good was the policy after how many samples and how much time? One row per weight version that has a score.
-- num_samples: trajectories trained on until then. elapsed_s: from the first group opened to the version's publication.
WITH steps AS (
    SELECT step, sum(num_trajectories) OVER (ORDER BY step) AS num_samples FROM live_steps
), versions AS (
    SELECT version, any_value(train_step) AS train_step, min(created_at) AS created_at FROM weights GROUP BY version
), scores AS (
    SELECT end_version, sum(score * num_scored) / sum(num_scored) AS score, sum(num_scored) AS num_scored
    FROM evals WHERE score IS NOT NULL GROUP BY end_version
)
SELECT
    v.version,
    v.train_step,
    coalesce(s.num_samples, 0)::BIGINT AS num_samples,
    greatest(0, epoch(v.created_at - p.began_at)) AS elapsed_s,
    e.score,
    e.num_scored::BIGINT AS num_scored
FROM scores e
JOIN versions v ON v.version = e.end_version
LEFT JOIN steps s ON s.step = v.train_step
CROSS JOIN pace p
ORDER BY v.version
