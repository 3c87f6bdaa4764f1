"""A computer with a screen, and something to do on it: the tasks of OSWorld."""
