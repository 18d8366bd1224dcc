-- What trained a step, and what came of it? One row per optimizer step and trajectory, without steps that a crash undid.
-- published_version: the first version that holds the step (null until one does). delta_version: of `experience`, as read.
WITH steps AS (
    SELECT
        *, min(published_version) OVER (ORDER BY step ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS first_published
    FROM live_steps
)
SELECT
    s.step,
    s.incarnation,
    s.finished_at,
    s.weight_version AS learner_version,
    t.trajectory_id,
    t.group_id,
    e.task_id,
    t.min_weight_version,
    e.max_weight_version,
    t.staleness,
    t.use,
    t.reward,
    t.advantage,
    t.weight,
    t.probability,
    t.sample_weight,
    t.importance_ratio_mean,
    t.importance_ratio_max,
    t.clip_ratio,
    t.delta_version,
    s.first_published AS published_version,
    s.objective,
    s.directive_id,
    s.mlflow_run
FROM steps s
JOIN train_samples t ON t.step = s.step AND t.incarnation = s.incarnation
LEFT JOIN (SELECT trajectory_id, task_id, max_weight_version FROM experience) e ON e.trajectory_id = t.trajectory_id
ORDER BY s.step, t.trajectory_id
