"""Going on with a run from one consistent state, on this machine or another one."""
