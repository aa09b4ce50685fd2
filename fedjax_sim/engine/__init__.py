"""Computation on stacks of models over devices, independent of any algorithm."""
