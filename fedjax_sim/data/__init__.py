"""Data sets, client data and the cache of decoded data sets."""

from fedjax_sim.data._eicu import eicu as eicu
from fedjax_sim.data._fedaug import FedAug as FedAug
from fedjax_sim.data._fedaug import augmentation_level as augmentation_level
from fedjax_sim.data._fedaug import fedaug, rebalance
from fedjax_sim.data._huggingface import from_huggingface
from fedjax_sim.data._summary import DataSummary as DataSummary
from fedjax_sim.data._summary import summary
from fedjax_sim.data._synthetic import synthetic as synthetic
from fedjax_sim.data._tables import covertype as covertype
from fedjax_sim.data._tables import diabetes as diabetes
from fedjax_sim.data.clients import EvalSet as EvalSet
from fedjax_sim.data.clients import client_data, eval_set, streamed
from fedjax_sim.data.dataset import Dataset, from_arrays, pooled
from fedjax_sim.data.download import download_dataset
from fedjax_sim.data.folder import DataNotFoundError
from fedjax_sim.data.folder import cache_dir as cache_dir
from fedjax_sim.data.folder import cached_arrays as cached_arrays
from fedjax_sim.data.sharing import XorMixup as XorMixup
from fedjax_sim.data.sharing import share, xor_mixup
from fedjax_sim.data.sources import DATASETS, load_dataset
from fedjax_sim.data.sources import parse_dataset as parse_dataset
from fedjax_sim.data.splits import Fold as Fold
from fedjax_sim.data.splits import client_folds, client_holdout, own_test, take_clients, take_root
from fedjax_sim.data.splits import shift_rows as shift_rows
from fedjax_sim.data.standardise import channel_statistics as channel_statistics
from fedjax_sim.data.standardise import standardise_global, standardise_local
from fedjax_sim.data.text import shakespeare as shakespeare
from fedjax_sim.data.text import shakespeare_tokens as shakespeare_tokens
from fedjax_sim.data.text import tiny_shakespeare as tiny_shakespeare
from fedjax_sim.data.text import tiny_shakespeare_tokens as tiny_shakespeare_tokens
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
    "load_dataset",
    "own_test",
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
