"""Shakespeare by speaking role: prediction of the next character, or of every next character."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.files import open_text
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.download import prepared_builder
from fedjax_sim.data.folder import DataDir, given_folder, not_ready, quiet_logs
from fedjax_sim.tasks import classification, next_token

LENGTH = 80  # characters of an input
TABLE = "shakespeare/plays_by_role.csv.gz"
COLUMNS = ("play", "role", "text")
PADDING = -1  # in y, ignored by next_token

Samples = tuple[NDArray[Any], NDArray[np.int32]]


def shakespeare(data_dir: DataDir = None, *, roles: int | None = 143, seed: int = 0) -> Dataset:
    """Loads next-character prediction on Shakespeare's plays, with speaking roles as clients.

    A role is a name within a play. Its lines, joined by spaces, are cut into every window of 80
    characters with the following character as target; windows never cross roles. The table of 37
    plays has 1,153 roles with samples and 4.12 million samples, 330 MB. The default is therefore a
    random subset of 143 roles, as many as Li et al. and RADFed use (here 517,000 samples).

    The last fifth of each role's windows (rounded down) is the test set, as McMahan et al. split by
    time. No character is a target in both sets.

    Args:
        data_dir: a folder with ``shakespeare/plays_by_role.csv.gz``, UTF-8, with columns ``play``,
            ``role`` and ``text``, one line of dialogue a row in the order of the play; defaults to
            the environment variable FEDJAX_SIM_DATA_DIR.
        roles: number of roles, drawn at random; None for all.
        seed: random seed.

    Returns:
        Tokens ``uint8[n, 80]``. Classes are characters, listed in ``class_names`` (93 in this
        table; 80 in the papers' edition), and do not depend on the subset of roles.

    Raises:
        DataNotFoundError: if the file is missing.
        ValueError: if there are fewer roles.

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017 <https://arxiv.org/abs/1602.05629>;
    Caldas et al. (LEAF) 2018 <https://arxiv.org/abs/1812.01097>; Li, Sahu, Zaheer, Sanjabi,
    Talwalkar, Smith 2020 <https://arxiv.org/abs/1812.06127>; Xue, Klabjan, Luo 2021
    <https://arxiv.org/abs/2108.07433>, section IV-B.
    """
    return by_role(
        "shakespeare", _read_plays(data_dir), next_character, classification, roles, seed
    )


def shakespeare_tokens(
    data_dir: DataDir = None, *, roles: int | None = 143, seed: int = 0
) -> Dataset:
    """Loads Shakespeare's plays by role for language models, which predict every next character.

    Target y[t] is the character after x[t]. Windows of a role do not overlap, so that each
    character but the first is predicted once; its last training and test windows are padded, with
    -1 in y. The 1,153 roles have 53,797 samples, 22 MB.

    Args:
        data_dir: as for ``shakespeare``.
        roles: number of roles, drawn at random as in ``shakespeare``; None for
            all.
        seed: random seed.

    Returns:
        Tokens ``uint8[n, 80]`` and targets ``int32[n, 80]`` of the task
        :func:`fedjax_sim.tasks.next_token`. The last fifth of each role's targets (rounded down) is
        the test set.

    Raises:
        DataNotFoundError: if the file is missing.
        ValueError: if there are fewer roles.
    """
    texts = _read_plays(data_dir)
    return by_role("shakespeare_tokens", texts, every_character, next_token, roles, seed)


def _read_plays(data_dir: DataDir) -> dict[str, str]:
    advice = (
        "give it a gzipped table with the columns play, role and text, or use tiny_shakespeare, "
        "which TFDS downloads"
    )
    folder = given_folder(data_dir)
    if folder is None or not (folder / TABLE).is_file():
        raise not_ready("shakespeare", folder, f"no file {TABLE}", advice)
    with open_text(folder / TABLE) as lines:
        rows = csv.DictReader(lines, restval="")
        if not {*COLUMNS} <= {*(rows.fieldnames or ())}:
            wanted, got = ", ".join(COLUMNS), ", ".join(rows.fieldnames or ()) or "none"
            raise ValueError(f"{folder / TABLE} must have the columns {wanted}, got {got}")
        return _join_lines((f"{row['play']}: {row['role']}", row["text"]) for row in rows)


def tiny_shakespeare(data_dir: DataDir = None) -> Dataset:
    """Loads next-character prediction on the 1.1 million characters of TFDS's tiny_shakespeare.

    Samples are as in ``shakespeare`` with all roles, but roles are names only:
    "First Citizen" is one client in two plays.

    Args:
        data_dir: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        Tokens ``uint8[n, 80]`` of 64 characters.

    Raises:
        DataNotFoundError: if the data are not in the folder, or cannot be downloaded.
    """
    return by_role("tiny_shakespeare", _read_tiny(data_dir), next_character, classification)


def tiny_shakespeare_tokens(data_dir: DataDir = None) -> Dataset:
    """Loads tiny_shakespeare by role like ``shakespeare_tokens``.

    Args:
        data_dir: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        Tokens ``uint8[n, 80]`` of 64 characters, and targets ``int32[n, 80]``.

    Raises:
        DataNotFoundError: if the data are not in the folder, or cannot be downloaded.
    """
    return by_role("tiny_shakespeare_tokens", _read_tiny(data_dir), every_character, next_token)


def _read_tiny(data_dir: DataDir) -> dict[str, str]:
    with quiet_logs():
        builder = prepared_builder("tiny_shakespeare", data_dir)
        # TFDS cuts the text at 90 % and 95 %, in the middle of a speech.
        parts = [
            builder.as_data_source(split=split)[0]["text"].decode()
            for split in ("train", "validation", "test")
        ]
    # Speeches are blocks of "NAME:" and lines, separated by one or two empty lines.
    blocks = (block.strip("\n").split("\n") for block in "".join(parts).split("\n\n"))
    lines = ((name.removesuffix(":"), line) for name, *speech in blocks for line in speech)
    return _join_lines(lines)


def _join_lines(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Joins the lines of each role to one text."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for role, line in lines:
        by_name[role].append(line)
    return {role: " ".join(parts) for role, parts in by_name.items()}


def next_character(tokens: NDArray[Any]) -> tuple[Samples, Samples]:
    """Cuts every window of a text with its next character; the last fifth is the test set.

    >>> (x, y), (test_x, test_y) = next_character(np.arange(90))
    >>> x.shape, y.tolist(), test_x.shape, test_y.tolist()
    ((8, 80), [80, 81, 82, 83, 84, 85, 86, 87], (2, 80), [88, 89])
    """
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)
    kept = len(windows) - len(windows) // 5
    train, test = (
        (part[:, :LENGTH], part[:, LENGTH].astype(np.int32))
        for part in (windows[:kept], windows[kept:])
    )
    return train, test


def every_character(tokens: NDArray[Any]) -> tuple[Samples, Samples]:
    """Cuts adjacent windows with all next characters; the last fifth is the test set.

    >>> (x, y), (test_x, test_y) = every_character(np.arange(101))
    >>> x.tolist() == [list(range(80))], y.tolist() == [list(range(1, 81))]
    (True, True)
    >>> test_x[0, :3].tolist(), test_y[0, 18:22].tolist()
    ([80, 81, 82], [99, 100, -1, -1])
    """
    kept = len(tokens) - 1 - (len(tokens) - 1) // 5
    train, test = map(_adjacent_windows, (tokens[: kept + 1], tokens[kept:]))
    return train, test


def _adjacent_windows(tokens: NDArray[Any]) -> Samples:
    x, y = tokens[:-1], tokens[1:].astype(np.int32)
    missing = -len(x) % LENGTH
    x, y = np.pad(x, (0, missing)), np.pad(y, (0, missing), constant_values=PADDING)
    return x.reshape(-1, LENGTH), y.reshape(-1, LENGTH)


def by_role(
    name: str,
    texts: Mapping[str, str],
    cut: Callable[[NDArray[Any]], tuple[Samples, Samples]],
    task: Callable[[int], Task],
    roles: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Makes a data set of the texts of roles, except texts of 80 characters or fewer.

    ``cut`` cuts tokens into training and test samples; ``task`` makes the task for a number of
    characters; ``roles`` are drawn at random and kept in order, None for all.

    >>> texts = {"A": "ab" * 45, "B": "too short"}
    >>> data = by_role("abc", texts, next_character, classification)
    >>> data.train_x.shape, data.test_x.shape, data.client_names
    ((8, 80), (2, 80), ('A',))
    >>> "".join(data.class_names[t] for t in data.train_x[0, :4])
    'abab'
    """
    alphabet = np.unique(_codes("".join(texts.values())))
    names = [role for role, text in texts.items() if len(text) > LENGTH]
    if not names:
        raise ValueError(f"{name} must have a role of more than {LENGTH} characters, got none")
    if roles is not None:
        if not 1 <= roles <= len(names):
            raise ValueError(f"roles must be in 1 to {len(names)}, or None for all, got {roles}")
        sampled = np.random.default_rng(seed).choice(len(names), roles, replace=False)
        names = [names[i] for i in np.sort(sampled)]
    token = np.min_scalar_type(len(alphabet))  # uint8, unless there are more than 255 characters
    samples = [cut(np.searchsorted(alphabet, _codes(texts[role])).astype(token)) for role in names]
    train, test = zip(*samples, strict=True)
    train_x, train_y, train_client = _concatenate(train)
    test_x, test_y, test_client = _concatenate(test)
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        task=task(len(alphabet)),
        mean=None,
        std=None,
        train_client=train_client,
        test_client=test_client,
        client_names=tuple(names),
        class_names=tuple(map(chr, alphabet)),
        test_set="the last fifth of each role's text",
    )


def _concatenate(
    each: Sequence[Samples],
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
    """Returns the samples of all roles, and the role of each sample."""
    x, y = (np.concatenate(arrays) for arrays in zip(*each, strict=True))
    client = np.arange(len(each), dtype=np.int32)
    return x, y, np.repeat(client, [len(inputs) for inputs, _ in each])


def _codes(text: str) -> NDArray[np.uint32]:
    """Returns the Unicode code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
