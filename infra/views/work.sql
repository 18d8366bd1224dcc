-- Is every dispatched group closed, abandoned with a reason, or still open?
-- undispatched: closed groups that the dispatcher has no row for (imports, or a row still on its way).
-- balanced: no group closed twice or was abandoned without a reason.
WITH dispatched AS (
    SELECT
        group_id,
        bool_or(event = 'abandoned') AS abandoned,
        count(*) FILTER (event = 'reissued') AS num_reissues,
        bool_or(event = 'abandoned' AND coalesce(reason, '') = '') AS unexplained
    FROM dispatches GROUP BY group_id
), closed AS (
    SELECT group_id, count(*) AS num_closings FROM groups GROUP BY group_id
)
SELECT
    count(d.group_id) AS dispatched,
    count(*) FILTER (d.group_id IS NOT NULL AND c.group_id IS NOT NULL) AS closed,
    count(*) FILTER (d.abandoned AND c.group_id IS NULL) AS abandoned,
    count(*) FILTER (NOT d.abandoned AND c.group_id IS NULL) AS open,
    coalesce(sum(d.num_reissues), 0)::BIGINT AS reissued,
    count(*) FILTER (d.group_id IS NULL) AS undispatched,
    NOT coalesce(bool_or(c.num_closings > 1 OR d.unexplained), false) AS balanced
FROM dispatched d FULL JOIN closed c USING (group_id)
