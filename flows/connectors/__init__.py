"""The seam to Bytewax: sources and sinks that keep their place in its recovery store."""
