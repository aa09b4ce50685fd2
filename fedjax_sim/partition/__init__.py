"""Partitions of a data set over clients: samplers, measures of skew, reports and figures."""

from fedjax_sim.partition._dirichlet import dirichlet, dirichlet_classes
from fedjax_sim.partition._features import feature_noise, feature_rotation, label_noise
from fedjax_sim.partition._label_free import iid, natural, power_law, quantity
from fedjax_sim.partition._limit_label import limit_label, limit_label_q, q_sampler
from fedjax_sim.partition._matched import matched
from fedjax_sim.partition._shards import label_sets, shards
from fedjax_sim.partition._target_emd import limit_label_emd, reachable_emd, robin_hood
from fedjax_sim.partition.draw import draw_partition, draw_skew
from fedjax_sim.partition.expected import dirichlet_alpha, ll_q_settings, ll_settings
from fedjax_sim.partition.measures import (
    SizeStatistics,
    c_score,
    client_emds,
    client_jsds,
    client_kls,
    emd,
    jsd,
    kl,
    size_statistics,
)
from fedjax_sim.partition.report import SkewReport, skew_report
from fedjax_sim.partition.samplers import SAMPLERS, Sample, expected_emd, parse_sampler
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
    "SkewReport",
    "c_score",
    "dirichlet",
    "dirichlet_alpha",
    "dirichlet_classes",
    "draw_partition",
    "draw_skew",
    "emd",
    "expected_emd",
    "feature_noise",
    "feature_rotation",
    "iid",
    "jsd",
    "kl",
    "label_noise",
    "label_sets",
    "label_table",
    "limit_label",
    "limit_label_emd",
    "limit_label_q",
    "ll_q_settings",
    "ll_settings",
    "load_partition",
    "matched",
    "natural",
    "parse_sampler",
    "partition_from_lists",
    "partition_hash",
    "power_law",
    "q_sampler",
    "quantity",
    "robin_hood",
    "save_partition",
    "shards",
    "skew_report",
]
