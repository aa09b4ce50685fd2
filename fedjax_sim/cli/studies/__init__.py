"""Studies: a file of methods, settings and data, the runs that it means, and what they tell."""
