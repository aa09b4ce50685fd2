"""Suggestions for an unknown name, by synonyms, else by spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

OTHER_WORDS: Mapping[str, str] = {
    # settings
    "lr": "learning_rate client_learning_rate client_lr local_lr step_size eta",
    "server_lr": "server_learning_rate global_learning_rate global_lr eta_g",
    "rounds": "comm_round comm_rounds communication_rounds global_rounds global_epochs",
    "clients": "users nodes parties partitions client_num_in_total population",
    "clients_per_round": "cohort cohort_size fraction fraction_fit frac participation "
    "participation_rate sample_rate client_num_per_round",
    "epochs": "local_epochs client_epochs local_ep inner_epochs",
    "batch_size": "bs local_bs minibatch_size local_batch_size client_batch_size",
    "weight_decay": "wd",
    "optimizer": "optimiser opt optim client_optimizer",
    "mu": "proximal_mu fedprox_mu",
    "seeds": "seed random_seed trials repeats repetitions",
    "eval_every": "eval_freq eval_frequency eval_interval test_every",
    "algo": "algorithm alg method strategy",
    "compare": "baseline baselines",
    "model": "net network arch architecture model_name",
    "dataset": "data dataset_name",
    "data_dir": "data_path data_folder data_root root",
    "partition": "partitioner partition_method sampler distribution skew non_iid",
    "devices": "device gpu gpus cores workers jobs",
    "precision": "dtype amp mixed_precision bf16",
    "validation": "val_split validation_split val_fraction validation_fraction",
    "test_clients": "test_domains target_domains held_out_clients unseen_clients",
    "out": "output output_dir out_dir save_dir log_dir results_dir",
    "resume": "resume_from continue",
    # samplers
    "dirichlet": "dir lda noniid_labeldir",
    "shards": "shard pathological",
    "iid": "uniform homogeneous homo random",
    # data sets
    "fashion_mnist": "fmnist",
    # models
    "logistic": "logistic_regression softmax_regression",
    "linear": "linear_regression",
    "resnet20": "resnet",
    "lstm": "rnn",
}
"""By a name of this package, the words of papers and other frameworks for it."""


def plain(name: str) -> str:
    """Returns a name in lower case, without dashes and underscores.

    >>> plain("--Clients-per_round")
    'clientsperround'
    """
    return name.lower().replace("-", "").replace("_", "")


def did_you_mean(word: str, known: Iterable[str]) -> list[str]:
    """Returns the known names that a word may mean, at most three.

    >>> did_you_mean("--learning-rate", ["--lr", "--learned"])
    ['--lr']
    >>> did_you_mean("num_rounds", ["rounds", "pace_rounds"])
    ['rounds']
    >>> did_you_mean("--round", ["--rounds"])
    ['--rounds']
    """
    text, names = plain(word), {plain(name): name for name in known}
    counted = text.removeprefix("number").removeprefix("num").removeprefix("of")
    other = _BY_WORD.get(counted)
    for key in (counted, f"{counted}s", counted.removesuffix("s"), other, text.removeprefix("n")):
        if key in names:
            return [names[key]]
    return [names[key] for key in difflib.get_close_matches(text, names)]


def hint(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown word; "" if no name is near.

    >>> hint("dir", ["iid", "dirichlet"])
    '; did you mean dirichlet?'
    """
    found = did_you_mean(word, known)
    return f"; did you mean {' or '.join(found)}?" if found else ""


_BY_WORD = {
    plain(word): plain(name) for name, words in OTHER_WORDS.items() for word in words.split()
}
