-- What was paid for and not used, by reason: trajectories that were not trained on, steps that a crash undid, idleness.
-- Dead letters have no cost of their own: theirs is estimated from the mean cost of a token.
WITH trajectory_waste AS (
    SELECT event AS reason, trajectory_id, num_tokens, accelerator_s FROM ledger
    WHERE event IN ('stale', 'duplicate', 'no_signal', 'invalid')
    UNION ALL
    SELECT event, trajectory_id, num_tokens, accelerator_s FROM ledger
    WHERE event IN ('evicted', 'expired') AND trajectory_id NOT IN (SELECT trajectory_id FROM live_samples)
), token_cost AS (
    SELECT sum(accelerator_s) / nullif(sum(num_tokens), 0) AS seconds_per_token FROM outcomes
), waste AS (
    SELECT reason, count(*) AS num_trajectories, sum(num_tokens) AS num_tokens, sum(accelerator_s) AS accelerator_s
    FROM trajectory_waste GROUP BY reason
    UNION ALL
    SELECT 'dead_lettered', sum(num_rows), sum(num_tokens), sum(num_tokens) * any_value(seconds_per_token)
    FROM letters CROSS JOIN token_cost HAVING count(*) > 0
    UNION ALL
    SELECT 'undone_steps', sum(num_trajectories), sum(num_tokens), sum(busy_s)
    FROM train_steps s ANTI JOIN live_steps l ON l.step = s.step AND l.incarnation = s.incarnation HAVING count(*) > 0
    UNION ALL
    SELECT 'idle_' || phase, NULL, NULL, sum(idle_s) FROM usage_intervals GROUP BY phase HAVING sum(idle_s) > 0
)
SELECT
    reason,
    num_trajectories::BIGINT AS num_trajectories,
    num_tokens::BIGINT AS num_tokens,
    accelerator_s,
    accelerator_s / 3600 * accelerator_hour AS cost
FROM waste CROSS JOIN prices
ORDER BY accelerator_s DESC, reason
