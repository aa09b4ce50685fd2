"""Partitions of a data set over clients: samplers, measures of skew, pictures."""

from fedjax_sim.partition.dirichlet import dirichlet_over_classes, dirichlet_over_clients
from fedjax_sim.partition.draw import draw_partition
from fedjax_sim.partition.limit_label import limit_label, limit_label_emd, ll_settings
from fedjax_sim.partition.measures import c_score, client_emds, emd
from fedjax_sim.partition.samplers import SAMPLERS, iid, parse_sampler
from fedjax_sim.partition.table import (
    Partition,
    label_table,
    load_partition,
    partition_from_lists,
    partition_hash,
    save_partition,
    validate_partition,
)

__all__ = [
    "SAMPLERS",
    "Partition",
    "c_score",
    "client_emds",
    "dirichlet_over_classes",
    "dirichlet_over_clients",
    "draw_partition",
    "emd",
    "iid",
    "label_table",
    "limit_label",
    "limit_label_emd",
    "ll_settings",
    "load_partition",
    "parse_sampler",
    "partition_from_lists",
    "partition_hash",
    "save_partition",
    "validate_partition",
]
