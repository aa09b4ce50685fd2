"""Data sets, and the folder where decoded copies are kept."""

from fedjax_sim.data.cache import cache_dir, cached_arrays
from fedjax_sim.data.clients import client_data
from fedjax_sim.data.download import download_dataset
from fedjax_sim.data.sources import (
    DATASETS,
    DataNotFoundError,
    Dataset,
    channel_statistics,
    load_dataset,
)

__all__ = [
    "DATASETS",
    "DataNotFoundError",
    "Dataset",
    "cache_dir",
    "cached_arrays",
    "channel_statistics",
    "client_data",
    "download_dataset",
    "load_dataset",
]
