-- How old was what the learner trained on? One row per staleness at use, in weight versions.
SELECT
    staleness,
    count(*) AS num_samples,
    count(*) / sum(count(*)) OVER () AS share,
    any_value(max_staleness) AS max_staleness,
    staleness <= any_value(max_staleness) AS within_bound
FROM live_samples CROSS JOIN bounds
GROUP BY staleness
ORDER BY staleness
