"""Data sets, client data and the cache of decoded data sets."""

from fedjax_sim.data._eicu import eicu
from fedjax_sim.data._fedaug import FedAug, augmentation_level, fedaug, rebalance
from fedjax_sim.data._huggingface import from_huggingface
from fedjax_sim.data._summary import DataSummary, summary
from fedjax_sim.data._synthetic import synthetic
from fedjax_sim.data._tables import covertype, diabetes
from fedjax_sim.data.clients import EvalSet, client_data, eval_set, streamed
from fedjax_sim.data.dataset import Dataset, from_arrays, pooled
from fedjax_sim.data.download import download_dataset
from fedjax_sim.data.folder import DataNotFoundError, cache_dir, cached_arrays
from fedjax_sim.data.sharing import XorMixup, share, xor_mixup
from fedjax_sim.data.sources import DATASETS, load_dataset, parse_dataset
from fedjax_sim.data.splits import (
    Fold,
    client_folds,
    client_holdout,
    own_test,
    shift_rows,
    take_clients,
    take_root,
)
from fedjax_sim.data.standardise import channel_statistics, standardise_global, standardise_local
from fedjax_sim.data.text import (
    shakespeare,
    shakespeare_tokens,
    tiny_shakespeare,
    tiny_shakespeare_tokens,
)

__all__ = [
    "DATASETS",
    "DataNotFoundError",
    "DataSummary",
    "Dataset",
    "EvalSet",
    "FedAug",
    "Fold",
    "XorMixup",
    "augmentation_level",
    "cache_dir",
    "cached_arrays",
    "channel_statistics",
    "client_data",
    "client_folds",
    "client_holdout",
    "covertype",
    "diabetes",
    "download_dataset",
    "eicu",
    "eval_set",
    "fedaug",
    "from_arrays",
    "from_huggingface",
    "load_dataset",
    "own_test",
    "parse_dataset",
    "pooled",
    "rebalance",
    "shakespeare",
    "shakespeare_tokens",
    "share",
    "shift_rows",
    "standardise_global",
    "standardise_local",
    "streamed",
    "summary",
    "synthetic",
    "take_clients",
    "take_root",
    "tiny_shakespeare",
    "tiny_shakespeare_tokens",
    "xor_mixup",
]
