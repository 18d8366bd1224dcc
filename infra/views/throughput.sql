-- How fast, and how busy, was each service? One row per usage interval; its tokens over its own length.
SELECT
    started_at,
    ended_at,
    service,
    instance,
    phase,
    num_tokens,
    num_episodes,
    num_failed,
    num_tokens / nullif(epoch(ended_at - started_at), 0) AS tokens_per_s,
    busy_s / nullif(busy_s + idle_s, 0) AS busy_ratio,
    weight_version
FROM usage_intervals
ORDER BY started_at, instance
