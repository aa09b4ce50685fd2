"""Single-line bugs over all parts: ``python tests/mutate.py`` says which of them no test notices.

Each mutant replaces one place of one file in a copy of the tree, and runs the tests that name the
part, the slow ones last, until the first that fails. ``--only TEXT`` runs those whose file or line
has the text.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A bug: in ``fedjax_sim/file`` the only ``old`` becomes ``new``; the tests that look there."""

    file: str
    old: str
    new: str
    tests: str


NONE_MARKED = int(pytest.ExitCode.NO_TESTS_COLLECTED)


def tests(*names: str) -> str:
    """Test files by their short names."""
    return " ".join(f"tests/test_{name}.py" for name in names)


def named(method: str) -> str:
    """The tests with a method's name, wherever a method is tested."""
    files = tests("server_methods", "sending", "local_methods", "clustering", "robust", "methods")
    return f"{files} -k={method}"


AGGREGATORS, SERVER = tests("robust"), tests("server_methods", "mixtures")
LOCAL, ROUND = tests("local_methods", "oracle"), tests("oracle", "frame", "mixtures")
SENDING, CODES = tests("sending", "robust"), tests("compression", "sending")
TASKS, SAVED, FILES = tests("tasks"), tests("checkpoints"), tests("files")
FLAGS, STOP, SKIP = tests("training_flags"), tests("stop"), tests("skipping")
CLOCK, KNOWN = tests("clock"), tests("known_steps")
FOLDERS, DISTRIBUTED = tests("folders"), tests("distributed") + " -k=listens"
ARRIVALS = tests("arrivals")
CHOSEN = tests("selection")
FROM_PYTHON = tests("from_python")
WATCH, RUN_FOLDER = tests("watching"), tests("run_folder") + " -k=own"
VALIDATION, ADAPTED = tests("validation"), tests("adapted")
SWEPT, GRID, STUDY = tests("sweep"), tests("grouping"), tests("study")
SCAFFNEW, MIME = tests("scaffnew"), tests("mime")
OWNED = tests("own_clients")
NEEDS = tests("contracts", "compositions", "followed")
ADAPTIVE, FAVOR = tests("adaptive_steps"), tests("favor")
HYBRID, BOOST, FD = tests("hybrid_fl"), tests("loadaboost"), tests("fd")
FEDMD, XOR, DADA = tests("fedmd"), tests("xor_mixup"), tests("dada")
SCOUT = tests("skewscout")
REUSE = tests("reuse")
DISTILLED = tests("distillation")
CLUSTERS, DATA = tests("clustering"), tests("data_side", "inputs")
DATASETS = tests("datasets") + " -k=tokens"
HUGGINGFACE, LORA = tests("huggingface"), tests("lora_command")
FORMS, CALLS = tests("file_forms"), tests("calls")
ATTACK = tests("attack_command")
WINDOWS = tests("windows")
MEMORY = tests("client_memory")
ORDER = tests("order")
TRUST = tests("trust")
REPORT_OF_STUDY = tests("report") + " -k=study"
PAPER = tests("report") + " -k=paper"

MUTANTS = [
    Mutant(
        "engine/optimizers.py",
        "if any(map(is_lookahead,",
        "if all(map(is_lookahead,",
        tests("optimisers"),
    ),
    Mutant("engine/optimizers.py", "p.name not in given:", "p.name in given:", tests("optimisers")),
    Mutant("models/adapters.py", ', "params": stream(key, Step.LAYER)}', "}", tests("models")),
    Mutant("models/_nnx.py", "nnx.Rngs(key, params", "nnx.Rngs(params", tests("models")),
    Mutant(
        "models/factories.py",
        "sizes = (shape, outputs) if len(names) > 1 else ()",
        "sizes = shape, outputs",
        tests("registry") + " -k=flax",
    ),
    Mutant("base/spelling.py", 'f"{counted}s", ', "", tests("bench") + " -k=mistyped"),
    Mutant("base/spelling.py", "other, text", "text", tests("registry") + " -k=word"),
    Mutant("cli/catalogue.py", "all(word.lower()", "any(word.lower()", tests("bench") + " -k=list"),
    Mutant("data/cells.py", "fractions and 5 * len", "fractions and len", tests("own_data")),
    Mutant("base/brief.py", "html.escape(cell)}</td>", "cell}</td>", tests("results")),
    Mutant(
        "base/brief.py",
        "{', '.join(told)})\", LONGEST)",
        "{', '.join(told)})\", 9**9)",
        tests("results"),
    ),
    Mutant("run/grids.py", '"diverged" if self.diverged else', "", tests("results")),
    Mutant(
        "cli/reporting/compare.py",
        "implied if baseline is None",
        "None if baseline is None",
        REPORT_OF_STUDY,
    ),
    Mutant(
        "cli/reporting/pictures.py",
        "labels.setdefault(trial.series, {})",
        "labels.setdefault(label, {})",
        REPORT_OF_STUDY,
    ),
    Mutant("cli/reporting/read.py", "if algorithm in texts}", "}", REPORT_OF_STUDY),
    # engine
    Mutant(
        "engine/tree.py",
        "share = weights / row_sum(weights)",
        "share = weights / len(weights)",
        ROUND,
    ),
    Mutant(
        "engine/tree.py", "jnp.where(expand(weights, a) > 0, a, 0)", "a", tests("frame", "robust")
    ),
    Mutant("engine/tree.py", "reduce(zeroed(rows))", "reduce(rows)", tests("sums")),
    Mutant("engine/chunks.py", "jnp.where(weight > 0, value, 0)", "value", tests("sums")),
    Mutant("engine/chunks.py", "total.at[entry].add", "total.at[0].add", tests("sums")),
    Mutant("engine/chunks.py", "tree.wide(a.dtype)", "a.dtype", tests("sums")),
    Mutant("engine/chunks.py", "whole < count", "False", tests("sums")),
    Mutant("engine/chunks.py", "return total + jnp.einsum", "return jnp.einsum", tests("sums")),
    Mutant("engine/order.py", "mesh.size <= 2", "mesh.size <= 4", ORDER),
    Mutant("engine/order.py", "AXIS not in mesh.manual_axes", "True", ORDER),
    Mutant(
        "engine/order.py",
        "flat = _split(flat, AXIS, None)",
        "flat = flat",
        tests("methods") + " -k=dynamic_clustering",
    ),
    Mutant(
        "engine/tree.py", "return jnp.sum(order.keep_whole(rows))", "return jnp.sum(rows)", ORDER
    ),
    Mutant("engine/order.py", "return _whole(values), True", "return values, True", ORDER),
    Mutant("engine/order.py", "if a.dtype == dtype", "if True", ORDER),
    Mutant(
        "engine/tree.py", "jax.vmap(product)(columns,", "jax.vmap(product)(columns[::-1],", ORDER
    ),
    Mutant(
        "run/functions.py",
        "with in_order(self.layout.execution.mesh)",
        "if True",
        tests("methods") + " -k=radfedp",
    ),
    Mutant(
        "engine/execution.py", "device_sum(sums), ran", "tree.take(sums, 0), ran", tests("sums")
    ),
    Mutant("round/training.py", "weights / tree.row_sum(weights)", "weights", tests("sums")),
    Mutant("server/update.py", "any(server.reads", "all(server.reads", tests("sums")),
    Mutant("engine/groups.py", "1 + jnp.min(f, axis=1)", "1 + jnp.max(f, axis=1)", CLUSTERS),
    Mutant(
        "engine/groups.py",
        "order = jnp.argsort(neighbours, stable=True)",
        "order = jnp.arange(n)",
        CLUSTERS,
    ),
    Mutant(
        "engine/optimizers.py",
        "return v - (1 - beta2) * square * jnp.sign(v - square)",
        "return v - (1 - beta2) * square",
        LOCAL,
    ),
    Mutant("engine/optimizers.py", "lambda v, square: v + square", "lambda v, square: v", LOCAL),
    Mutant("engine/optimizers.py", "(jnp.sqrt(v) + tau)", "jnp.sqrt(v + tau)", LOCAL),
    Mutant(
        "engine/optimizers.py",
        "jnp.where(outside, radius / norm, 1)",
        "jnp.where(outside, 1, radius / norm)",
        LOCAL,
    ),
    Mutant(
        "engine/clients.py",
        "return jnp.where(clients < len(data.budget), data.budget[clients], 0)",
        "return _entries(data, clients)",
        tests("data_side", "frame"),
    ),
    Mutant("engine/batches.py", "label = client.relabel[label]", "pass", DATA),
    Mutant("engine/vmapped.py", "if not values:", "if True:", tests("invariants")),
    Mutant("engine/vmapped.py", "size * tasks.common + index", "tasks.common", tests("sums")),
    Mutant("engine/device.py", "used[list_] < block", "used[list_] < 1", tests("invariants")),
    Mutant("engine/device.py", "devices * lanes)", "lanes)", tests("lanes")),
    Mutant("engine/device.py", "0) if entries == 1 else rows", "0)", tests("lanes")),
    Mutant("engine/lanes.py", "then in (origin, start + place)", "then", tests("lanes")),
    Mutant("engine/lanes.py", "jnp.argsort(-cost", "jnp.argsort(cost", tests("lanes")),
    Mutant("engine/lanes.py", "jnp.where(over, addend.weight, 0)", "addend.weight", tests("lanes")),
    Mutant("engine/lanes.py", "write(done.ran, steps - lanes.since)", "done.ran", tests("lanes")),
    Mutant("client/sgd.py", "progress.steps - plan.before", "progress.steps", tests("lanes")),
    Mutant("client/sgd.py", "tree.select(client.size > 0, end, start)", "end", KNOWN),
    Mutant("client/sgd.py", "jnp.minimum(batches, total - e * batches)", "batches", KNOWN),
    Mutant("engine/batches.py", "tree.select(count > 0, end, start)", "end", KNOWN),
    Mutant("engine/tree.py", "count[a.shape] > 1", "count[a.shape] > 0", KNOWN),
    Mutant("engine/batches.py", "fewest if fewest == most else None", "fewest", KNOWN),
    Mutant("engine/memory.py", "times * inside[0]", "inside[0]", "fedjax_sim/engine/memory.py"),
    Mutant(
        "engine/execution.py",
        "if self.differentiable:  # bits have no derivatives",
        "if False:",
        tests("differentiable"),
    ),
    Mutant("engine/batches.py", "runs = i < count", "runs = i <= count", tests("differentiable")),
    Mutant(
        "engine/batches.py",
        "held, fixed = tree.select(runs, values, jax.lax.stop_gradient(values))",
        "held, fixed = values",
        tests("differentiable"),
    ),
    Mutant("engine/mesh.py", "jax.device_put(a, self.replicated)", "a", tests("frame")),
    Mutant("engine/mesh.py", "shape[i] % parts == 0", "shape[i] < 0", tests("mesh")),
    Mutant("engine/execution.py", "axis_names={AXIS},", "", tests("mesh")),
    Mutant(
        "engine/vmapped.py",
        "everywhere(jnp.all(condition))",
        "everywhere(jnp.any(condition))",
        tests("invariants"),
    ),
    Mutant("engine/draws.py", "_first_occurrence(proposed) & ", "", tests("draws")),
    Mutant("engine/draws.py", "[taken, out]", "[out]", tests("draws")),
    Mutant("engine/draws.py", "(key, (total,), jnp.float32)", "(key, (total,))", tests("draws")),
    Mutant(
        "engine/draws.py",
        "jax.random.permutation(key, jnp.arange(total, dtype=jnp.int32))",
        "jax.random.permutation(key, total)",
        tests("draws"),
    ),
    Mutant("run/cache.py", "Seed.WEIGHTS", "Seed.ROUNDS", tests("ahead")),
    Mutant("engine/memory.py", "size > available", "size >= available", tests("ahead")),
    Mutant("engine/needs.py", "return min(", "return sum(", tests("contracts")),
    Mutant(
        "models/convolutions.py",
        'cpu=lowerings[on_cpu], default=lowerings["lax"]',
        'cpu=lowerings["lax"], default=lowerings[on_cpu]',
        tests("models"),
    ),
    Mutant(
        "models/convolutions.py", "2 * math.prod(outputs)", "math.prod(outputs)", tests("models")
    ),
    Mutant("models/winograd.py", "[first[0] + following[0]", "[first[0]", tests("models")),
    Mutant("models/winograd.py", "top : top + rows", "0:rows", tests("models")),
    Mutant("models/winograd.py", "(0, 1, -1, 8, -8, 1)", "(0, 1, -1, 8, -8, 0)", tests("models")),
    # plan
    Mutant("plan/flight.py", "(t + 1) % self.rounds == 0", "t % self.rounds == 0", ROUND),
    Mutant(
        "plan/flight.py",
        "jnp.asarray(self.group(slots)) == t % self.phases",
        "jnp.asarray(self.group(slots)) == (t + 1) % self.phases",
        ROUND,
    ),
    Mutant(
        "plan/redistribution.py",
        "permutation(key, slots)",
        "jnp.roll(jnp.arange(slots), 1)",
        tests("invariants"),
    ),
    Mutant(
        "plan/moves.py",
        "return (self.source != by_slot).astype(jnp.int32)",
        "return jnp.ones_like(by_slot)",
        tests("invariants"),
    ),
    Mutant(
        "plan/redistribution.py",
        "1 + jnp.maximum(degree[:, None], degree[None, :])",
        "1 + degree[:, None]",
        tests("server_methods"),
    ),
    Mutant(
        "plan/redistribution.py",
        "jnp.float32) < self.activity",
        "jnp.float32) < 1 - self.activity",
        tests("server_methods"),
    ),
    Mutant(
        "engine/clients.py",
        "start, size = start + before, jnp.minimum(size - before, each)",
        "start, size = start, jnp.minimum(size - before, each)",
        tests("streamed"),
    ),
    Mutant(
        "engine/clients.py",
        "before = jnp.minimum(round * each, size)",
        "before = round * each % size",
        tests("streamed"),
    ),
    Mutant(
        "round/placement.py",
        "client_sizes(data, clients, state.round)",
        "client_sizes(data, clients)",
        tests("streamed"),
    ),
    Mutant(
        "plan/collaboration.py",
        "degree[a] - old, degree[b] - old)",
        "degree[a], degree[b])",
        DADA,
    ),
    Mutant(
        "plan/collaboration.py",
        "loss = confidence * slots",
        "loss = slots",
        DADA,
    ),
    Mutant(
        "plan/collaboration.py",
        "jnp.where(trained[a] & trained[b], best, old)",
        "best",
        DADA,
    ),
    Mutant(
        "plan/collaboration.py",
        "mu_1 / 2 * distance",
        "mu_1 * distance",
        DADA,
    ),
    Mutant(
        "plan/collaboration.py",
        "2 * penalty * middle",
        "penalty * middle",
        DADA,
    ),
    Mutant(
        "plan/collaboration.py",
        "jnp.where(alone, 0, (low + high) / 2)",
        "(low + high) / 2",
        DADA,
    ),
    Mutant(
        "plan/collaboration.py",
        "pull / (confidence[:, None] + pull)",
        "pull / (1 + pull)",
        DADA,
    ),
    Mutant(
        "plan/moves.py",
        "got = got | self.seen",
        "got = got & self.seen",
        DADA,
    ),
    Mutant(
        "round/own_models.py",
        "tree.select(has, own, mean)",
        "own",
        DADA,
    ),
    Mutant(
        "round/own_models.py",
        "models = jax.vmap(tree.scale)(1 / slots.weight, models)",
        "pass",
        DADA,
    ),
    Mutant(
        "round/polling.py",
        "state._replace(redistribution=draw.redistribution), told",
        "state, told",
        DADA,
    ),
    Mutant(
        "plan/moves.py",
        "slots._replace(variables=models, weight=weights)",
        "slots._replace(variables=models)",
        tests("push_sum"),
    ),
    Mutant(
        "plan/redistribution.py",
        "return (sends / sends.sum(axis=0))",
        "return (sends / sends.sum(axis=1, keepdims=True))",
        tests("push_sum"),
    ),
    Mutant(
        "round/training.py",
        "model = tree.add(model, tree.subtract(received, arrived.used))",
        "model = tree.scale(task.weight, model)",
        tests("push_sum"),
    ),
    Mutant(
        "round/placement.py",
        "jnp.where(fresh, 1, w), carry.weight)",
        "w, carry.weight)",
        tests("push_sum"),
    ),
    Mutant(
        "plan/selection.py",
        "jnp.where(free, n, clients))",
        "jnp.full_like(clients, n))",
        tests("frame", "oracle"),
    ),
    Mutant(
        "plan/selection.py",
        "jax.lax.top_k(ticket, count)",
        "jax.lax.top_k(-ticket, count)",
        tests("radfed_family"),
    ),
    Mutant(
        "plan/selection.py",
        "jnp.lexsort((jax.random.uniform(key, (slots,), jnp.float32), visits))[:active]",
        "jnp.arange(active)",
        tests("radfed_family", "frame"),
    ),
    Mutant("plan/mediators.py", "best = jnp.argmin(", "best = jnp.argmax(", tests("data_side")),
    Mutant(
        "plan/mediators.py",
        "jnp.where(i % clients_each == 0, empty, mix)",
        "mix",
        tests("data_side"),
    ),
    # client
    Mutant(
        "client/corrections.py", "tree.subtract(common, own)", "tree.subtract(own, common)", LOCAL
    ),
    Mutant(
        "client/corrections.py",
        "share = tree.row_sum(present) / clients",
        "share = jnp.float32(1)",
        LOCAL,
    ),
    Mutant(
        "client/corrections.py",
        "aggregator(messages, present)",
        "tree.mean(messages, present)",
        LOCAL,
    ),
    Mutant(
        "client/corrections.py",
        "new = done.gradient() if self.option == 1 else done.path",
        "new = done.path",
        LOCAL,
    ),
    Mutant(
        "client/corrections.py",
        "jnp.where(loss < last.loss, last.falls + 1, 0)",
        "last.falls + 1",
        LOCAL,
    ),
    Mutant(
        "client/sgd.py",
        'if self.last_batch == "drop":\n            return samples // self.batch_size',
        'if self.last_batch == "keep":\n            return samples // self.batch_size',
        LOCAL,
    ),
    Mutant("client/sgd.py", "jnp.minimum(total, self.max_steps)", "total", LOCAL),
    Mutant("engine/batches.py", "position % client.size", "position", ROUND),
    Mutant(
        "client/reports.py",
        "loss.astype(jnp.float32) * real",
        "loss.astype(jnp.float32)",
        tests("server_methods"),
    ),
    Mutant(
        "client/mixup.py",
        "(1 - mix_ratio) * own + mix_ratio * others",
        "own + mix_ratio * others",
        tests("data_side"),
    ),
    Mutant(
        "client/mixup.py",
        "jnp.where(drawn < client.start, drawn, drawn + client.size)",
        "drawn",
        tests("data_side"),
    ),
    Mutant("client/sending.py", "jnp.minimum(1, self.limit / norm)", "self.limit / norm", SENDING),
    Mutant("attacks/_alone.py", "jnp.asarray(-self.scale, leaf.dtype) * leaf", "-leaf", SENDING),
    Mutant(
        "attacks/_together.py",
        "mu - by.astype(mu.dtype) * sigma",
        "mu + by.astype(mu.dtype) * sigma",
        SENDING,
    ),
    Mutant("attacks/_malicious.py", "classes - 1 - honest", "honest", SENDING),
    Mutant(
        "attacks/_together.py",
        "hostile = sends & self.hostile(client)",
        "hostile = sends",
        SENDING,
    ),
    Mutant("attacks/_together.py", "tree.scale(-self.epsilon, mean)", "mean", SENDING),
    Mutant(
        "attacks/_together.py",
        "jnp.where(seen.honest, after, clients)",
        "after",
        SENDING,
    ),
    Mutant("attacks/_directed.py", "sign * extreme > 0", "sign * extreme < 0", tests("robust")),
    Mutant("attacks/_directed.py", "< m - c - 2", "< m - c - 1", tests("robust")),
    Mutant(
        "attacks/_optimised.py", "growing = growing & better", "growing = better", tests("robust")
    ),
    Mutant("attacks/_optimised.py", "jnp.where(better, found, reached)", "found", tests("robust")),
    Mutant(
        "personal/_models.py",
        "g + jnp.asarray(self.lam, v.dtype) * (v - w)",
        "g + jnp.asarray(self.lam, v.dtype) * v",
        tests("personal"),
    ),
    Mutant(
        "compression/_messages.py",
        "return unravel(arrived.astype(flat.dtype)), wide - arrived if",
        "return unravel(arrived.astype(flat.dtype)), wide if",
        CODES,
    ),
    Mutant(
        "compression/_codes.py",
        "/ count\n        return jnp.where(largest, magnitude",
        "\n        return jnp.where(largest, magnitude",
        CODES,
    ),
    Mutant(
        "compression/_codes.py",
        "room = count - jnp.sum(above, dtype=jnp.int32)",
        "room = count",
        CODES,
    ),
    Mutant("compression/_codes.py", "scaled - jnp.floor(scaled)", "0.5", CODES),
    Mutant("compression/_sketches.py", "scaled - jnp.floor(scaled)", "0.5", CODES),
    Mutant("compression/_sketches.py", "x.size / count * values", "values", CODES),
    Mutant("compression/_sketches.py", "(sign * _hadamard(", "(_hadamard(", CODES),
    Mutant("compression/_sketches.py", "if count < n else 0", "", CODES),
    Mutant("compression/_sketches.py", "space @ (space.T @ matrix)", "matrix", CODES),
    Mutant(
        "compression/_sketches.py", "leaf.shape[:-1]) > self.rank", "leaf.shape) > self.rank", CODES
    ),
    Mutant(
        "client/augment.py",
        "jnp.where(tree.expand(batch.copy, batch.x), new.x, batch.x)",
        "new.x",
        tests("data_side"),
    ),
    Mutant(
        "client/augment.py", "0, 2 * self.padding + 1", "0, 2 * self.padding", tests("data_side")
    ),
    # server
    Mutant(
        "server/update.py",
        "gradient = jax.tree.map(jnp.negative, step.params)",
        "gradient = step.params",
        SERVER,
    ),
    Mutant(
        "server/update.py",
        "return step._replace(params=updates), state",
        "return Variables(updates, jax.tree.map(jnp.zeros_like, step.state)), state",
        SERVER,
    ),
    Mutant(
        "server/update.py",
        "(total if self.literal else jnp.abs(total)) >=",
        "jnp.abs(total) >=",
        SERVER,
    ),
    Mutant(
        "server/update.py",
        ">= self.threshold",
        "> self.threshold",
        SERVER,
    ),
    Mutant("server/update.py", "-taken if", "taken if", SERVER),
    Mutant("client/distilling.py", "updates % self.buffer].set", "0].set", tests("drift")),
    Mutant("client/distilling.py", "<= updates", "< buffer", tests("drift")),
    Mutant("client/distilling.py", "gamma * temperature**2", "gamma", tests("drift")),
    Mutant("round/traffic.py", "if parts.local.told is None", "if True", tests("methods")),
    Mutant("client/sending.py", "~_any(kept.signs) |", "", tests("drift")),
    Mutant("client/sending.py", "(_any(moved), moved,", "(True, moved,", tests("drift")),
    Mutant(
        "client/sending.py", "Heading(received.params, t", "Heading(kept.last, t", tests("drift")
    ),
    Mutant("round/sending.py", "mine = _apply_hear(", "_apply_hear(", tests("drift")),
    Mutant(
        "server/update.py",
        "jnp.where(tree.expand(present, updates), jnp.sign(updates), 0)",
        "jnp.sign(updates)",
        SERVER,
    ),
    Mutant(
        "server/root.py",
        "tree.add(server, step), gathered.cohort.data",
        "server, gathered.cohort.data",
        SERVER,
    ),
    Mutant("server/root.py", "tree.expand(present, every)", "True", DISTILLED),
    Mutant("server/root.py", "target), mask)", "target), mask | True)", DISTILLED),
    Mutant("server/root.py", "CLIP = 5.0", "CLIP = 50.0", DISTILLED),
    Mutant(
        "plan/flight.py",
        "server_samples / (samples + server_samples)",
        "samples / (samples + server_samples)",
        ROUND,
    ),
    Mutant("server/broadcast.py", "(state.updates - age) %", "state.updates %", SERVER),
    Mutant(
        "server/broadcast.py",
        "oldest + 1, jnp.int32",
        "oldest, jnp.int32",
        SERVER,
    ),
    Mutant(
        "server/preaggregation/_fair.py",
        "self.lr / (1 - self.momentum), weights",
        "self.lr, weights",
        SERVER,
    ),
    Mutant(
        "server/preaggregation/_fair.py",
        "q * power / loss * square",
        "power / loss * square",
        SERVER,
    ),
    Mutant(
        "server/preaggregation/_fair.py", "after = _onto_simplex(moved)", "after = moved", SERVER
    ),
    Mutant(
        "engine/reach.py",
        "tail = momentum * (1 - momentum**count)",
        "tail = (1 - momentum**count)",
        tests("local_methods", "mixtures"),
    ),
    Mutant("server/preaggregation/_staleness.py", "(d + 1) ** -a", "d**-a", SERVER),
    Mutant(
        "server/preaggregation/_staleness.py",
        "factor * (update + behind)",
        "factor * update",
        SERVER,
    ),
    Mutant("server/preaggregation/_root.py", "descending=True", "", tests("robust")),
    Mutant("server/preaggregation/_root.py", "present & jnp", "jnp", tests("robust")),
    Mutant("server/preaggregation/_root.py", "- self.rho *", "+ self.rho *", tests("robust")),
    Mutant("server/preaggregation/_root.py", "(along > 0)", "(along != 0)", tests("robust")),
    Mutant("server/preaggregation/_root.py", "length / norm", "norm / length", tests("robust")),
    Mutant(
        "server/aggregators/_order.py", "rank < count - first", "rank <= count - first", AGGREGATORS
    ),
    Mutant(
        "server/aggregators/_distances.py",
        "count - malicious - 2, 1",
        "count - malicious, 1",
        AGGREGATORS,
    ),
    Mutant(
        "engine/tree.py",
        "jnp.where(jnp.isnan(total), jnp.inf, total)",
        "total",
        AGGREGATORS,
    ),
    Mutant(
        "server/aggregators/_distances.py",
        "jnp.where(better, c, best), jnp.where(better, spread, least)",
        "c, spread",
        AGGREGATORS,
    ),
    Mutant(
        "server/aggregators/_distances.py",
        "lambda rows, a: rows - a[None], stacked, centre",
        "lambda rows, a: rows, stacked, centre",
        AGGREGATORS,
    ),
    Mutant(
        "server/preaggregation/_mixing.py",
        "left / jnp.maximum(jnp.sum(level, axis=1, dtype=jnp.int32), 1)",
        "jnp.ones(len(left))",
        tests("robust"),
    ),
    Mutant(
        "server/preaggregation/_mixing.py",
        "jax.random.fold_in(key, k)",
        "jax.random.fold_in(jax.random.key(0), k)",
        tests("robust"),
    ),
    Mutant(
        "server/preaggregation/_mixing.py",
        "position // self.size",
        "position % -(-count // self.size)",
        tests("robust"),
    ),
    Mutant("clustering.py", "is_lower = value < best[0]", "is_lower = value > best[0]", CLUSTERS),
    Mutant(
        "clustering.py", "total + value * jnp.sum(batch.mask, dtype=value.dtype)", "value", CLUSTERS
    ),
    Mutant(
        "clustering.py",
        "jnp.where(group == number, gathered.weights, 0)",
        "gathered.weights",
        CLUSTERS,
    ),
    Mutant(
        "privacy/_clipped.py",
        "jnp.minimum(1, clip_now / norms)",
        "clip_now / norms",
        tests("privacy"),
    ),
    Mutant("engine/needs.py", "all(part.mixes is None", "all(part is not None", tests("privacy")),
    Mutant(
        "privacy/_clipped.py",
        "z * self.clip / self.clients_per_round if",
        "z / self.clients_per_round if",
        tests("privacy"),
    ),
    Mutant(
        "privacy/_gaussian.py",
        "(norms <= limit).astype(jnp.float32) - 0.5",
        "(norms <= limit).astype(jnp.float32)",
        tests("privacy"),
    ),
    Mutant("privacy/_gaussian.py", "- (2 * bits) ** -2", "- bits**-2", tests("privacy")),
    Mutant(
        "privacy/_correlated.py",
        "return tree.subtract(total, node(level, now - 1))",
        "return tree.sum_of(total, node(level, now - 1))",
        tests("privacy"),
    ),
    Mutant(
        "privacy/_correlated.py",
        "now % length",
        "now",
        tests("privacy"),
    ),
    Mutant(
        "privacy/_accounting.py",
        "nodes = whole * length.bit_length() + rest.bit_length()",
        "nodes = whole * length.bit_length()",
        tests("privacy"),
    ),
    Mutant("privacy/_accounting.py", "math.ceil(rounds /", "math.floor(rounds /", tests("epsilon")),
    Mutant("privacy/_clipped.py", "not parts.server.reads_updates", "True", tests("epsilon")),
    Mutant("privacy/_clipped.py", "not reads_clients(parts.server)", "True", tests("epsilon")),
    Mutant(
        "privacy/_correlated.py",
        'parts.selection.participation == "cyclic"',
        "parts.selection.participation is not None",
        tests("privacy", "epsilon"),
    ),
    Mutant("round/private.py", "and parts.clock.first is None", "", tests("epsilon")),
    Mutant("round/private.py", "data.sent is not None", "False", tests("epsilon")),
    Mutant(
        "privacy/_cohorts.py",
        "coin[first] <= jnp.uint32(heads)",
        "coin[first] >= jnp.uint32(heads)",
        tests("privacy"),
    ),
    # the round
    Mutant(
        "round/collecting.py",
        "slots.received if parts.remembers else",
        "tree.take(slots.received, jnp.zeros_like(slots.client)) if parts.remembers else",
        tests("mixtures", "clustering"),
    ),
    Mutant(
        "round/collecting.py",
        "counted = due & (slots.visits > 0)",
        "counted = due",
        tests("radfed_family"),
    ),
    Mutant(
        "round/collecting.py",
        "return tree.select(jnp.any(gathered.weights > 0), new, state)",
        "return new",
        tests("privacy", "frame"),
    ),
    Mutant(
        "round/collecting.py",
        "if parts.remembers:",
        "if False:",
        tests("mixtures", "server_methods"),
    ),
    Mutant(
        "round/sending.py",
        "sends = visited & (due | parts.models_travel)",
        "sends = visited & due",
        SENDING,
    ),
    Mutant(
        "round/sending.py",
        "sends = visited & (due | parts.models_travel)",
        "sends = visited",
        tests("sending", "mixtures"),
    ),
    Mutant(
        "round/sending.py", "tree.select(task.trains, given.message, message)", "message", SENDING
    ),
    Mutant(
        "round/training.py",
        "tree.select_rows(visited, info, slots.info)",
        "info",
        tests("radfed_family", "frame", "server_methods"),
    ),
    Mutant(
        "round/training.py",
        "stays = tree.select(n_k > 0, corrected, own.model)",
        "stays = corrected",
        tests("radfed_family"),
    ),
    Mutant(
        "round/training.py",
        "client.size if client.budget is None else client.budget",
        "client.size",
        tests("data_side", "frame", "radfed_family"),
    ),
    Mutant(
        "round/placement.py",
        "jnp.where(fresh, 0, moves.received())",
        "moves.received()",
        tests("mixtures", "server_methods"),
    ),
    Mutant(
        "round/stages.py",
        "uploaded & transfers.uploads",
        "transfers.uploads",
        SENDING,
    ),
    Mutant(
        "round/traffic.py",
        "down = visited & (new | moved",
        "down = visited & (moved",
        tests("frame", "oracle", "methods"),
    ),
    Mutant(
        "round/traffic.py",
        "return min([whole, ",
        "return max([whole, ",
        tests("methods", "compression"),
    ),
    Mutant(
        "round/fit.py",
        "(np.isfinite(given) & (given > 0)).all()",
        "True",
        tests("frame", "contracts", "server_methods"),
    ),
    # named methods and their options
    Mutant(
        "algorithms/_robust.py",
        'aggregator: Rule = "coordinate_median"',
        'aggregator: Rule = "mean"',
        named("robust"),
    ),
    Mutant(
        "algorithms/_robust.py",
        "() if clip is None else (sending.clip_norm(clip),)",
        "()",
        named("robust"),
    ),
    Mutant(
        "algorithms/_robust.py",
        "aggregators.trimmed_mean(malicious)",
        "aggregators.trimmed_mean(0.2)",
        named("robust"),
    ),
    Mutant(
        "algorithms/_robust.py",
        "aggregators.krum(malicious)",
        "aggregators.krum(0.2)",
        named("robust"),
    ),
    Mutant(
        "algorithms/_robust.py",
        "aggregators.multi_krum(malicious)",
        "aggregators.multi_krum(0.2)",
        named("robust"),
    ),
    Mutant(
        "algorithms/_drift.py",
        "server=server_sgd(server_lr)",
        "server=server.replace()",
        named("scaffold"),
    ),
    Mutant(
        "algorithms/_asynchronous.py",
        "return buffer_size, when",
        "return 1, when",
        named("fedasync"),
    ),
    Mutant(
        "algorithms/_delayed.py",
        'Evaluated = "in_flight"',
        'Evaluated = "server"',
        tests("radfed_family"),
    ),
    Mutant(
        "round/exchanging.py",
        "tree.filled(travelling(parts, trained), received)",
        "trained",
        tests("exchange"),
    ),
    Mutant(
        "round/own_models.py",
        "used = with_own(mine, covered(parts",
        "used = with_own((), covered(parts",
        tests("exchange"),
    ),
    Mutant(
        "round/traffic.py",
        "data.clients * tree.num_bytes(constant(parts, variables))",
        "0",
        tests("exchange"),
    ),
    Mutant("models/wrappers.py", "else alpha / rank", "else alpha", tests("lora")),
    Mutant(
        "plan/coverage.py", "jnp.tile(has(channels)", "jnp.repeat(has(channels)", tests("coverage")
    ),
    Mutant("round/exchanging.py", "a / jnp.where(p > 0, p, 1)", "a", tests("drift")),
    Mutant("server/low_rank.py", "product - after[0] @ after[1]", "product", tests("lora")),
    Mutant("round/exchanging.py", "a or b, sent, moved", "a, sent, moved", tests("lora")),
    Mutant("models/wrappers.py", "min(cuts, key=sum)", "cuts[-1]", tests("lora")),
    Mutant("models/wrappers.py", "stream(key, Weights.ADAPTER, number)", "key", tests("lora")),
    Mutant("models/wrappers.py", "_chosen(choose, trunk)", "()", tests("lora")),
    Mutant(
        "models/wrappers.py", "jnp.zeros((rank, columns)", "jnp.ones((rank, columns)", tests("lora")
    ),
    Mutant(
        "models/_transformer.py",
        "jnp.where(seen, scores, -jnp.inf)",
        "scores",
        tests("transformer"),
    ),
    Mutant("models/_transformer.py", "math.sqrt(channels)", "channels", tests("transformer")),
    Mutant("models/_transformer.py", "if self.remat and", "if False and", tests("transformer")),
    Mutant(
        "models/_transformer.py",
        "_DEVIATION / math.sqrt(2 * self.layers)",
        "_DEVIATION",
        tests("transformer"),
    ),
    Mutant(
        "data/text.py", "tokens[:-1], tokens[1:].astype", "tokens[1:], tokens[1:].astype", DATASETS
    ),
    Mutant("data/text.py", "tokens[kept:]", "tokens[kept + 1 :]", DATASETS),
    Mutant("data/text.py", "constant_values=PADDING", "constant_values=0", DATASETS),
    Mutant("client/turns.py", "variables = visits[-1]", "variables = visits[0]", tests("exchange")),
    Mutant(
        "client/terms.py",
        "jnp.logaddexp(near, far) - near",
        "jnp.logaddexp(near, far) - far",
        tests("drift"),
    ),
    Mutant("client/terms.py", "** -0.25", "** -0.5", tests("drift")),
    Mutant("client/prototypes.py", "weights[:, None] > 0, sent", "True, sent", tests("prototypes")),
    Mutant(
        "client/prototypes.py",
        "jnp.where(known.samples[batch.y] > 0, gap, 0)",
        "gap",
        tests("prototypes"),
    ),
    Mutant("client/prototypes.py", "mean / count[:, None]", "mean", tests("prototypes")),
    Mutant("server/finish.py", "- n[..., None] * mean", "- mean", tests("finish")),
    Mutant("server/finish.py", "some = pivot > least", "some = pivot > -1.0", tests("finish")),
    Mutant("server/finish.py", "where=known[:, None]", "where=True", tests("finish")),
    Mutant("round/finishing.py", "stream(key, Round.FINISH)", "key", tests("finish")),
    Mutant("run/ledger.py", "+ clients * traffic.finish", "", tests("finish")),
    Mutant(
        "engine/needs.py", "first != second if weights", "False if weights", tests("prototypes")
    ),
    Mutant(
        "client/corrections.py",
        "tree.subtract(own, _pull(self.alpha, params, context))",
        "tree.sum_of(own, _pull(self.alpha, params, context))",
        tests("drift"),
    ),
    Mutant(
        "client/terms.py",
        "tree.subtract(context.memory.params, context.received.params)",
        "tree.subtract(context.received.params, context.memory.params)",
        tests("drift"),
    ),
    Mutant("client/terms.py", "return context.received", "return trained", tests("drift")),
    Mutant(
        "server/preaggregation/_discrepancy.py",
        "jnp.maximum(size - self.a * d + self.b, 0)",
        "size - self.a * d + self.b",
        tests("drift"),
    ),
    Mutant(
        "server/preaggregation/_discrepancy.py",
        "jnp.any(new > 0)",
        "jnp.bool(True)",
        tests("drift"),
    ),
    Mutant(
        "client/reflected.py", "Reflected(new, trained", "Reflected(sent, trained", tests("drift")
    ),
    Mutant(
        "round/collecting.py",
        "mask = travels(parts, server)",
        "mask = jax.tree.map(lambda leaf: True, server)",
        tests("mixtures"),
    ),
    Mutant(
        "privacy/_correlated.py",
        "return drawn - jnp.tensordot(",
        "return drawn + jnp.tensordot(",
        tests("privacy"),
    ),
    Mutant(
        "privacy/_correlated.py",
        "jnp.concatenate([new[None], last])",
        "jnp.concatenate([last, new[None]])",
        tests("privacy"),
    ),
    Mutant(
        "privacy/_accounting.py",
        "square[:n].sum() for n in left",
        "square.sum() for n in left",
        tests("privacy"),
    ),
    Mutant(
        "server/steps.py",
        "tree.scale(_participating(gathered), step.params)), state",
        "step.params), state",
        tests("drift"),
    ),
    Mutant("server/preaggregation/_nova.py", "FRESH, known)", "known)", tests("local_methods")),
    Mutant("client/momentum.py", "tree.sum_of(gradient, common.gradient)", "common.gradient", MIME),
    Mutant("client/momentum.py", "momentum, state.gradient)", "momentum, state.momentum)", MIME),
    Mutant("client/descent.py", "tree.subtract(grads, start())", "grads", MIME),
    Mutant(
        "round/training.py", "jnp.any(weights > 0), weights, 1)", "weights < 0, weights, 1)", MIME
    ),
    Mutant(
        "round/training.py",
        "weights_of(parts, placed.samples, placed.samples, placed.samples > 0)",
        "placed.samples.astype(jnp.float32)",
        tests("weighting"),
    ),
    Mutant("client/skipping.py", "self.momentum * (1 - self.p)", "self.momentum", SCAFFNEW),
    Mutant(
        "client/skipping.py",
        "Skipping(self._variate(own, context), params)",
        "Skipping(own.h, params)",
        SCAFFNEW,
    ),
    Mutant("client/length.py", "-jax.random.uniform", "0.1 - jax.random.uniform", SCAFFNEW),
    Mutant("client/sgd.py", "-(-plan.total // jnp.maximum(batches, 1))", "1", SCAFFNEW),
    Mutant("client/control.py", "jnp.where(sent.smoothness > 0, weights, 0)", "weights", ADAPTIVE),
    Mutant("client/control.py", "_mean(weights, tree.norms", "_mean(known, tree.norms", ADAPTIVE),
    Mutant("client/control.py", "count <= FARTHER * last", "count <= most", ADAPTIVE),
    Mutant("client/control.py", "- delta * lr * tau\n", "\n", ADAPTIVE),
    Mutant("plan/reinforcement.py", "jnp.argmax(q_of(theta", "jnp.argmax(q_of(state.target", FAVOR),
    Mutant("plan/reinforcement.py", "(t - 1 - ago)", "(t - ago)", FAVOR),
    Mutant("plan/reinforcement.py", "minimum(t, replay - 1)", "minimum(t, replay)", FAVOR),
    Mutant("plan/reinforcement.py", "state.server + sketch(update", "sketch(update", FAVOR),
    Mutant("plan/reinforcement.py", "rewards.at[(t - 1) %", "rewards.at[t %", FAVOR),
    Mutant(
        "round/polling.py",
        "jnp.where(sent, cohort.client, cohort.data.clients)",
        "cohort.client",
        FAVOR,
    ),
    Mutant("client/skew.py", "present & (sent.owner != state.owner) &", "present &", SCOUT),
    Mutant(
        "client/skew.py", "cost > state.cost, -state.way", "cost < state.cost, -state.way", SCOUT
    ),
    Mutant("client/skew.py", "jnp.maximum(0, loss - of.allowed)", "jnp.maximum(0, loss)", SCOUT),
    Mutant("client/skew.py", "next_home=sent.home[row]", "next_home=sent.away[row]", SCOUT),
    Mutant("client/skew.py", "| (there >= of.levels)", "", SCOUT),
    Mutant("client/momentum.py", "share * counts", "counts", tests("drift")),
    Mutant(
        "client/momentum.py", "tree.scale(-1 / length,", "tree.scale(1 / length,", tests("drift")
    ),
    Mutant(
        "round/stages.py",
        "delivery.shared_state if parts.local.follow is None else new.shared_state",
        "delivery.shared_state",
        tests("drift"),
    ),
    Mutant("round/collecting.py", "turn % len(masks) == number", "number == 0", tests("fragments")),
    Mutant(
        "round/collecting.py",
        "after.append(tree.select(here, new, old))",
        "after.append(new)",
        tests("fragments"),
    ),
    Mutant("round/training.py", "round - 1, server", "round, server", tests("fragments")),
    Mutant(
        "round/finishing.py",
        "if state.slots is None or parts.exchange.fragments:",
        "if state.slots is None:",
        tests("fragments"),
    ),
    Mutant("run/ledger.py", "(turn - 1) % len(pieces)", "turn % len(pieces)", tests("fragments")),
    Mutant("models/leaves.py", '1 if entries[0].name == "state" else 0', "0", tests("fragments")),
    Mutant(
        "client/adaptation.py",
        "tree.subtract(there, tree.subtract(moved",
        "tree.sum_of(there, tree.subtract(moved",
        tests("personalised"),
    ),
    Mutant("client/adaptation.py", "step(params, 1)", "step(params, 0)", tests("personalised")),
    Mutant("client/adaptation.py", "lam / 2", "lam", tests("personalised")),
    Mutant(
        "algorithms/_adapted.py",
        "server=server.optimizer(optax.sgd(beta)),",
        "",
        tests("personalised"),
    ),
    Mutant(
        "algorithms/_adapted.py",
        "optimizer=optax.sgd(rate),",
        "",
        tests("personalised"),
    ),
    Mutant(
        "client/descent.py",
        "own._replace(params=params), model",
        "own, model",
        tests("personalised"),
    ),
    Mutant(
        "client/descent.py",
        "taken.weights if project is None else project(taken.weights)",
        "taken.weights",
        tests("personalised"),
    ),
    Mutant("personal/_starts.py", "jnp.clip(w - s, 0, 1) - w", "-s", tests("personalised")),
    Mutant("personal/_starts.py", "client.start + first,", "client.start,", tests("personalised")),
    Mutant(
        "client/terms.py", "logits + self.gamma *", "logits - self.gamma *", tests("personalised")
    ),
    Mutant(
        "personal/_models.py",
        "companion.used(found[0].own, received)",
        "companion.used(found[0].own, found[0].own)",
        tests("personalised"),
    ),
    Mutant("server/steps.py", "mean / (2 * (", "mean / (1 * (", tests("drift")),
    Mutant(
        "data/splits.py",
        "position[clients] = np.arange(clients.size)",
        "position[clients] = clients",
        OWNED,
    ),
    Mutant("data/splits.py", "if whole and", "if", OWNED),
    Mutant("data/_summary.py", "if n[k] and not n[1 - k]", "if not n[1 - k]", OWNED),
    Mutant("cli/dealing.py", "10 * SHARE * most", "10 * most", OWNED),
    Mutant("cli/dealing.py", "if not 0 < emd >= least:", "if not 0 < emd:", OWNED),
    Mutant("cli/build.py", '"personal": problem.own', '"personal": False', OWNED),
    Mutant("cli/problem.py", "own = len(mine) == len(tests)", "own = False", OWNED),
    Mutant("cli/training.py", "np.isin(sizes, some[:first])", "sizes < first", OWNED),
    Mutant("engine/rounding.py", "jnp.uint32(0xFFFF)", "jnp.uint32(0x7FFF)", tests("precision")),
    Mutant("engine/rounding.py", "jnp.isfinite(w), half", "True, half", tests("precision")),
    Mutant(
        "client/sgd.py",
        "tree.subtract(trained.params, start)",
        "tree.subtract(trained.params, received)",
        tests("precision"),
    ),
    Mutant("cli/build.py", 'if precision != "f32":', "if False:", tests("precision")),
    Mutant(
        "algorithms/_gossip.py",
        "GRAPHS[topology](clients_per_round), activity",
        "GRAPHS[topology](clients_per_round), 1.0",
        named("gossip"),
    ),
    # tasks
    Mutant("tasks/_regression.py", "y - mean[jnp.minimum(group, groups - 1)]", "y", TASKS),
    Mutant("tasks/losses.py", "jnp.square(outputs - y", "jnp.abs(outputs - y", TASKS),
    Mutant("tasks/_multi_label.py", "predicted & actual, predicted", "right, predicted", TASKS),
    Mutant("tasks/_next_token.py", "== y) & (y != self.ignore)", "== y)", TASKS),
    Mutant(
        "tasks/_next_token.py", "jnp.maximum(self.weight(y), 1)", "jnp.float32(y.shape[1])", TASKS
    ),
    Mutant("tasks/sums.py", "jnp.where(tree.expand(group == 0, leaf), leaf, 0)", "leaf", TASKS),
    # attacks at the command
    Mutant("cli/attacking.py", "(part, *parts.sending)", "(*parts.sending, part)", ATTACK),
    Mutant("cli/attacking.py", '"rule": parts.aggregator', '"rule": len', ATTACK),
    Mutant(
        "cli/attacking.py", "0 < malicious.sum() < clients", "malicious.sum() < clients", ATTACK
    ),
    # weights in files, adapters at the command
    Mutant("models/weights.py", "path_of(entries[1:]): leaf", "path_of(entries): leaf", LORA),
    Mutant("models/weights.py", "given.shape != leaf.shape", "given.size != leaf.size", LORA),
    Mutant("cli/adapting.py", "weights.lora, alpha=weights.lora_alpha", "weights.lora", LORA),
    Mutant("cli/adapting.py", '("B",), (), ("trunk", "A")', '("B",), (), ("trunk",)', LORA),
    Mutant("cli/adapting.py", "return with_frozen(made", "return (lambda m, _: m)(made", LORA),
    Mutant("cli/adapting.py", 'else shapes.params["trunk"]', "else shapes.params", LORA),
    # data of Hugging Face
    Mutant("data/_hf_columns.py", "-1 if k != k", "0 if k != k", FORMS),
    Mutant("data/_hf_columns.py", 'rows.with_format("arrow")[:]', "rows[:]", HUGGINGFACE),
    Mutant(
        "data/_huggingface.py",
        "[len(part.rows) for part in parts]",
        "[len(part.rows) for part in parts[::-1]]",
        HUGGINGFACE,
    ),
    Mutant("run/metrics.py", "losses = losses * weight", "losses = losses + 0 * weight", TASKS),
    Mutant("run/result.py", "sign = -1 if self.lowest(metric) else 1", "sign = 1", TASKS),
    Mutant("run/checks.py", "if task.classes is not None:\n        return", "return", TASKS),
    Mutant("cli/report.py", "np.fmin if result.lowest(metric) else np.fmax", "np.fmax", TASKS),
    Mutant("data/targets.py", "found = task_of(y) or", "found =", TASKS),
    # files as they come
    Mutant(
        "data/_hf_columns.py",
        "names = [*chain.from_iterable(declared), *map",
        "names = [*map",
        FORMS,
    ),
    Mutant("data/_leaf.py", '"utf-8-sig"', '"utf-8"', FORMS),
    Mutant("data/_csv.py", "~(np.isin(x, (0, 1)) | np.isnan(x))", "~np.isin(x, (0, 1))", FORMS),
    Mutant("data/cells.py", "x[train & ~gaps[:, c], c]", "x[~gaps[:, c], c]", FORMS),
    Mutant(
        "data/cells.py",
        "integers_or_texts(texts[texts",
        "(texts[texts",
        "fedjax_sim/data/cells.py",
    ),
    Mutant("data/_folder.py", "integers_or_texts(np.array(names, np.str_))", "names", FORMS),
    Mutant("data/pixels.py", 'layers.size, "white"', 'layers.size, "black"', FORMS),
    Mutant("data/standardise.py", "(rounding * mean[c]) ** 2", "0", tests("splits")),
    Mutant("data/arrays.py", "return round(float(mean)", "return 0 * round(float(mean)", FORMS),
    Mutant(
        "data/standardise.py",
        "(x[..., c] - mean[c])",
        "(x[..., c] - np.float32(mean[c]))",
        tests("splits"),
    ),
    Mutant("data/cells.py", 'if "_" in text:', 'if "__" in text:', tests("own_data")),
    Mutant("tasks/choice.py", "different, np.round(different)", "different, 0", tests("datasets")),
    # settings of local training
    Mutant("cli/training.py", "optax.add_decayed_weights(decay), made", "made", FLAGS),
    Mutant("cli/training.py", "rounds_of(made, rounds))", "rounds)", FLAGS),
    Mutant("cli/rates.py", "1 / rounds, 1.0", "0.0, 1.0", FLAGS),
    # texts of calls
    Mutant("base/calls.py", "math.prod(counts)", "sum(counts)", CALLS),
    Mutant("base/calls.py", 'or (isinstance(node, Name) and ":" in node)', "", CALLS),
    Mutant("base/binding.py", "isinstance(node, Name) and node in choices", "False", CALLS),
    Mutant("base/binding.py", "if not fits and value", "if False and value", CALLS),
    Mutant("cli/parts.py", "and takes(found) else", "else", CALLS),
    Mutant("cli/parts.py", "        fits=_declares,", "        fits=callable,", CALLS),
    Mutant("cli/parser.py", "and not _own(role, given[role], chosen)", "", CALLS),
    Mutant("cli/training.py", 'known.setdefault("momentum", None)', "pass", FLAGS),
    Mutant("engine/reach.py", "[*near] if proportional", "[*near] if True", FLAGS),
    # skipped clients
    Mutant("client/sending.py", "tree.select(present, update, nothing)", "update", SKIP),
    Mutant(
        "round/sending.py",
        "tree.select_rows(skipped, before,",
        "tree.select_rows(~skipped, before,",
        SKIP,
    ),
    Mutant("round/measuring.py", "jnp.where(skipped, 0, info", "jnp.where(False, 0, info", SKIP),
    Mutant("round/measuring.py", "jnp.where(nobody, jnp.nan, mean)", "mean", SKIP),
    # selections that know losses and seconds
    Mutant("engine/draws.py", 'side="right"', 'side="left"', tests("draws")),
    Mutant("plan/selection.py", "top_k(jnp.where(client", "top_k(-jnp.where(client", CHOSEN),
    Mutant("plan/selection.py", "if data.budget is None", "if True", CHOSEN),
    Mutant("plan/selection.py", "start[0], start[-1], jnp", "start[0], start[-2], jnp", CHOSEN),
    Mutant("plan/seconds.py", "jnp.argsort(alone)", "jnp.argsort(-alone)", CHOSEN),
    Mutant("plan/seconds.py", "seconds(queue, place)", "seconds(queue, 1)", CHOSEN),
    Mutant("plan/seconds.py", ", allowed=outlook.awake", "", CHOSEN),
    Mutant("plan/tiering.py", "<= state.accuracy[state.last]", "> state.accuracy[0]", CHOSEN),
    Mutant("plan/tiering.py", " & outlook.awake(everyone)", "", CHOSEN),
    Mutant("plan/tiering.py", "2 * (n - rank)", "2 * (1 + rank)", CHOSEN),
    Mutant("plan/tiering.py", "at[drawn].add(-1)", "at[drawn].add(0)", CHOSEN),
    Mutant("plan/tiering.py", "add(samples * state.answer", "add(state.answer", CHOSEN),
    Mutant("plan/guidance.py", "jnp.sum(older) > jnp", "jnp.sum(older) < jnp", CHOSEN),
    Mutant("plan/guidance.py", "value >= CUT *", "value >= 0 *", CHOSEN),
    Mutant("plan/guidance.py", "jnp.minimum(limit / seconds, 1)", "jnp.ones_like(u)", CHOSEN),
    Mutant("plan/guidance.py", "speed = 1 /", "speed = 1 *", CHOSEN),
    Mutant("client/reports.py", "jnp.square(loss)", "jnp.abs(loss)", CHOSEN),
    Mutant("round/polling.py", "FORWARD = 1 / 3", "FORWARD = 1", CHOSEN),
    Mutant("round/polling.py", "metrics.downloads + asked.downloads", "metrics.downloads", CHOSEN),
    Mutant("round/polling.py", "jnp.where(has, 0, plain", "jnp.where(False, 0, plain", CHOSEN),
    Mutant(
        "round/polling.py",
        "placement.awake(parts, key, state, whom, data.clients)",
        "whom",
        CHOSEN,
    ),
    Mutant("round/polling.py", "before.seconds + asked.seconds", "before.seconds", CHOSEN),
    Mutant("run/ledger.py", "np.int64) * traffic.answer", "np.int64)", named("fedcs")),
    Mutant("server/root.py", "tree.scale(n / (n + n_0), step)", "step", HYBRID),
    Mutant("server/root.py", "tree.scale(n_0 / (n + n_0), change)", "change", HYBRID),
    Mutant(
        "server/root.py",
        "tree.subtract(self._train(key, server, data",
        "tree.subtract(self._train(key, tree.add(server, step), data",
        HYBRID,
    ),
    Mutant(
        "server/root.py",
        "jnp.where(present, gathered.cohort.samples, 0)",
        "gathered.cohort.samples",
        HYBRID,
    ),
    Mutant(
        "server/root.py",
        "root_view(data).size) * data.sample_bytes",
        "root_view(data).size) * 4",
        HYBRID,
    ),
    Mutant("server/update.py", "sum(one.up for one in each)", "0", HYBRID),
    Mutant("privacy/_clipped.py", "parts.server.setup_traffic is None", "True", tests("epsilon")),
    Mutant("client/boosting.py", "<= context.shared", ">= context.shared", BOOST),
    Mutant("client/boosting.py", "jnp.any(epoch ==", "jnp.any(epoch >=", BOOST),
    Mutant("client/boosting.py", "        more -= 1", "        pass", BOOST),
    Mutant("client/boosting.py", "int(3 * epochs / 2)", "int(2 * epochs)", BOOST),
    Mutant("client/boosting.py", "math.ceil(epochs / 2)", "int(epochs / 2)", BOOST),
    Mutant(
        "client/boosting.py", "order[count // 2]", "order[jnp.maximum(count - 1, 0) // 2]", BOOST
    ),
    Mutant("client/boosting.py", "(weights > 0) & jnp", "jnp", BOOST),
    Mutant("client/boosting.py", "jnp.where(count > 0, middle, median)", "middle", BOOST),
    Mutant("client/sgd.py", "over | ended", "over", BOOST),
    Mutant("client/local.py", "and self.until is None", "", BOOST),
    Mutant("client/outputs.py", "(own.round == now - 1) & ", "", FD),
    Mutant("client/outputs.py", " & (jnp.sum(own.mean, axis=-1) > 0)", "", FD),
    Mutant("client/outputs.py", "- jnp.where(mine[:, None], own.mean, 0)", "", FD),
    Mutant("client/outputs.py", "cohort.clients - mine.astype(jnp.int32)", "cohort.clients", FD),
    Mutant("client/outputs.py", "(weights[:, None] > 0) & ", "", FD),
    Mutant("client/outputs.py", " & (jnp.sum(sent, axis=-1) > 0)", "", FD),
    Mutant("client/outputs.py", "jnp.where(others[batch.y] > 0, gap, 0)", "gap", FD),
    Mutant("client/outputs.py", "gamma * masked_mean", "masked_mean", FD),
    Mutant("client/agreement.py", "jnp.where(mean.clients > 0, -(-", "jnp.where(True, -(-", FEDMD),
    Mutant("client/agreement.py", "jnp.where(place < samples, ", "jnp.where(True, ", FEDMD),
    Mutant(
        "client/agreement.py", "jax.random.fold_in(key, e)", "jax.random.fold_in(key, 0)", FEDMD
    ),
    Mutant("client/agreement.py", "order[jnp.minimum(place, samples - 1)]", "place", FEDMD),
    Mutant(
        "client/agreement.py",
        "mean.logits[jnp.minimum(position, samples - 1)]",
        "mean.logits[jnp.minimum(place, samples - 1)]",
        FEDMD,
    ),
    Mutant("client/agreement.py", "jnp.abs(logits", "jnp.square(logits", FEDMD),
    Mutant(
        "client/agreement.py",
        "jnp.where(batch.mask[:, None], logits.astype(jnp.float32), 0)",
        "logits.astype(jnp.float32)",
        FEDMD,
    ),
    Mutant("client/agreement.py", "jnp.where(anyone, mean, last.logits)", "mean", FEDMD),
    Mutant("client/agreement.py", "jnp.minimum(end - first, samples)", "end - first", FEDMD),
    Mutant(
        "data/sharing.py",
        "pixels[i] ^ pixels[j]",
        "pixels[i] | pixels[j]",
        XOR,
    ),
    Mutant(
        "data/sharing.py",
        "rng.choice(of_server[labels[j]])",
        "of_server[labels[j]][0]",
        XOR,
    ),
    Mutant(
        "data/sharing.py", "known & (classes != classes[first])", "classes != classes[first]", XOR
    ),
    Mutant(
        "data/sharing.py",
        "p=partners / partners.sum()",
        "p=(partners > 0) / (partners > 0).sum()",
        XOR,
    ),
    Mutant("data/sharing.py", "labels[i]]", "labels[j]]", XOR),
    # the end of a run
    Mutant("run/stop.py", "best > needed", "best >= needed", STOP),
    Mutant("run/stop.py", "np.fmax.accumulate(np.concat", "(np.concat", STOP),
    Mutant("run/experiment.py", "if over:\n                        break", "pass", STOP),
    Mutant("run/experiment.py", "collected = runner.finish(interval.run)", "return interval", STOP),
    Mutant("run/ledger.py", "np.all(stop.done", "np.any(stop.done", STOP),
    Mutant("run/result.py", "found <= value if", "found >= value if", STOP),
    # the clock
    Mutant("round/timing.py", "end > clock.deadline", "end >= clock.deadline", CLOCK),
    Mutant("round/timing.py", "jnp.sum(transfers.uploads), 1)", "len(up), 1)", CLOCK),
    Mutant(
        "round/timing.py",
        "clock.deadline - durations.down - durations.up",
        "clock.deadline - durations.up",
        CLOCK,
    ),
    Mutant("round/timing.py", "visited & ~lost & ~late", "visited & ~late", CLOCK),
    Mutant("round/timing.py", "jnp.minimum(seconds, clock.deadline)", "seconds", CLOCK),
    Mutant("round/timing.py", "tree.select_rows(arrived, models, start)", "models", CLOCK),
    Mutant("engine/moments.py", "total - whole)", "total)", CLOCK),
    Mutant("round/timing.py", "late & (steps > 0) & (", "late & (", CLOCK),
    Mutant("round/timing.py", "(durations.down + work < seconds) | ", "", CLOCK),
    Mutant(
        "round/timing.py", "stop - durations.down, 0, work", "end - durations.down, 0, work", CLOCK
    ),
    Mutant(
        "round/arrivals.py",
        "computing=taken.computing + computing,\n        link",
        "computing=taken.computing,\n        link",
        ARRIVALS,
    ),
    Mutant("engine/moments.py", "- jnp.clip(before - down, 0, work)", "", ARRIVALS),
    Mutant("round/timing.py", "luck[:, 1] * end", "end", CLOCK),
    Mutant("round/arrivals.py", "& ~here", "", ARRIVALS),
    Mutant("round/arrivals.py", "luck[1] * length", "length", ARRIVALS),
    Mutant("round/arrivals.py", "length - before, 0", "length, 0", ARRIVALS),
    Mutant(
        "round/arrivals.py",
        "at.back.seconds, at.back.fraction, at.client",
        "at.back.seconds, at.client",
        ARRIVALS,
    ),
    Mutant("round/arrivals.py", "(asks & alone)", "asks", ARRIVALS),
    Mutant("round/arrivals.py", "freed = freed.at", "freed = (~at.idle & False).at", ARRIVALS),
    Mutant("round/arrivals.py", "state.round - taken.update[order]", "0 * order", ARRIVALS),
    Mutant("round/arrivals.py", "row=self.row,", "row=0 * self.row,", ARRIVALS),
    Mutant(
        "round/arrivals.py", "sends = sends & same(taken.now, self.state.clock)", "pass", ARRIVALS
    ),
    Mutant(
        "round/arrivals.py", "jnp.concatenate([at.client, taken.client])", "at.client", ARRIVALS
    ),
    Mutant("round/placement.py", "tag=back.age[here]", "tag=0 * here", ARRIVALS),
    Mutant("round/training.py", "received, tag = own.model, task.tag", "tag = task.tag", ARRIVALS),
    Mutant(
        "round/parts.py",
        "self.broadcast.several or self.asynchronous",
        "self.broadcast.several",
        ARRIVALS,
    ),
    Mutant(
        "server/preaggregation/_staleness.py",
        "update, behind) - behind",
        "update, behind)",
        ARRIVALS,
    ),
    Mutant("engine/draws.py", "free_below <= given", "free_below < given", ARRIVALS),
    Mutant(
        "round/timing.py",
        "client = jnp.where(arrived, placed.slots.client, data.clients)",
        "client = placed.slots.client",
        CLOCK,
    ),
    Mutant(
        "privacy/_clipped.py",
        "len(weights) / self.clients_per_round",
        "len(weights) / jnp.sum(weights > 0)",
        CLOCK,
    ),
    Mutant("engine/needs.py", "min(first, collected(parts))", "collected(parts)", CLOCK),
    # sweeps and studies
    Mutant(
        "engine/chunks.py",
        "return jax.lax.cond(whole, lambda _: plain",
        "return (lambda *a: plain)(whole, lambda _: plain",
        SWEPT,
    ),
    Mutant("run/functions.py", "index == i, settings[name]", "index == 0, settings[name]", SWEPT),
    Mutant("run/candidates.py", "place * runs, (place + 1) * runs", "place, place + runs", SWEPT),
    Mutant("run/candidates.py", "kinds, *sizes", "kinds", SWEPT),
    Mutant("run/candidates.py", "(*fixed, _host_facts", "(_host_facts", SWEPT),
    Mutant("run/grids.py", "-best if lowest else best", "best", SWEPT),
    Mutant(
        "cli/grouping.py",
        "label if ends_early(config.ending)",
        '"" if ends_early(config.ending)',
        GRID,
    ),
    Mutant("cli/grouping.py", "tuple(what), own", "own", GRID),
    Mutant("cli/loading.py", "group.index(algorithm)", "0", GRID),
    Mutant("cli/running.py", "folder is not None and name not in lost", "folder is not None", GRID),
    Mutant(
        "cli/report.py",
        "np.fmin if result.lowest(score) else np.fmax\n    for",
        "np.fmin\n    for",
        GRID,
    ),
    Mutant("cli/studies/results.py", "sign = -1 if lowest else 1", "sign = 1", STUDY),
    Mutant(
        "cli/studies/results.py",
        "return -math.inf if math.isnan(mean)",
        "return mean if math.isnan(mean)",
        STUDY,
    ),
    Mutant(
        "cli/studies/results.py",
        '"validated" if f"{prefix}score_validated_per_run" in found',
        '"best" if found',
        STUDY,
    ),
    Mutant(
        "cli/studies/results.py",
        'sign = -1 if rows[0].metric.best == "lowest" else 1',
        "sign = 1",
        STUDY,
    ),
    Mutant("cli/studies/plan.py", "len(texts) > 1 and", "False and", STUDY),
    Mutant("cli/studies/plan.py", "(len(self.rows) - 1) * len", "len", STUDY),
    Mutant("cli/studies/plan.py", "if value == default else", "if value else", STUDY),
    # folders
    Mutant("cli/running.py", "rounds != config.experiment.rounds or ", "", FOLDERS),
    Mutant("study.py", "elif not is_free(folder):", "elif False:", FOLDERS + " -k=study"),
    Mutant("cli/claims.py", "if _is_at(file, path):", "if True:", FOLDERS + " -k=holder"),
    Mutant("cli/claims.py", "LOCK_EX | fcntl.LOCK_NB", "LOCK_SH", FOLDERS + " -k=study"),
    Mutant("cli/claims.py", "entry.is_symlink() and", "False and", FOLDERS + " -k=links"),
    Mutant("cli/folder.py", "path.unlink(missing_ok=True)  #", "#", FOLDERS + " -k=links"),
    Mutant("cli/commands.py", "if times[str(message)] == 1:", "if True:", FOLDERS + " -k=picture"),
    Mutant("base/files.py", "file.truncate(end)", "pass", FOLDERS + " -k=line"),
    Mutant("cli/processes.py", "address if local else None", "None", DISTRIBUTED),
    # watching
    Mutant("run/environment.py", "if not git(", "if git(", tests("environment")),
    Mutant("run/environment.py", '":/*.py", ":/*.toml"', '"."', tests("environment")),
    Mutant("run/rows.py", "if named == 1:", "if False:", tests("splits") + " -k=only_client"),
    Mutant("run/prefetch.py", 'self._check(1, 0, "a sample")', "pass", tests("windows")),
    Mutant("cli/forecast.py", "* left / ran", "* left", WATCH),
    Mutant("cli/forecast.py", "self.found(job, done / rounds)", "pass", WATCH),
    Mutant("cli/forecast.py", "seconds / len(jobs)", "seconds", WATCH),
    Mutant("cli/forecast.py", "if new > 0:", "if True:", WATCH),
    Mutant("cli/studies/view.py", "if share > before:", "if True:", WATCH),
    Mutant("cli/studies/cells.py", "/ beside[name])", ")", WATCH),
    Mutant("cli/watching.py", "(done - before) * (rounds", "done * (rounds", WATCH),
    Mutant("cli/studies/view.py", 'self._put(f"{lines}\\n")', "self._put(text)", WATCH),
    Mutant("cli/studies/view.py", 'f"\\x1b[{self._drawn}F', 'f"', WATCH),
    Mutant("cli/sinks.py", "self._opens = None", "pass", WATCH),
    Mutant("cli/watching.py", " > tenth or now", " >= tenth or now", WATCH),
    Mutant("cli/watching.py", "last, tenth = now, ", "tenth = ", WATCH),
    Mutant("run/ledger.py", "if interval.wall is None else", "if True else", SAVED),
    Mutant("cli/sinks.py", "key not in self._open and", "not self._open and", WATCH),
    Mutant("cli/saving.py", "origin.start.ndim == 1:", "False:", FROM_PYTHON),
    Mutant("cli/saving.py", "2.0 * origin", "origin", FROM_PYTHON),
    Mutant(
        "cli/comparing.py",
        "grouped(reading.trials, baseline,",
        "grouped(reading.trials, None,",
        FROM_PYTHON,
    ),
    Mutant(
        "cli/comparing.py",
        "if self.wide:\n            rows",
        "if False:\n            rows",
        FROM_PYTHON,
    ),
    Mutant("cli/calling.py", "name if value else", "name if name else", FROM_PYTHON),
    Mutant("run/provenance.py", "s[0] : s[-1]], s - s[0]", "s[0] : s[-1]], s", FROM_PYTHON),
    Mutant("run/bands.py", "mean - std, mean + std", "mean, mean + std", FROM_PYTHON),
    Mutant("cli/loading.py", "(place + 1) * runs)", "runs)", RUN_FOLDER),
    # where clients' samples and states lie
    Mutant("run/layout.py", "PartitionSpec(None, AXIS)", "PartitionSpec()", tests("layout")),
    Mutant("run/layout.py", "lambda a: a[:, : self.clients]", "lambda a: a", tests("layout")),
    Mutant("run/prefetch.py", "first - (ends - sizes)", "first - ends", WINDOWS),
    Mutant("run/prefetch.py", "(done + t) % every == 0 or", "", WINDOWS),
    Mutant("run/prefetch.py", "more = of_round, self", "more = new, self", WINDOWS),
    Mutant("run/prefetch.py", "clients > self._rows.clients", "False", MEMORY),
    Mutant("run/prefetch.py", "len(clients) + len(present - clients)", "len(present)", MEMORY),
    Mutant(
        "run/prefetch.py", "            clients |= present", "            clients = present", MEMORY
    ),
    Mutant("run/client_memory.py", "rows = layout.clients if not each else", "rows =", MEMORY),
    Mutant(
        "run/client_memory.py", "if any(jax.tree.leaves(per_client_state(run)))", "if False", MEMORY
    ),
    Mutant("run/client_memory.py", "is not None and size > available", "is None", MEMORY),
    Mutant("run/client_memory.py", "kept + max(kept, 2 * devices)", "2 * kept", MEMORY),
    Mutant("run/client_memory.py", "clients[index[1]]]", "clients]", MEMORY),
    Mutant("run/client_memory.py", "clients[shard.index[1]]]", "clients]", MEMORY),
    Mutant("run/client_memory.py", "ClientRows(a.copy(), self", "ClientRows(a, self", MEMORY),
    Mutant("run/client_memory.py", "drawn[cohorts] = True", "drawn[:] = True", MEMORY),
    Mutant("run/client_memory.py", "& (self._row == 0)", "", MEMORY),
    Mutant(
        "run/client_memory.py", "found[self.row[owned] - 1] = owned", "found[:] = owned", MEMORY
    ),
    Mutant("engine/clients.py", "(table[row] == clients) & ", "", MEMORY),
    Mutant("engine/clients.py", " & (clients < data.clients), row", ", row", MEMORY),
    Mutant("engine/clients.py", "before = (low < high) & ", "before = ", WINDOWS),
    Mutant("run/prefetch.py", "edges[:-1], edges[1:]", "0 * edges[:-1], edges[1:]", WINDOWS),
    Mutant("run/metrics.py", "start[known], jnp.where", "start[clients * 0], jnp.where", MEMORY),
    Mutant("run/runner.py", "self._personal_counts(run) if", "None if", MEMORY),
    Mutant(
        "round/own_models.py",
        "in_axes=(None, 0))(stream(key, Round.PERSONAL), client)",
        "in_axes=(None, 0))(stream(key, Round.PERSONAL), row)",
        tests("personal") + " " + MEMORY,
    ),
    Mutant("round/own_models.py", "visits(data, client, peers", "visits(data, row, peers", MEMORY),
    Mutant("round/sending.py", "state_rows(data, slots.client))", "slots.client)", MEMORY),
    Mutant("round/sending.py", "update, state_rows(data, client)", "update, client", MEMORY),
    Mutant(
        "round/training.py",
        "row = state_rows(data, placed.slots.client)",
        "row = placed.slots.client",
        MEMORY,
    ),
    Mutant("run/prefetch.py", "entry < len(data.x), 0, rows", "entry < len(data.x), 0, 0", WINDOWS),
    Mutant("run/prefetch.py", "stops - lengths, stops", "stops, stops", WINDOWS),
    Mutant("server/diagnostics.py", "list_starts(data, clients)", "data.start[clients]", WINDOWS),
    Mutant(
        "server/diagnostics.py", "weight * (1 - share)", "weight * share", tests("dissimilarity")
    ),
    Mutant(
        "server/diagnostics.py",
        "real / jnp.maximum(client",
        "1 / jnp.maximum(client",
        tests("dissimilarity"),
    ),
    Mutant("run/runner.py", "+= block if name", "+= 0 if name", WINDOWS),
    Mutant("run/cache.py", "_programs.pop(owner, None)", "pass", REUSE),
    Mutant("run/functions.py", "made.model,\n", "\n", REUSE),
    Mutant("run/functions.py", "made.task,\n", "", REUSE),
    Mutant("run/functions.py", "made.layout, made.capacity", "made.capacity", REUSE),
    Mutant("run/functions.py", "made.capacity, made.personal", "made.personal", REUSE),
    Mutant("run/functions.py", "made.personal, made.largest", "made.personal", REUSE),
    Mutant(
        "run/functions.py", "shared_program(algorithm,", "shared_program(made.algorithm,", REUSE
    ),
    Mutant("run/programs.py", "else algorithm.on(execution)", "else algorithm", WINDOWS),
    Mutant("run/runner.py", "+= argument_bytes(", "+= 0 * argument_bytes(", tests("scoring")),
    Mutant(
        "round/training.py",
        "isinstance(train, TrainInSteps)",
        "isinstance(train, int)",
        tests("ahead") + " -k=traced_once",
    ),
    Mutant("run/cache.py", "(task, execution, axes", "(execution, axes", tests("scoring", "reuse")),
    Mutant("run/cache.py", "axes.runs, axes.sets", "axes.runs", tests("scoring")),
    Mutant("run/metrics.py", ">= examples.start[-1]", "> examples.start[-1]", tests("scoring")),
    Mutant("run/programs.py", '"finish" and not trains', '"finish"', tests("ahead")),
    Mutant("engine/targets.py", '"xla_cpu_use_fusion_emitters": False', "", tests("ahead")),
    Mutant("engine/targets.py", " and _supported(device, k, v)", "", tests("ahead")),
    Mutant("engine/targets.py", "several or (", "(", tests("ahead")),
    Mutant("engine/targets.py", "*given[:1], ", "", tests("ahead")),
    Mutant("engine/targets.py", " * (not quick)", "", tests("ahead")),
    Mutant("models/products.py", "(not _wanted.get())", "(1)", tests("products")),
    Mutant("models/products.py", "- 1, 1, -1), 0, 1]", "- 1, 1, -1), 1]", tests("products")),
    Mutant("run/programs.py", "visits * self._mean_steps", "self._mean_steps", tests("ahead")),
    Mutant("run/programs.py", "max(_FEWEST_ROWS, 1 <<", "max(1, 1 <<", REUSE),
    Mutant("engine/memory.py", "loops > 0 or ", "", "fedjax_sim/engine/memory.py"),
    Mutant("engine/memory.py", " and loops <= 0", "", "fedjax_sim/engine/memory.py"),
    Mutant("engine/cores.py", "if isinstance(device, jax.Device)", "if False", tests("cores")),
    Mutant("run/programs.py", "of_data.x or of_data.y or of_data.index", "False", WINDOWS),
    Mutant("engine/clients.py", "data.owner is not None and not training", "False", WINDOWS),
    Mutant("engine/clients.py", "if data.owner is not None:", "if False:", WINDOWS),
    # checkpoints
    Mutant("run/checkpoints.py", "[*self._interval_rounds]", "self._interval_rounds", SAVED),
    Mutant("run/checkpoints.py", "self._in_writing | self._weights", "self._weights", SAVED),
    Mutant("run/checkpoints.py", "            del weights[done]", "            pass", SAVED),
    Mutant("run/checkpoints.py", "elif crowded:", "elif False:", SAVED),
    Mutant("run/checkpoint_files.py", "end - n : end", ":n", SAVED),
    Mutant("run/records.py", "        self._length -= 1", "        pass", STOP),
    Mutant("run/records.py", "int(found.round)", "found.round", SAVED),
    Mutant(
        "run/checkpoint_files.py", "about.pop(NAMES) == list(arrays)", "about.pop(NAMES)", SAVED
    ),
    Mutant(
        "run/checkpoint_files.py",
        "jax.random.wrap_key_data(jnp.asarray(array)) if",
        "array if",
        SAVED,
    ),
    Mutant("cli/flags.py", "value > LARGEST", "False", tests("flags")),
    Mutant("cli/flags.py", "value < -LARGEST", "False", tests("sizes")),
    Mutant("base/ranges.py", "value > self.least if", "value >= self.least if", tests("ranges")),
    Mutant("base/ranges.py", "value < self.most if", "value <= self.most if", tests("ranges")),
    Mutant("base/ranges.py", "int in members and", "False and", tests("ranges")),
    Mutant("base/parts.py", "reversed(cls.__mro__)", "[cls]", tests("ranges")),
    Mutant("base/ranges.py", "abs(value) > LARGEST", "False", tests("sizes")),
    Mutant("engine/memory.py", "0 < available < size", "False", tests("sizes") + " -k=copies"),
    Mutant("cli/processes.py", "processes <= MOST_PROCESSES", "processes", tests("sizes")),
    Mutant("base/files.py", "aside = path.with_name", "aside = path or path.with_name", FILES),
    Mutant("base/files.py", "size > there", "False", FILES),
    Mutant("base/files.py", "if filled != len(content)", "if False", FILES),
    Mutant("base/files.py", "begin + count * dtype.itemsize !=", "False and 0 !=", FILES),
    Mutant("run/checkpoints.py", "after % eval_every == 0", "True", SAVED),
    Mutant("run/checkpoint_files.py", "run.state.server if collected is None else", "", SAVED),
    Mutant("run/checkpoints.py", "if theirs != ours:", "if False:", SAVED),
    Mutant("run/checkpoints.py", "self._done = done\n        for", "for", SAVED),
    Mutant("engine/cores.py", "cores > 1 and not chosen", "cores > 1", tests("cores")),
    Mutant(
        "engine/execution.py",
        "by_default = devices is None",
        "by_default = True",
        tests("cores"),
    ),
    Mutant("engine/targets.py", "largest < _SHARED", "largest < 0", tests("ahead")),
    Mutant("engine/targets.py", "_QUICKLY if quick else _IN_PLACE", "_QUICKLY", tests("ahead")),
    Mutant("engine/memory.py", "for program in inner:", "for program in ():", tests("ahead")),
    Mutant("run/runner.py", "done = saved.done", "done = 0", SAVED),
    Mutant("run/identity.py", "if isinstance(value, Execution):", "if False:", SAVED),
    Mutant("round/trial.py", "if not same:", "if False:", tests("contracts")),
    Mutant("round/trial.py", "if not _of_user(part):", "if role == 'server':", tests("contracts")),
    Mutant("round/trial.py", "FAR = (1e3, -1e2)", "FAR = (1e3, -1e3)", tests("contracts")),
    Mutant("run/checks.py", "digest(model) != digest(trained) or", "", tests("flags")),
    Mutant("run/identity.py", ", *held]", "]", SAVED),
    Mutant("run/identity.py", "[of.co_code, of.co_names, inside]", "[of.co_names, inside]", SAVED),
    Mutant(
        "run/identity.py",
        "(_instructions(one.__code__), values)",
        "_instructions(one.__code__)",
        SAVED,
    ),
    Mutant("run/identity.py", "waiting += read.values()", "pass", SAVED),
    Mutant("run/checkpoints.py", "before.get(name) != now.get(name)", "name not in now", SAVED),
    Mutant("cli/studies/cells.py", "losses = 0", "pass", tests("executors")),
    Mutant(
        "cli/studies/cells.py", "isinstance(error, BrokenExecutor)", "False", tests("executors")
    ),
    Mutant("study.py", "study.cells[first - 1 :: step]", "study.cells", tests("executors")),
    Mutant("cli/stopping.py", "first and self._patient", "self._patient", tests("stopping")),
    Mutant("cli/stopping.py", "raise Stopped(asked)", "pass", tests("stopping")),
    Mutant("cli/stopping.py", "signal.set_wakeup_fd", "str", tests("stopping")),
    Mutant("run/runner.py", "score=todo == left", "score=True", SAVED),
    Mutant("run/runner.py", "programs.every - done % programs.every", "programs.every", SAVED),
    Mutant("run/runner.py", "for _, interval in past if interval.scored is None", "", SAVED),
    Mutant("run/checkpoints.py", "interval.scored is not None and ", "", SAVED),
    Mutant("run/prefetch.py", "(done + t) %", "t %", SAVED),
    Mutant("run/prefetch.py", "running.rounds - count", "running.rounds", SAVED),
    Mutant("compression/_codes.py", "x = x / unit", "unit = unit / unit", CODES),
    Mutant("cli/reporting/statistics.py", "1 / n + share", "1 / n", tests("statistics")),
    Mutant("cli/reporting/statistics.py", "np.maximum.accumulate(", "(", tests("statistics")),
    Mutant("cli/reporting/statistics.py", "(6 * problems)", "6", tests("statistics")),
    Mutant("cli/reporting/statistics.py", "else -scores", "else scores", tests("statistics")),
    Mutant("cli/reporting/tables.py", "reverse=not lowest", "reverse=True", tests("statistics")),
    Mutant("cli/reporting/wide.py", "best_of(ts) or ts[0]", "ts[0]", REPORT_OF_STUDY),
    Mutant(
        "cli/reporting/wide.py", "(row, column), 1.0) < LEVEL", "(row, column), 1.0) < 1", PAPER
    ),
    Mutant("cli/studies/results.py", "len(folds) or None", "None", STUDY),
    Mutant("cli/defaults.py", '"momentum" in given or ', "", FLAGS),
    Mutant("cli/defaults.py", '{} if "lr" in given else', "", FLAGS),
    Mutant("cli/resuming.py", "before.get(name) == now.get(name)", "True", SAVED),
    Mutant("cli/folder.py", "path, resumed, pictures", "path, False, pictures", SAVED),
    # Data are not code.
    Mutant("base/registry.py", "if not self._is_declared(value):", "if False:", TRUST),
    Mutant("base/registry.py", "trusted is not None and not any", "False and not any", TRUST),
    Mutant("cli/reading.py", "path.lstat()", "path.stat()", TRUST),
    Mutant("data/download.py", "if not name.startswith", "if False and name.startswith", TRUST),
    Mutant("data/_hf_folder.py", '".." in path.parts or', "", TRUST),
    Mutant("data/pixels.py", "2 * len(images)", "2", TRUST),
    # Needs that follow from what parts say of themselves.
    Mutant("engine/needs.py", "part.forges or part.screens", "True", NEEDS),
    Mutant("engine/matching.py", "a is not None and (a is b", "a is not None or (a is b", NEEDS),
    Mutant("round/fit.py", "(part.messages and shared)", "part.messages", NEEDS),
    Mutant("round/fit.py", "if shared:", "if False:", NEEDS),
    Mutant(
        "round/collecting.py",
        "_part_of(travels(parts, state.server), gathered)",
        "gathered",
        tests("exchange"),
    ),
    # validation
    Mutant("cli/problem.py", "whole=whole, fit=kept)", "whole=whole, fit=whole)", VALIDATION),
    Mutant("cli/problem.py", "held if several else as_one_client(held)", "held", VALIDATION),
    Mutant("cli/problem.py", "held if own else as_one_client(held)", "held", VALIDATION),
    Mutant("cli/validating.py", "None if tokens else seed", "seed", VALIDATION),
    Mutant("cli/validating.py", "if len(numbers) == len(names):", "if False:", VALIDATION),
    Mutant("run/functions.py", "if examples.clients == data.clients", "", VALIDATION),
    Mutant("run/grids.py", "own = first.personal_validation is not", "own = first is", VALIDATION),
    Mutant("run/result.py", '("personal", "personal_v', '("personal", "v', VALIDATION),
    Mutant("run/stop.py", "getattr(e, on)", "e.validation", VALIDATION),
    Mutant("cli/ending.py", "if own and validated else", "if False else", VALIDATION),
    Mutant(
        "cli/reporting/read.py", '"personal_validation" if own', '"validation" if own', VALIDATION
    ),
    Mutant(
        "cli/studies/results.py",
        '"personal_" if "personal_score_last_per_run" in summary',
        '"" if summary',
        VALIDATION,
    ),
    # Clients that never trained.
    Mutant("data/clients.py", "if both.size:", "if False:", ADAPTED),
    Mutant("data/clients.py", "len(mine.sizes) != len(others.sizes)", "False", ADAPTED),
    Mutant("run/functions.py", "adapt=adapt)", "adapt=None)", ADAPTED),
    Mutant("run/functions.py", "one.adapt)[0]", "sets[0].adapt)[0]", ADAPTED),
    Mutant("round/own_models.py", "if adapt:", "if False:", ADAPTED),
    Mutant("round/own_models.py", "own_leaves(parts, trained.variables)", "mine", ADAPTED),
    Mutant("round/own_models.py", "return trained.client_state,", "return start,", ADAPTED),
    Mutant("round/own_models.py", "parts.exchange.nothing", "False", ADAPTED),
    Mutant("round/own_models.py", '"local": parts.local.peers', '"local": False', ADAPTED),
    Mutant("round/own_models.py", "parts.flight.serverless,", "False,", ADAPTED),
    Mutant("run/programs.py", "rows.clients), self.personal", "rows.clients), False", ADAPTED),
    Mutant("run/checks.py", 'if sets["test"].adapt is None and', "if False and", ADAPTED),
    Mutant("cli/problem.py", "test, adapt=to_test)", "test, adapt=test)", ADAPTED),
    Mutant("cli/problem.py", "test, adapt=mine or None)", "test, adapt=test)", ADAPTED),
    Mutant("cli/problem.py", "*map(take_clients, kept, others)", "*kept", ADAPTED),
    Mutant("cli/problem.py", "pools = partition, scored", "pools = scored[place], scored", ADAPTED),
    Mutant("cli/problem.py", "*map(with_clients, kept, mine, tested)", "", ADAPTED),
    Mutant("cli/problem.py", "fold.train) if mine else partition", "fold.test)", ADAPTED),
    Mutant("cli/validating.py", "by_seed, 1 - share)", "by_seed, share)", ADAPTED),
    Mutant("cli/report.py", '"adapted" if any(', '"personal" if any(', ADAPTED),
]


def main() -> int:
    """Runs all mutants and prints the survivors; exits with 1 if more than 5 % survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the file's name or of the line")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: 1)")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in m.file or args.only in m.old]
    if not chosen:
        parser.error(f"no mutant has {args.only!r} in its file or line")
    for mutant in chosen:
        found = (ROOT / "fedjax_sim" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if found != 1:
            raise ValueError(f"{mutant.file} has {found} times {mutant.old!r}")
    with tempfile.TemporaryDirectory() as folder:
        # Programs that a bug does not touch are compiled for the first mutant only.
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(args.jobs):
            ignored = shutil.ignore_patterns(".git", ".ci", "__pycache__", "results", ".*cache")
            trees.put(Path(shutil.copytree(ROOT, Path(folder) / f"tree{job}", ignore=ignored)))

        def alive(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                survived = survives(tree, mutant, environment)
            finally:
                trees.put(tree)
            mark = "SURVIVED" if survived else "killed"
            print(f"{mark} {mutant.file}: {mutant.new!r}", flush=True)
            return survived

        with ThreadPool(args.jobs) as pool:
            survivors = sum(pool.map(alive, chosen, chunksize=1))
    killed = len(chosen) - survivors
    print(f"{killed} of {len(chosen)} killed ({100 * killed / len(chosen):.1f} %)")
    return int(survivors > 0.05 * len(chosen))


def survives(tree: Path, mutant: Mutant, environment: Mapping[str, str]) -> bool:
    """Whether all tests pass with the bug; the tree is whole again afterwards."""
    file = tree / "fedjax_sim" / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return all(
            _pass(tree, [str(file), *mutant.tests.split()], environment, marks)
            for marks in ("not slow", "slow")
        )
    finally:
        file.write_text(text, encoding="utf-8")


def _pass(tree: Path, where: list[str], environment: Mapping[str, str], marks: str) -> bool:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *where],
        cwd=tree, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode not in (0, 1, 2, NONE_MARKED):
        raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
    return run.returncode not in (1, 2)


if __name__ == "__main__":
    sys.exit(main())
