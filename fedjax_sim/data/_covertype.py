"""Forest cover types of UCI Covertype."""

import numpy as np

from fedjax_sim.base.files import open_text
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import DataDir, DataNotFoundError, given_folder

QUANTITATIVE, WILDERNESS = 10, 4  # the columns are these, and then the 40 soil types
NAMES = ("spruce/fir", "lodgepole pine")  # types 1 and 2 of seven: the two largest classes


def covertype(data_dir: DataDir = None) -> Dataset:
    """The two largest classes of Covertype: spruce/fir and lodgepole pine.

    The full table has 581,012 rows, 495,141 of these classes, and comes from scikit-learn's
    ``fetch_covtype``, which downloads 11 MB once. If the data folder has
    ``covtype/covtype.20k.data``, that file is read instead: only the first 20,000 rows, of which
    8,964 count; ``name`` says so. Its rows are in the order of the table, whose first 15,120 were
    balanced over the seven types by its makers: neither its class shares nor its order are those of
    the whole. No official split keeps the class shares: the test set is a fixed random fifth of
    each class.

    Args:
        data_dir: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        Inputs ``f32[n, 54]``: 10 quantitative columns, which are ``numeric``, then 4 wilderness
        areas and 40 soil types as 0 or 1. ``features`` has "wilderness" and "soil" as numbers.

    Raises:
        DataNotFoundError: if it is not in the folder, or cannot be downloaded.

    Source: Blackard, Dean 1999 <https://doi.org/10.1016/S0168-1699(99)00046-0>; Xue, Klabjan, Luo
    2021 <https://arxiv.org/abs/2108.07433>, section IV-B; the download is by scikit-learn,
    Pedregosa et al. 2011 <https://arxiv.org/abs/1201.0490>.
    """
    folder = given_folder(data_dir)
    file = None if folder is None else folder / "covtype" / "covtype.20k.data"
    if file is not None and file.is_file():
        name = "covertype (first 20,000 rows)"
        with open_text(file) as text:
            table = np.loadtxt(text, np.float32, delimiter=",")
        x, kind = table[:, :-1], table[:, -1].astype(np.int32)
    else:
        from sklearn.datasets import fetch_covtype  # type: ignore[import-untyped, unused-ignore]

        name = "covertype"
        try:
            x, kind = fetch_covtype(download_if_missing=folder is None, return_X_y=True)
        except Exception as error:  # no network, no such file, a wrong checksum, a full disk
            raise DataNotFoundError(
                f"data set 'covertype' is not ready ({str(error).splitlines()[0]}); with internet "
                'run: python -c "from sklearn.datasets import fetch_covtype as f; f()"'
                + ("" if file is None else f", or give the file {file}")
            ) from error
    kept = kind <= len(NAMES)
    x, y = x[kept], kind[kept] - 1
    areas, soils = np.split(x[:, QUANTITATIVE:], [WILDERNESS], axis=1)
    return from_arrays(
        name,
        x,
        y,
        features={"wilderness": areas.argmax(axis=1), "soil": soils.argmax(axis=1)},
        numeric=np.arange(x.shape[1]) < QUANTITATIVE,
        class_names=NAMES,
    )
