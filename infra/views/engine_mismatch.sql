-- How far do sampler and learner differ at equal weights? One row for each step that followed a publication.
-- ratio: geometric mean over its trajectories of staleness 0 of their mean importance ratios; 1 where the engines agree.
WITH first_steps AS (
    SELECT step, incarnation
    FROM (SELECT *, lag(weight_version) OVER (ORDER BY step) AS version_before FROM live_steps)
    WHERE version_before IS DISTINCT FROM weight_version
)
SELECT
    t.step,
    count(*) AS num_samples,
    exp(avg(ln(greatest(t.importance_ratio_mean, 1e-9)))) AS ratio
FROM train_samples t JOIN first_steps s ON s.step = t.step AND s.incarnation = t.incarnation
WHERE t.staleness = 0 AND t.importance_ratio_mean IS NOT NULL
GROUP BY t.step
ORDER BY t.step
