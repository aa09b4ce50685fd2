"""Shakespeare's speaking roles: 80 characters in, the next one out, or one after each."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.files import open_text
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.download import prepared_builder, quiet_logs
from fedjax_sim.data.folder import DataDir, find_file
from fedjax_sim.tasks import classification, next_token

LENGTH = 80  # characters that a model sees
TABLE = "shakespeare/plays_by_role.csv.gz"
PADDING = -1  # in y, which next_token leaves out

Samples = tuple[NDArray[Any], NDArray[np.int32]]


def shakespeare(data_dir: DataDir = None, *, roles: int | None = 143, seed: int = 0) -> Dataset:
    """Next-character prediction on Shakespeare's plays, one client for each speaking role.

    A role is a name within a play. Its lines, joined by spaces, are cut into every window of 80
    characters and the character that follows; windows never cross roles. A sample is 80 bytes: the
    table of 37 plays has 1,153 roles with a sample and 4.12 million samples, 330 MB. So a random
    subset is the default, of as many roles as Li et al. and RADFed have: 143 (there 517,000
    samples).

    The last fifth of each role's windows (rounded down) is the test set, as McMahan et al. split in
    time. Characters that are predicted in one part are never predicted in the other.

    Args:
        data_dir: holds ``shakespeare/plays_by_role.csv.gz``, UTF-8, with columns ``play``, ``role``
            and ``text``, one line of dialogue in a row in the order of the play; default is the
            environment variable FEDJAX_SIM_DATA_DIR.
        roles: how many, drawn at random; None for all.
        seed: of the draw.

    Returns:
        Tokens ``uint8[n, 80]``. A class is a character, ``class_names`` has them (93 in that table;
        the papers' edition has 80), the same for every subset of roles.

    Raises:
        DataNotFoundError: if there is no such file.
        ValueError: if there are not so many roles.

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017 <https://arxiv.org/abs/1602.05629>;
    Caldas et al. (LEAF) 2018 <https://arxiv.org/abs/1812.01097>; Li, Sahu, Zaheer, Sanjabi,
    Talwalkar, Smith 2020 <https://arxiv.org/abs/1812.06127>; Xue, Klabjan, Luo 2021
    <https://arxiv.org/abs/2108.07433>, section IV-B.
    """
    return by_role("shakespeare", _plays(data_dir), next_character, classification, roles, seed)


def shakespeare_tokens(
    data_dir: DataDir = None, *, roles: int | None = 143, seed: int = 0
) -> Dataset:
    """The same roles, and the next character after each of a window's 80.

    For language models, which predict at every place: y[t] is the character after x[t]. The windows
    of a role do not overlap, so that each of its characters but the first is predicted once; its
    last training window and its last test window are padded, with -1 in y. The 1,153 roles have
    53,797 samples, 22 MB.

    Args:
        data_dir: as for :func:`fedjax_sim.data.shakespeare`.
        roles: how many, drawn at random as there; None for all.
        seed: of the draw.

    Returns:
        Tokens ``uint8[n, 80]`` and as many targets ``int32[n, 80]``, whose task is
        :func:`fedjax_sim.tasks.next_token`. The last fifth of the characters that are predicted of
        each role (rounded down) is the test set.

    Raises:
        DataNotFoundError: if there is no such file.
        ValueError: if there are not so many roles.
    """
    texts = _plays(data_dir)
    return by_role("shakespeare_tokens", texts, every_character, next_token, roles, seed)


def _plays(data_dir: DataDir) -> dict[str, str]:
    """The texts of the roles of all plays."""
    advice = (
        "give it a gzipped table with the columns play, role and text, or use tiny_shakespeare, "
        "which TFDS downloads"
    )
    file = find_file("shakespeare", data_dir, TABLE, advice)
    with open_text(file) as rows:
        lines = ((f"{row['play']}: {row['role']}", row["text"]) for row in csv.DictReader(rows))
        return _joined(lines)


def tiny_shakespeare(data_dir: DataDir = None) -> Dataset:
    """Next-character prediction on the 1.1 million characters of TFDS's tiny_shakespeare.

    As :func:`fedjax_sim.data.shakespeare` with all roles. A role is a name alone, so that the
    "First Citizen" of two plays is one client.

    Args:
        data_dir: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        Tokens ``uint8[n, 80]`` in 64 characters.

    Raises:
        DataNotFoundError: if it is not in the folder, or cannot be downloaded.
    """
    return by_role("tiny_shakespeare", _tiny(data_dir), next_character, classification)


def tiny_shakespeare_tokens(data_dir: DataDir = None) -> Dataset:
    """The same text by role, and the next character after each of a window's 80.

    As :func:`fedjax_sim.data.shakespeare_tokens`.

    Args:
        data_dir: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        Tokens ``uint8[n, 80]`` in 64 characters, and targets ``int32[n, 80]``.

    Raises:
        DataNotFoundError: if it is not in the folder, or cannot be downloaded.
    """
    return by_role("tiny_shakespeare_tokens", _tiny(data_dir), every_character, next_token)


def _tiny(data_dir: DataDir) -> dict[str, str]:
    """The texts of the roles."""
    with quiet_logs():
        builder = prepared_builder("tiny_shakespeare", data_dir)
        # TFDS cuts the text at 90 % and 95 %, in the middle of a speech.
        parts = [
            builder.as_data_source(split=split)[0]["text"].decode()
            for split in ("train", "validation", "test")
        ]
    # Speeches are blocks "NAME:" and lines, parted by an empty line or two; a few have no lines.
    blocks = (block.strip("\n").split("\n") for block in "".join(parts).split("\n\n"))
    lines = ((name.removesuffix(":"), line) for name, *speech in blocks for line in speech)
    return _joined(lines)


def _joined(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The lines of each role in order, as one text."""
    said: dict[str, list[str]] = defaultdict(list)
    for role, line in lines:
        said[role].append(line)
    return {role: " ".join(parts) for role, parts in said.items()}


def next_character(tokens: NDArray[Any]) -> tuple[Samples, Samples]:
    """Every window of a text and the character after it; the last fifth of them is for the test.

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
    """Windows side by side and what follows each of their characters; the last fifth likewise.

    >>> (x, y), (test_x, test_y) = every_character(np.arange(101))
    >>> x.tolist() == [list(range(80))], y.tolist() == [list(range(1, 81))]
    (True, True)
    >>> test_x[0, :3].tolist(), test_y[0, 18:22].tolist()
    ([80, 81, 82], [99, 100, -1, -1])
    """
    kept = len(tokens) - 1 - (len(tokens) - 1) // 5
    train, test = map(_side_by_side, (tokens[: kept + 1], tokens[kept:]))
    return train, test


def _side_by_side(tokens: NDArray[Any]) -> Samples:
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
    """Windows of texts, one client for each.

    Args:
        name: of the data set.
        texts: by role; those of 80 characters or fewer are left out.
        cut: makes training and test samples of a role's text, :func:`next_character` or
            :func:`every_character`.
        task: what is learnt then, of the number of characters.
        roles: how many, drawn at random and kept in their order; None for all.
        seed: of the draw.

    Returns:
        The data set.

    Raises:
        ValueError: if there are not so many roles.

    Example:
        >>> texts = {"A": "ab" * 45, "B": "too short"}
        >>> data = by_role("abc", texts, next_character, classification)
        >>> data.train_x.shape, data.test_x.shape, data.client_names
        ((8, 80), (2, 80), ('A',))
        >>> "".join(data.class_names[t] for t in data.train_x[0, :4])
        'abab'
        >>> data.class_names[data.train_y[0]]
        'a'
    """
    alphabet = np.unique(_codes("".join(texts.values())))
    names = [role for role, text in texts.items() if len(text) > LENGTH]
    if roles is not None:
        if not 1 <= roles <= len(names):
            raise ValueError(f"roles must be in 1 to {len(names)}, or None for all, got {roles}")
        chosen = np.random.default_rng(seed).choice(len(names), roles, replace=False)
        names = [names[i] for i in np.sort(chosen)]
    token = np.min_scalar_type(len(alphabet))  # uint8, unless the text has hundreds of letters
    samples = [cut(np.searchsorted(alphabet, _codes(texts[role])).astype(token)) for role in names]
    train, test = zip(*samples, strict=True)
    train_x, train_y, train_client = _pooled(train)
    test_x, test_y, test_client = _pooled(test)
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


def _pooled(each: Sequence[Samples]) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
    """The samples of all roles, and the role of each."""
    x, y = (np.concatenate(arrays) for arrays in zip(*each, strict=True))
    client = np.arange(len(each), dtype=np.int32)
    return x, y, np.repeat(client, [len(mine) for mine, _ in each])


def _codes(text: str) -> NDArray[np.uint32]:
    """The Unicode code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
