-- Usage intervals, each once: a producer may send one twice.
SELECT DISTINCT ON (interval_id) *
FROM usage
ORDER BY interval_id
