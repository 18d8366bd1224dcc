"""The vLLM engine: a server process beside the service, spoken to in token ids over HTTP."""
