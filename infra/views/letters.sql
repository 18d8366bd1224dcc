-- Which messages can nobody read, as things stand? One row each: dead letters, without those that were sent once more.
-- What was sent once more has an outcome of its own by now, is a letter again, or waits in its group: it counts there.
SELECT * FROM dead_letters
WHERE kind = 'undecodable' AND topic || '/' || partition || '/' || "offset" NOT IN (
    SELECT replayed_from FROM dead_letters WHERE replayed_from IS NOT NULL
)
