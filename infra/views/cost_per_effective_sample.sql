-- What does an effective sample cost? Accelerator hours of rollouts and learner, idle ones too, times the price.
-- Steps that a crash undid cost money and add no samples. Hours of evals stand beside it.
WITH hours AS (
    SELECT
        coalesce(sum(busy_s + idle_s) FILTER (phase = 'rollout'), 0) / 3600 AS rollout_hours,
        coalesce(sum(busy_s + idle_s) FILTER (phase = 'train'), 0) / 3600 AS train_hours,
        coalesce(sum(busy_s + idle_s) FILTER (phase = 'eval'), 0) / 3600 AS eval_hours,
        sum(busy_s) FILTER (phase IN ('rollout', 'train'))
            / nullif(sum(busy_s + idle_s) FILTER (phase IN ('rollout', 'train')), 0) AS busy_ratio
    FROM usage_intervals
)
SELECT
    rollout_hours,
    train_hours,
    eval_hours,
    busy_ratio,
    accelerator_hour,
    (rollout_hours + train_hours) * accelerator_hour AS cost,
    effective_samples,
    (rollout_hours + train_hours) * accelerator_hour / nullif(effective_samples, 0) AS cost_per_effective_sample
FROM hours CROSS JOIN prices CROSS JOIN effective_samples
