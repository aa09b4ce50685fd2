"""Tables from scikit-learn: Covertype and diabetes."""

import numpy as np

from fedjax_sim.base.files import open_text
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import DataDir, DataNotFoundError, given_folder, may_download

QUANTITATIVE, WILDERNESS = 10, 4  # first columns of Covertype; the other 40 are soil types
NAMES = ("spruce/fir", "lodgepole pine")  # types 1 and 2 of seven: the two largest classes


def covertype(data_dir: DataDir = None) -> Dataset:
    """Loads the two largest classes of Covertype: spruce/fir and lodgepole pine.

    The full table has 581,012 rows, 495,141 of these classes; scikit-learn's ``fetch_covtype``
    downloads it once (11 MB). If the data folder has ``covtype/covtype.20k.data``, that file is
    read instead: the first 20,000 rows, 8,964 of these classes, as ``name`` shows. Neither its
    class shares nor its order match the full table, whose authors balanced the first 15,120 rows
    over the seven types. No official split keeps the class shares: the test set is a fixed random
    fifth of each class.

    Args:
        data_dir: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        Inputs ``f32[n, 54]``: 10 quantitative columns, which are ``numeric``, then 4 wilderness
        areas and 40 soil types as 0 or 1. ``features`` has "wilderness" and "soil" as numbers.

    Raises:
        DataNotFoundError: if the data are not in the folder, or cannot be downloaded.

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
            allowed = folder is None and may_download()
            x, kind = fetch_covtype(download_if_missing=allowed, return_X_y=True)
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


def diabetes(data_dir: DataDir = None) -> Dataset:
    """Loads the diabetes progression, from 25 to 346, of 442 patients after a year.

    The data are part of scikit-learn. Without an official split, the test set is a fixed random
    fifth.

    Args:
        data_dir: ignored.

    Returns:
        Inputs ``f32[n, 10]``: age, sex, body-mass index, blood pressure and six blood serum
        measurements. Targets ``f32[n]``: regression.

    Source: Efron, Hastie, Johnstone, Tibshirani 2004 <https://arxiv.org/abs/math/0406456>, section
    1; scikit-learn, Pedregosa et al. 2011 <https://arxiv.org/abs/1201.0490>.
    """
    from sklearn.datasets import load_diabetes  # type: ignore[import-untyped, unused-ignore]

    del data_dir
    x, y = load_diabetes(return_X_y=True, scaled=False)
    return from_arrays("diabetes", x, y)
