-- How hard are the tasks, as of each weight version? Mean of the newest estimates by family, and the share that is hard.
WITH estimates AS (
    SELECT DISTINCT ON (task_id, weight_version) *
    FROM task_difficulty ORDER BY task_id, weight_version, "at" DESC
), points AS (
    SELECT task_id, weight_version
    FROM (SELECT DISTINCT task_id FROM estimates) CROSS JOIN (SELECT DISTINCT weight_version FROM estimates)
)
SELECT
    p.weight_version,
    e.task_family,
    count(*) AS num_tasks,
    avg(e.success_mean) AS success_mean,
    avg(e.is_hard::INT) AS hard_ratio,
    sum(e.num_groups)::BIGINT AS num_groups
FROM points p ASOF JOIN estimates e ON e.task_id = p.task_id AND p.weight_version >= e.weight_version
GROUP BY p.weight_version, e.task_family
ORDER BY p.weight_version, e.task_family
