"""In-hospital mortality in the eICU database, with hospitals as clients."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import open_text
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import DataDir, given_folder, not_ready

if TYPE_CHECKING:
    import pandas as pd

MEASURED = (
    "urine", "wbc", "temperature", "respiratoryrate", "sodium", "heartrate", "meanbp", "ph",
    "hematocrit", "creatinine", "albumin", "pao2", "pco2", "bun", "glucose", "bilirubin", "fio2",
    "eyes", "motor", "verbal",
)  # fmt: skip
COUNTS = ("bedcount", "visitnumber")
TREATMENT = ("intubated", "vent", "dialysis", "meds")
HISTORY = (
    "gender", "thrombolytics", "aids", "hepaticfailure", "lymphoma", "metastaticcancer",
    "leukemia", "immunosuppression", "cirrhosis", "electivesurgery", "activetx", "readmit", "ima",
    "midur", "oobventday1", "oobintubday1", "diabetes",
)  # fmt: skip
SOURCES = range(1, 9)  # codes of admitsource

STAY, AGE, HOSPITAL, OUTCOME = "patientunitstayid", "age", "hospitalid", "actualhospitalmortality"
CATEGORIES = ("admitdiagnosis", "admitsource")
TABLES = {
    "patient": (STAY, AGE, HOSPITAL),
    "apacheApsVar": (STAY, *MEASURED, *TREATMENT),
    "apachePredVar": (STAY, *COUNTS, *HISTORY, *CATEGORIES),
    "apachePatientResult": (STAY, OUTCOME),
}
SOURCE = "the tables come from PhysioNet, see https://eicu-crd.mit.edu"
Columns = dict[str, NDArray[Any]]


def eicu(
    data_dir: DataDir = None, *, min_admissions: int = 100, max_mortality: float = 0.2
) -> Dataset:
    """Loads in-hospital mortality and the variables of the APACHE predictions, by hospital.

    A sample is a unit stay with an APACHE result and a known age. Hospitals are included if they
    have more than ``min_admissions`` stays and a mortality of at most ``max_mortality`` (RADFed:
    164 hospitals, 901 stays on average).

    Inputs are 52 columns of the tables apacheApsVar and apachePredVar: age and 22 measurements and
    counts, which are ``numeric``; 21 columns of 0 or 1; and the admission source as 8 columns of 0
    or 1. Age "> 89" becomes 90. Missing values are -1, as in the tables, also in columns of 0 or 1.
    Outcomes (diedinhospital, dischargelocation), repeated and constant columns are excluded, as are
    ejectfx, graftcount and amilocation, which exist for few diagnoses only. The admission diagnosis
    has hundreds of codes and is a feature, not an input.

    Nothing is cached, as access to the full database requires an agreement.

    Args:
        data_dir: a folder with ``patient``, ``apacheApsVar``, ``apachePredVar`` and
            ``apachePatientResult``, each .csv or .csv.gz as on PhysioNet, or with these in
            ``eicu/``; defaults to the environment variable FEDJAX_SIM_DATA_DIR.
        min_admissions: hospitals with this many stays or fewer are excluded.
        max_mortality: hospitals above this share of deaths are excluded.

    Returns:
        Inputs ``f32[n, 52]``; class 1 is death; clients are hospitals by number; ``features`` has
        "admitdiagnosis" and "admitsource". The test set is a random fifth of each class.

    Raises:
        DataNotFoundError: if a table is missing.
        ValueError: if no hospital is left.

    Source: Pollard, Johnson, Raffa, Celi, Mark, Badawi 2018
    <https://doi.org/10.1038/sdata.2018.178>; Xue, Klabjan, Luo 2021
    <https://arxiv.org/abs/2108.07433>, section IV-B.
    """
    return _load("eicu", data_dir, min_admissions, max_mortality)


def eicu_demo(data_dir: DataDir = None, *, min_admissions: int = 10) -> Dataset:
    """Loads the open demo of eICU from ``eicu_demo/``, see ``eicu``.

    Its largest hospital has 18 stays with a result.
    """
    return _load("eicu_demo", data_dir, min_admissions, 0.2)


def _load(name: str, data_dir: DataDir, min_admissions: int, max_mortality: float) -> Dataset:
    stays = _stays(name, data_dir)
    died, hospital = stays[OUTCOME] == "EXPIRED", stays[HOSPITAL].astype(np.int64)
    _, where, sizes = np.unique(hospital, return_inverse=True, return_counts=True)
    mortality = np.bincount(where, weights=died) / sizes
    kept = ((sizes > min_admissions) & (mortality <= max_mortality))[where]
    if not kept.any():
        raise ValueError(
            f"min_admissions and max_mortality must leave a hospital, got {min_admissions} and "
            f"{max_mortality}; the largest of {len(sizes)} has {sizes.max(initial=0)} admissions "
            "with a result"
        )
    x, numeric = _inputs(stays)
    return from_arrays(
        name,
        x[kept],
        died[kept].astype(np.int32),
        client=hospital[kept],
        features={key: stays[key][kept].astype(str) for key in CATEGORIES},
        numeric=numeric,
        class_names=("alive", "expired"),
    )


def _inputs(stays: Columns) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns the columns of x, and which of them are numeric."""
    columns = [np.where(stays[AGE] == "> 89", "90", stays[AGE]).astype(np.float32)]
    columns += [stays[key].astype(np.float32) for key in (*MEASURED, *COUNTS, *TREATMENT, *HISTORY)]
    columns += [stays["admitsource"] == str(code) for code in SOURCES]
    numeric = np.arange(len(columns)) < 1 + len(MEASURED) + len(COUNTS)
    return np.stack(columns, axis=1).astype(np.float32), numeric


def _stays(name: str, data_dir: DataDir) -> Columns:
    """Joins the tables on the stays that occur in all; texts, "-1" if missing."""
    import pandas as pd

    folder = _folder(name, data_dir)
    stays = reduce(pd.merge, [_read(name, folder, table) for table in TABLES])
    known = (stays[AGE] != "-1") & stays[OUTCOME].isin(("ALIVE", "EXPIRED"))
    stays = stays[known].sort_values(STAY, key=lambda ids: ids.astype(np.int64))
    return {key: stays[key].to_numpy(object) for key in stays}


def _folder(name: str, data_dir: DataDir) -> Path:
    """Returns the folder of the tables: the data folder, or its subfolder of this name."""
    folder = given_folder(data_dir)
    if folder is None:
        raise not_ready(name, folder, "no csv tables", SOURCE)
    return folder if _file(folder, "patient") else folder / name


def _file(folder: Path, table: str) -> Path | None:
    files = (folder / f"{table}{ending}" for ending in (".csv", ".csv.gz"))
    return next((file for file in files if file.is_file()), None)


def _read(name: str, folder: Path, table: str) -> pd.DataFrame:
    """Reads the columns of a table in ``TABLES`` as texts, "-1" if empty."""
    import pandas as pd

    file = _file(folder, table)
    if file is None:
        raise not_ready(name, folder, f"no file {table}.csv or {table}.csv.gz", SOURCE)
    wanted = TABLES[table]
    with open_text(file) as text:
        try:
            rows = pd.read_csv(
                text, usecols=lambda column: column in wanted, dtype=str, keep_default_na=False
            )
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise ValueError(f"{file} must be csv, got: {error}") from error
    missing = [key for key in wanted if key not in rows]
    if missing:
        raise ValueError(f"{file} has no column {', '.join(missing)}")
    # A stay has two results, of APACHE IV and IVa, with the same outcome.
    return rows.drop_duplicates(STAY).replace("", "-1")
