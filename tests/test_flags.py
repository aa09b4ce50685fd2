"""Every flag of every method: what it reads, what it changes, and where it would change nothing.

And the arguments of ``simulate``, which are refused before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

import fedjax_sim as fs
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.cli.config import GROUPS
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.making import Common, make, stand_in
from fedjax_sim.cli.methods import NEEDS, parameters
from fedjax_sim.cli.parser import OWN_MODELS, parse
from fedjax_sim.engine.reading import without_dead_code
from fedjax_sim.run.candidates import traceable
from fedjax_sim.run.checks import check_trained

OURS = sorted(ALGORITHMS.own)
# What a flag hangs on, so that it may be given at all.
BESIDE: dict[str, dict[str, Any]] = {
    "gamma": {"importance": "sample"},
    "initial_scores": {"importance": "minibatch"},
    "v0": {"server_optimizer": "adam"},
    "grace": {"decay": "hinge"},
    "byzantine": {"aggregator": "krum"},
    "equal_weights": {"aggregator": "mean"},
    "bucket_size": {"mixing": "buckets"},
    "clip_lr": {"quantile": 0.5},
    "count_noise": {"quantile": 0.5},
}
BESIDE |= {key: {"server_optimizer": "yogi"} for key in ("server_lr", "beta1", "beta2", "tau")}


def members(hint: Any) -> tuple[Any, ...]:
    """The types that a parameter may have."""
    return typing.get_args(hint) if typing.get_origin(hint) is not Literal else (hint,)


PATTERN = "*kernel"  # the methods' words without choices are names of layers


def allowed(hint: Any) -> list[Any]:
    """All values of a Literal and a bool, some of a number."""
    plain: dict[Any, list[Any]] = {bool: [False, True], int: [1, 2, 3], float: [0.25, 2.0]}
    plain[str] = [PATTERN]
    found: list[Any] = []
    for member in members(hint) or (hint,):
        choice = typing.get_origin(member) is Literal
        found += typing.get_args(member) if choice else plain.get(member, [])
    return found


def argv_of(name: str, options: dict[str, Any]) -> list[str]:
    """The command line of one method with these options."""
    argv = ["--algo", name, "--compare", "none"]
    for key, value in options.items():
        if isinstance(value, bool):
            argv.append(flag(key if value else f"no_{key}"))
        else:
            argv += [flag(key), str(value)]
    return argv


@pytest.mark.parametrize("name", OURS)
def test_every_flag_reads_every_value(name: str) -> None:
    """As a value of the parameter's type: an option 1 is the integer, not its text."""
    own = parameters(name)
    for key, parameter in own.items():
        beside = {k: v for k, v in BESIDE.get(key, {}).items() if k in own}
        values = allowed(parameter.annotation)
        assert values, key
        for value in values:
            read = parse(argv_of(name, beside | {key: value})).options[name][key]
            assert (read, type(read)) == (value, type(value))


def test_every_choice_of_the_command_is_read() -> None:
    """The settings that are one of some words."""
    beside = {"standardise": ["--split", "clients"], "lora_variant": ["--lora", "2"]}
    beside["optimizer"] = ["--weight-decay", "0.1"]  # without it AdamW is Adam
    seen = 0
    for group, settings in GROUPS.items():
        hints = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            words = [w for w in allowed(hints[field.name]) if isinstance(w, str) and w != PATTERN]
            for word in words:
                config = parse([*beside.get(field.name, []), flag(field.name), word])
                assert getattr(getattr(config, group), field.name) == word
            seen += bool(words)
    assert seen >= 4


def test_a_value_that_is_no_choice_is_told_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^--option: must be 1 or 2, got '3'$"):
        parse(["--algo", "scaffold", "--option", "3"])


WITHOUT_EFFECT = {
    "radfed --gamma 0.5": "radfed: --gamma is for --importance",
    "radfed --server-lr 0.5": "radfed: --server-lr is for --server-optimizer",
    "radfed --server-optimizer adagrad --beta2 0.5": (
        "radfed: --beta2 is for --server-optimizer adam or yogi, not adagrad"
    ),
    "fedasync --grace 3": "fedasync: --grace is for --decay hinge, not polynomial",
    "fedasync --decay constant --slope 3": (
        "fedasync: --slope is for --decay polynomial or hinge, not constant"
    ),
    "robust --byzantine 0.1": (
        "robust: --byzantine is for --aggregator trimmed_mean, krum, multi_krum or caf, or "
        "--mixing nearest, not coordinate_median"
    ),
    "robust --no-equal-weights": (
        "robust: --no-equal-weights is for --aggregator mean or geometric_median, or --mixing "
        "buckets, not coordinate_median"
    ),
    "dp_fedavg --clip-lr 0.5": "dp_fedavg: --clip-lr is for --quantile",
    "robust --mixing nearest --bucket-size 3": (
        "robust: --bucket-size is for --mixing buckets, not nearest"
    ),
    "fedavg --standardise global": "--standardise global is for --split clients or holdout",
    "fedavg --share-alpha 0.5": "--share-alpha is for --share-beta",
}


@pytest.mark.parametrize("given", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(WITHOUT_EFFECT[given])}"):
        parse(["--compare", "none", "--algo", *given.split()])


# Of a value that is none, what is to be typed instead.
NO_VALUE = {
    "--selection foo": "--selection: unknown selection 'foo'; use one of awake, cyclic, ",
    "--aggregator foo(2)": "--aggregator: unknown aggregator 'foo'; use one of caf, ",
    "--clock foo": "--clock: foo: unknown clock 'foo'; use one of constant(seconds), ",
    "--sink foo": "--sink: unknown sink 'foo'; use one of tensorboard, wandb, ",
    "--model mpl": "--model: unknown model 'mpl'; did you mean mlp?",
    "--share-beta 0.1 --share-alpha 2": "--share-alpha: must be a number above 0 and at most 1,",
    "--partition dirichlet(alpa=1)": (
        "--partition: sampler 'dirichlet(alpa=1)' must be written "
        "dirichlet(alpha, min_size=1, balanced=False)"
    ),
}


@pytest.mark.parametrize("given", NO_VALUE)
def test_a_value_that_is_none_comes_with_what_to_type_instead(given: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(NO_VALUE[given])}"):
        parse(["--compare", "none", "--algo", "fedavg", *given.split()])


def test_a_flag_that_another_method_needs_is_no_mistake() -> None:
    config = parse(["--algo", "radfed", "--compare", "fedavgm", "--server-lr", "0.5"])
    assert config.options["fedavgm"] == {"server_lr": 0.5}
    with pytest.raises(ValueError, match=r"^radfed: --beta2 is for"):
        parse(["--algo", "radfed", "--compare", "fedavgm", "--beta2", "0.5"])


class Small(NamedTuple):
    """A problem that is traced in a moment."""

    model: fs.Model
    objective: fs.base.Objective
    data: fs.ClientData
    common: Common


@functools.cache
def problem() -> Small:
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    owned = fs.partition.partition_from_lists(
        np.split(np.arange(30), [1, 2, 5, 8, 15, 20, 24, 26, 28])
    )
    data = fs.client_data(x, np.arange(40) % 3, owned, root=np.arange(30, 40))
    model = fs.models.mlp((6,), 3, widths=(4, 4))  # of three layers
    objective = fs.empirical_risk(model)
    common = stand_in(model, classes=3)
    return Small(model, objective, jax.tree.map(jnp.asarray, data), common)


@pytest.fixture(scope="module")
def small() -> Small:
    return problem()


def made(small: Small, name: str, options: dict[str, Any], lr: Any = 0.1) -> fs.Algorithm:
    given: dict[str, Any] = {"cluster_limit": 40.0} if name == "dynamic_clustering" else {}
    given |= {"norms": "*bias"} if name == "fedbn" else {}  # the network has no norms
    optimizer = optax.sgd(lr, momentum=0.9)
    local = fs.local_sgd(small.objective, optimizer, batch_size=4, epochs=2)
    given |= options
    execution = given.pop("execution", fs.make_execution(devices=1))
    common = small.common._replace(local=local, lr=lr, execution=execution)
    return make(name, common, **given)


def switches(name: str) -> Iterator[dict[str, Any]]:
    """No option, and each value of each option that is a choice or off by default."""
    yield {}
    for key, parameter in parameters(name).items():
        choice = any(typing.get_origin(m) is Literal for m in members(parameter.annotation))
        if choice or parameter.annotation is bool:
            yield from ({key: v} for v in allowed(parameter.annotation) if v != parameter.default)


def refused(small: Small, name: str, options: dict[str, Any]) -> bool:
    """Whether the command refuses these options together, or a value is out of range."""
    try:
        parse(argv_of(name, options))
        made(small, name, options)
    except ValueError:
        return True
    return False


IN_TURN: dict[str, set[str]] = {
    "dp_fedavg": {"clip", "noise_multiplier", "quantile"},
    "dp_ftrl": {"clip", "noise_multiplier"},
    "dynamic_clustering": {"cluster_limit"},
    "fedavg_sketched": {"share"},
    "fedavg_top_k": {"sparsity"},
    "fedbabu": {"fine_tuning_epochs"},
    "fednova": {"mu"},
    "fedrep": {"head_epochs"},
    "fine_tuned": {"fine_tuning_epochs"},
    "ozdayi": {"server_epochs"},
    "pfedme": {"fine_tuning_epochs"},
    "scaffnew": {"coin"},
    "stc": {"sparsity"},
}
"""Numbers that a part counts or branches by when it is made."""


IN_TURN_BESIDE = {"fedadagrad": ("variant", "beta1"), "radfed": ("importance", "gamma")}
"""And one if another option is given, which stands first."""


def numbers_of(name: str, options: dict[str, Any]) -> dict[str, float]:
    """The other numbers of a method, at their defaults, that a program can be given."""
    given, branched = IN_TURN_BESIDE.get(name, ("", ""))
    others = parameters(name).keys() - options.keys() - IN_TURN.get(name, set())
    others -= {branched} if given in options else set()
    defaults = {key: parameters(name)[key].default for key in sorted(others)}
    return {key: value for key, value in defaults.items() if isinstance(value, float)}


class Traced(NamedTuple):
    """A program of a method.

    Attributes:
        does: its operations, hashed.
        idle: the numbers on which nothing depends that it returns.
        state: what it returns as the state.
    """

    does: str
    idle: frozenset[str]
    state: Any


def is_program(part: Any) -> bool:
    return isinstance(part, core.Jaxpr | core.ClosedJaxpr)


def operations(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Those of a program in order, with what they give, their settings and constants."""
    for operation in jaxpr.eqns:
        yield operation.primitive.name
        yield from (str(a.val) for a in operation.invars if isinstance(a, core.Literal))
        yield from (a.aval.str_short() for a in operation.outvars)
        for part in jax.tree.leaves([*operation.params.values()], is_leaf=is_program):
            if is_program(part):
                yield from operations(part if isinstance(part, core.Jaxpr) else part.jaxpr)
            elif isinstance(part, int | float | str):
                yield str(part)
    yield from (str(a.val) for a in jaxpr.outvars if isinstance(a, core.Literal))


def traced(small: Small, name: str, options: dict[str, Any], lr: Any, numbers: Any) -> Traced:
    """What a method computes: start, round, the clients' own models, finish.

    Args:
        small: of what.
        name: of the method.
        options: its settings that are known when it is traced.
        lr: an argument of the program.
        numbers: other settings that are; two points are two runs of it.
    """

    def run(lr: Any, numbers: dict[str, Any], key: jax.Array, data: fs.ClientData) -> Any:
        algorithm = made(small, name, options | numbers, lr)
        begun = algorithm.init(key, small.model.init(key), data)
        state, metrics = algorithm.step(key, begun, data)
        chex.assert_trees_all_equal_shapes_and_dtypes(begun, state)
        by_slot = [metrics.client, metrics.source, *jax.tree.leaves(metrics.bytes)]
        chex.assert_shape(by_slot, (algorithm.slots,))
        chex.assert_type(by_slot, jnp.int32)
        once = metrics._replace(client=None, source=None, bytes=None)  # type: ignore[arg-type]
        chex.assert_shape(jax.tree.leaves(once), ())
        own: Any = ()
        if algorithm.personal is not None:
            clients = jnp.arange(data.clients, dtype=jnp.int32)
            own = algorithm.score_personal(key, state, data, lambda *a: a[1], (), clients)
        done = None if algorithm.parts.finish is None else algorithm.collect(key, state, data)
        evaluated = algorithm.evaluated(key, state, data)
        return state, metrics, evaluated, own, done, algorithm.round_factor

    program = jax.vmap(run, in_axes=(0, 0, None, None)) if np.ndim(lr) else run
    given = (lr, numbers, jax.random.key(0), small.data)
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(*given)
    rest, (_, used, *_) = without_dead_code(closed.jaxpr, given)
    consts = [np.asarray(c).tobytes() for c in closed.consts]
    found = hashlib.sha256(b"".join([" ".join(operations(rest)).encode(), *consts])).hexdigest()
    return Traced(found, frozenset(key for key in numbers if not used[key]), shapes[0])


def fitting(name: str) -> dict[str, Any]:
    """Slots that are as many as neither the clients nor a multiple of four devices."""
    cohort = {"clients_per_round": 10 if name == "scaffnew" else 6}
    return cohort | ({"mediator_size": 2} if name == "astraea" else {})


@functools.cache
def two_points(name: str) -> Traced:
    """With all numbers as arguments, as the points of a sweep, and on several devices."""
    options = fitting(name) | {"execution": fs.make_execution(devices=4)}
    lr, numbers = jax.tree.map(lambda value: jnp.full(2, value), (0.1, numbers_of(name, {})))
    return traced(problem(), name, options, lr, numbers)


@functools.cache
def one_point(name: str, options: frozenset[tuple[str, Any]]) -> Traced:
    """With other options."""
    given = dict(options)
    with jax.numpy_dtype_promotion("standard"):  # as optax's Adam needs it
        return traced(problem(), name, given, 0.1, numbers_of(name, given))


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_all_numbers_of_a_method_but_some_can_be_those_of_one_program(
    name: str, small: Small
) -> None:
    """And states have one form, before and after a round, on any number of devices."""
    algorithm, root = made(small, name, fitting(name)), jax.random.key(0)
    begun = jax.eval_shape(lambda: algorithm.init(root, small.model.init(root), small.data))
    twice = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), begun)
    chex.assert_trees_all_equal_shapes_and_dtypes(two_points(name).state, twice)

    def make(**options: Any) -> fs.Algorithm:
        return made(small, name, options)

    for key in IN_TURN.get(name, ()):
        default = parameters(name)[key].default
        point = {key: default if isinstance(default, float) else 0.5}
        assert not traceable(make, point, [key], small.model, small.data)


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_every_flag_that_is_taken_changes_the_program(name: str, small: Small) -> None:
    """Beside every value of every option that is a choice; numbers are asked of one program."""
    own = parameters(name)
    for switch in switches(name):
        if refused(small, name, switch):
            continue
        before = frozenset(switch.items())
        idle = (one_point(name, before) if switch else two_points(name)).idle
        told = numbers_of(name, switch).keys() - idle
        for key in own.keys() - switch.keys() - told:
            default = own[key].default
            given = (switch | {key: v} for v in allowed(own[key].annotation) if v != default)
            taken = (options for options in given if not refused(small, name, options))
            for options in itertools.islice(taken, 1):
                after = one_point(name, frozenset(options.items()))
                assert after.does != one_point(name, before).does, f"{name} {options}"


def test_the_rules_name_flags_that_are_there() -> None:
    for flags, options in NEEDS:
        owners = [name for name in OURS if next(iter(options)) in parameters(name)]
        assert owners
        for key in flags:
            assert any(key in parameters(name) for name in owners), key
        for option, values in options.items():
            for name in owners:
                assert set(values) <= set(allowed(parameters(name)[option].annotation))


def test_methods_with_models_of_the_clients_own_are_scored_by_them(small: Small) -> None:
    own = {name for name in OURS if made(small, name, {}).personal is not None}
    assert own == OWN_MODELS
    for name in own:
        assert parse(["--algo", "fedavg", "--compare", name]).scores.split == "holdout"
        assert parse(["--algo", name, "--split", "official"]).scores.split == "official"
        assert parse(["--algo", name, "--partition", "a.npz"]).scores.split == "official"
    assert parse(["--algo", "fedprox"]).scores.split == "official"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a method that was not called": (
        {"algorithm": fs.fedavg},
        "algorithm must be what fs.compose or a named method returns, got the function fedavg",
    ),
    "a name": (
        {"algorithm": "fedavg"},
        "algorithm must be what fs.compose or a named method returns, got str",
    ),
    "a factory": (
        {"model": fs.models.mlp},
        "model must be a Model, see fs.models, got the function mlp",
    ),
    "another model": (
        {"model": fs.models.mlp((6,), 3, widths=(2,))},
        "model must be the one that the local update trains, of 63 numbers in other shapes, got "
        "one of 23",
    ),
    "another model of the same shapes": (
        {"model": fs.models.with_scaling(problem().model, 0.0, 2.0)},
        "model must be the one that the local update trains, got one of the same shapes that "
        "computes otherwise: give simulate the model that empirical_risk was given",
    ),
    "a data set": (
        {"data": fs.load_dataset("digits")},
        "data must be a ClientData, see fs.client_data, got Dataset",
    ),
    "half a round": ({"rounds": 1.5}, "rounds must be a whole number at least 1, got 1.5"),
    "rounds beyond int32": ({"rounds": 2**31}, "rounds must be at most 2147483647, got 2147483648"),
    "no round": ({"rounds": 0}, "rounds must be a whole number at least 1, got 0"),
    "half an evaluation": (
        {"eval_every": 0.5},
        "eval_every must be a whole number at least 1, got 0.5",
    ),
    "classes as a list": (
        {"classes": [3]},
        "classes must be a whole number at least 1, got [3]",
    ),
}


def test_a_model_that_was_made_again_is_the_same(small: Small) -> None:
    again = fs.models.mlp((6,), 3, widths=(4, 4))
    assert again is not small.model
    check_trained(made(small, "moon", {}), again)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_simulate_refuses_is_one_line(mistake: str, small: Small) -> None:
    given, message = MISTAKES[mistake]
    right: dict[str, Any] = {"algorithm": made(small, "fedavg", {}), "model": small.model}
    right |= {"data": small.data, "test": (small.data.x, small.data.y), "rounds": 1, "classes": 3}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fs.simulate(**(right | given))


@pytest.mark.parametrize("text", [str(2**31), "9" * 400])
def test_whole_numbers_have_an_upper_end(text: str) -> None:
    """Flags of the command and of the methods, and settings in a method's text."""
    hints = {name: hint for group in GROUPS.values() for name, hint in whole_numbers(group).items()}
    flags = [[flag(name), text] for name in hints if name != "seeds"]
    for method in OURS:
        own = [name for name, p in parameters(method).items() if int in members(p.annotation)]
        flags += [["--algo", method, flag(name), text] for name in own]
        flags += [["--algo", f"{method}({name}={text})"] for name in own]
    assert len(flags) > 20
    for argv in [*flags, ["--seeds", text]]:
        with pytest.raises(ValueError, match=r"must be at most 2147483647, got \d{10,20}$"):
            parse(argv)


def whole_numbers(group: type) -> dict[str, Any]:
    """Returns the settings of a group that are whole numbers."""
    return {name: h for name, h in typing.get_type_hints(group).items() if int in members(h)}
