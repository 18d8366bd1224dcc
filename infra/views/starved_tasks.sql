-- Which tasks were rolled out and never trained on, and why not? `reason` is their most frequent outcome.
SELECT
    task_id,
    any_value(task_family) AS task_family,
    count(*) AS num_trajectories,
    avg(num_generated_tokens) AS mean_length,
    mode(event) AS reason,
    max("at") AS last_at
FROM outcomes
WHERE origin IS DISTINCT FROM 'counterfactual'
GROUP BY task_id
HAVING NOT bool_or(trajectory_id IN (SELECT trajectory_id FROM live_samples))
ORDER BY num_trajectories DESC, task_id
