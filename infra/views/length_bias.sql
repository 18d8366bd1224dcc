-- Are long episodes lost more often? Lengths in action tokens of what was produced, trained and dropped, by family
-- (task_family is null in the rows over all families). ratio_to_produced: mean length against that of all produced.
WITH produced AS (
    SELECT DISTINCT ON (topic, partition, "offset", "row")
        trajectory_id, task_family, event, num_generated_tokens AS length
    FROM outcomes
    WHERE origin IS DISTINCT FROM 'counterfactual' -- nobody trains on branches
    ORDER BY topic, partition, "offset", "row"
), lost AS (
    SELECT DISTINCT trajectory_id FROM ledger WHERE event IN ('evicted', 'expired')
), trained AS (
    SELECT DISTINCT trajectory_id FROM live_samples
), populations AS (
    SELECT 'produced' AS population, task_family, length FROM produced
    UNION ALL
    SELECT 'trained', task_family, length FROM produced SEMI JOIN trained USING (trajectory_id)
    WHERE event = 'admitted'
    UNION ALL
    SELECT 'dropped', task_family, length FROM produced
    WHERE event <> 'admitted'
        OR (trajectory_id IN (FROM lost) AND trajectory_id NOT IN (FROM trained))
)
SELECT
    task_family,
    population,
    count(*) AS num_trajectories,
    avg(length) AS mean_length,
    quantile_cont(length, 0.1) AS p10_length,
    quantile_cont(length, 0.5) AS p50_length,
    quantile_cont(length, 0.9) AS p90_length,
    avg(length) / nullif(first_value(avg(length)) OVER families, 0) AS ratio_to_produced
FROM populations
GROUP BY GROUPING SETS ((population), (task_family, population))
WINDOW families AS (PARTITION BY task_family ORDER BY population = 'produced' DESC)
ORDER BY task_family NULLS FIRST, array_position(['produced', 'trained', 'dropped'], population)
