-- How many samples was the run worth? Kish effective sample sizes summed over its steps, against all that was produced.
-- unclipped_ratio: share of trained action tokens that the clip left alone.
WITH steps AS (
    SELECT
        count(*) AS num_steps,
        coalesce(sum(num_trajectories), 0)::BIGINT AS trained,
        coalesce(sum(effective_sample_size), 0) AS effective_samples,
        1 - sum(clip_ratio * num_tokens) / nullif(sum(num_tokens), 0) AS unclipped_ratio
    FROM live_steps
)
SELECT
    num_steps,
    produced,
    trained,
    effective_samples,
    effective_samples / nullif(produced, 0) AS effective_sample_ratio,
    unclipped_ratio
FROM steps CROSS JOIN (SELECT produced FROM conservation WHERE kind = 'trajectories')
