"""A sandbox for code that a model wrote: bubblewrap, namespaces, limits, and a fresh process tree per program."""
