"""The contracts: what crosses a process boundary, defined once.

Everything that Lagoon writes to Kafka, to the lake or to the weight store has its shape here. Nothing here does I/O,
but for reading and saving settings files.
"""
