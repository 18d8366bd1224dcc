"""The local stack: Kafka, MLflow and the processes of a run, on one machine."""
