"""How stacks of models are computed on devices; knows no algorithm."""
