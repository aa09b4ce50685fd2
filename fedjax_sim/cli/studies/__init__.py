"""Studies: a file of methods, settings and data sets, its runs, and their results."""
