"""Data sets, client data and the cache of decoded data sets."""

from fedjax_sim.data._eicu import eicu
from fedjax_sim.data._fedaug import FedAug, augmentation_level, fedaug, rebalance
from fedjax_sim.data._huggingface import from_huggingface
from fedjax_sim.data._summary import DataSummary, summary
from fedjax_sim.data._synthetic import synthetic
from fedjax_sim.data._tables import covertype, diabetes
from fedjax_sim.data.arrays import pad
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
from fedjax_sim.data.standardise import standardise_global, standardise_local
from fedjax_sim.data.targets import hide_labels
from fedjax_sim.data.text import (
    shakespeare,
    shakespeare_tokens,
    tiny_shakespeare,
    tiny_shakespeare_tokens,
)
from fedjax_sim.engine.batches import rows_at

__all__ = [
    "DATASETS",
    "DataNotFoundError",
    "Dataset",
    "client_data",
    "client_folds",
    "client_holdout",
    "download_dataset",
    "eval_set",
    "fedaug",
    "from_arrays",
    "from_huggingface",
    "hide_labels",
    "load_dataset",
    "own_test",
    "pad",
    "pooled",
    "rebalance",
    "rows_at",
    "share",
    "standardise_global",
    "standardise_local",
    "streamed",
    "summary",
    "take_clients",
    "take_root",
    "xor_mixup",
]
