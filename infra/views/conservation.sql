-- Is every finished trajectory in exactly one place? One row for trajectories, one for their tokens.
-- in_flight: finished, and still in an outbox or in a Kafka log. holes: messages that expired before they were read.
-- lost: finished, and gone with the log or the outboxes of an earlier life of the run; `dead_letters` says when and why.
-- balanced: nothing appeared from nowhere, nothing has two outcomes, nothing expired unread.
WITH outboxes AS (
    -- totals are absolute and only grow, so the largest of each outbox is the newest
    SELECT outbox, max(produced_trajectories) AS trajectories, max(produced_tokens) AS tokens
    FROM usage WHERE outbox IS NOT NULL GROUP BY outbox
), produced AS (
    SELECT unnest([
        {'kind': 'trajectories', 'produced': coalesce(sum(trajectories), 0)},
        {'kind': 'tokens', 'produced': coalesce(sum(tokens), 0)}
    ], recursive := true)
    FROM outboxes
), unread AS (
    SELECT kind, num_rows, num_tokens FROM letters
    UNION ALL SELECT kind, num_rows, num_tokens FROM dead_letters WHERE kind IN ('hole', 'lost')
), accounted AS (
    SELECT
        kind,
        coalesce(sum(amount) FILTER (event = 'admitted'), 0) AS admitted,
        coalesce(sum(amount) FILTER (event = 'stale'), 0) AS stale,
        coalesce(sum(amount) FILTER (event = 'duplicate'), 0) AS duplicate,
        coalesce(sum(amount) FILTER (event = 'no_signal'), 0) AS no_signal,
        coalesce(sum(amount) FILTER (event = 'invalid'), 0) AS invalid,
        coalesce(sum(amount) FILTER (event = 'undecodable'), 0) AS dead_lettered,
        coalesce(sum(amount) FILTER (event = 'lost'), 0) AS lost,
        coalesce(sum(amount) FILTER (event = 'hole'), 0) AS holes
    FROM (
        SELECT 'trajectories' AS kind, event, count(*) AS amount FROM outcomes GROUP BY event
        UNION ALL SELECT 'tokens', event, sum(num_tokens) FROM outcomes GROUP BY event
        UNION ALL SELECT 'trajectories', kind, sum(num_rows) FROM unread GROUP BY kind
        UNION ALL SELECT 'tokens', kind, sum(num_tokens) FROM unread GROUP BY kind
    )
    GROUP BY kind
), repeats AS (
    SELECT
        (SELECT count(*) - count(DISTINCT (topic, partition, "offset", "row")) FROM outcomes) AS num_repeats,
        (SELECT count(*) FROM dead_letters WHERE kind = 'hole') AS num_holes
)
SELECT
    kind,
    produced::BIGINT AS produced,
    coalesce(admitted, 0)::BIGINT AS admitted,
    coalesce(stale, 0)::BIGINT AS stale,
    coalesce(duplicate, 0)::BIGINT AS duplicate,
    coalesce(no_signal, 0)::BIGINT AS no_signal,
    coalesce(invalid, 0)::BIGINT AS invalid,
    coalesce(dead_lettered, 0)::BIGINT AS dead_lettered,
    coalesce(lost, 0)::BIGINT AS lost,
    (produced - coalesce(admitted + stale + duplicate + no_signal + invalid + dead_lettered + lost, 0))::BIGINT
        AS in_flight,
    coalesce(holes, 0)::BIGINT AS holes,
    produced >= coalesce(admitted + stale + duplicate + no_signal + invalid + dead_lettered + lost, 0)
        AND num_repeats = 0 AND num_holes = 0 AS balanced
FROM produced LEFT JOIN accounted USING (kind) CROSS JOIN repeats
ORDER BY kind DESC
