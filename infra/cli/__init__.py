"""The `lagoon` command: starts the processes of a run and asks about them; imports none of them."""
