"""Augmentations: random changes of a minibatch of images, or of the copies in it, in each step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Finite,
    FinitePositive,
    Natural,
    Part,
    Share,
    Transform,
)
from fedjax_sim.base.arrays import named_leaves
from fedjax_sim.base.words import array_type
from fedjax_sim.client.motions import (
    Change,
    Motion,
    flip,
    perspective,
    rotation,
    warped,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import round_number

__all__ = [
    "altered",
    "altered_copies",
    "colour_jitter",
    "crop",
    "drifting",
    "fedaug_augmentations",
    "flip",
    "greyscale",
    "noise",
    "perspective",
    "rotation",
    "sometimes",
    "warped",
]


class altered(Part):
    """Changes all rows of a minibatch of ``uint8[B, H, W, C]`` images and keeps their dtype.

    If x is a pytree, its images are changed, all in the same way; other arrays stay as they are.

    Args:
        changes: applied in order.
        white: the largest value of a pixel.

    Raises:
        ValueError: in the first step, if the inputs have no images.

    Example:
        Random crops and mirror images, as is usual for CIFAR-10.

        >>> x = jnp.zeros((2, 32, 32, 3), jnp.uint8)
        >>> batch = Batch(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), None)
        >>> transform = altered([warped(sometimes(0.5, flip)), crop(4)])
        >>> transform(jax.random.key(0), batch, None).x.shape
        (2, 32, 32, 3)
    """

    changes: Sequence[Change]
    white: FinitePositive = 255.0

    def __call__(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        leaves = named_leaves("x", batch.x)
        if not any(map(_is_image, leaves.values())):
            got = ", ".join(f"{array_type(a)} as {leaf}" for leaf, a in leaves.items())
            raise ValueError(f"augmentations are for images, uint8 [B, H, W, C], got {got}")
        return batch._replace(x=jax.tree.map(functools.partial(self._changed, key), batch.x))

    def _changed(self, key: Array, x: Array) -> Array:
        if not _is_image(x):
            return x
        images = x.astype(jnp.float32) / self.white
        for i, change in enumerate(self.changes):
            images = change(jax.random.fold_in(key, i), images)
        return jnp.round(jnp.clip(images, 0, 1) * self.white).astype(jnp.uint8)


class altered_copies(altered):
    """Changes only the rows of a minibatch that are copies (see ``Batch.copy``).

    A minibatch without copies stays as it is.

    Args:
        changes: applied in order.
        white: the largest value of a pixel.

    Example:
        >>> x = jnp.array([[[[1], [9]]], [[[1], [9]]]], jnp.uint8)
        >>> batch = Batch(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), jnp.array([False, True]))
        >>> flipped = altered_copies([warped(flip)])(jax.random.key(0), batch, None)
        >>> flipped.x[..., 0].tolist()
        [[[1, 9]], [[9, 1]]]
    """

    def __call__(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        if batch.copy is None:
            return batch
        new = super().__call__(key, batch, client)
        return batch._replace(x=tree.select_rows(batch.copy, new.x, batch.x))


class drifting(Part):
    r"""Data that drift over the rounds: in each step, a share of the samples is changed.

    .. math:: (x, y) \sim (1 - s_t)\, P_k + s_t\, P_k' \quad \text{in round } t

    where :math:`P_k'` are the changed samples of client k. A share that jumps from 0 to 1 is sudden
    drift, one that grows is gradual, one that comes and goes is recurring. The change may concern
    the labels (concept drift), the inputs (covariate drift) or both, for some clients alone if it
    reads ``client.id``.

    Only minibatches drift; the test set and the samples read by polls and reports do not. To score
    both distributions in each evaluation, pass the changed test samples as ``validation`` of
    :func:`fedjax_sim.simulate`. For class frequencies that drift, order each client's samples by
    time, see :func:`fedjax_sim.data.streamed`.

    Args:
        change: ``(key, batch, client) -> batch``, which changes all rows of x, y or both; x may be
            a pytree.
        share: maps the number of the round t, from 0, to :math:`s_t` in [0, 1], such as
            ``optax.linear_schedule(0.0, 1.0, 100)`` or ``lambda t: t >= 50``.

    Raises:
        ValueError: where the server trains on its own samples.

    Source: Gama et al. 2014, a survey on concept drift adaptation, figure 2
    <https://doi.org/10.1145/2523813>.

    Example:
        The labels of two classes are swapped from round 50 on.

        >>> import fedjax_sim as fs, optax
        >>> def swapped(key, batch, client):
        ...     return batch._replace(y=1 - batch.y)
        >>> transforms = (drifting(swapped, lambda t: t >= 50),)
        >>> local = fs.local_sgd(fs.toy().objective, optax.sgd(0.1), transforms=transforms)
    """

    change: Transform
    share: Callable[[Array], Array]

    def __call__(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        share = jnp.asarray(self.share(round_number(client, "drifting")), jnp.float32)
        new = self.change(jax.random.fold_in(key, 0), batch, client)
        changed = jax.random.uniform(jax.random.fold_in(key, 1), batch.mask.shape, jnp.float32)
        x, y = tree.select_rows(changed < share, (new.x, new.y), (batch.x, batch.y))
        return batch._replace(x=x, y=y)


class fedaug_augmentations(Part):
    """The augmentations of FedAug, which change only copies (see :class:`altered_copies`).

    Grey images: horizontal flip, rotation by -20 to 20 degrees, perspective, noise. Colour images
    also: colour jitter and grey-scale. The thesis does not give their probabilities and strengths:
    here each is applied with probability 1/2 (grey-scale 1/10), and the strengths are those in the
    code.

    Args:
        shape: (H, W, C) of an image, C 1 or 3.
        white: the largest value of a pixel.
        mirror: whether to flip, as in the thesis, although few mirrored digits and letters keep
          their class.

    Raises:
        ValueError: if shape is not of this form.

    Source: Cornelis 2022 <cornelis2022federated>, section 5.3.
    """

    shape: Sequence[int]
    white: float = 255.0
    _: dataclasses.KW_ONLY
    mirror: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or self.shape[-1] not in (1, 3):
            raise ValueError(
                f"augmentations are for images [H, W, 1] or [H, W, 3], got {list(self.shape)}"
            )
        _ = self._changes  # checks white

    @functools.cached_property
    def _changes(self) -> altered_copies:
        motions: list[Motion] = [rotation(20.0), perspective(0.2)]
        motions = [flip, *motions] if self.mirror else motions
        changes: list[Change] = [warped(*(sometimes(0.5, motion) for motion in motions))]
        if self.shape[-1] == 3:
            changes += [sometimes(0.5, colour_jitter()), sometimes(0.1, greyscale)]
        return altered_copies([*changes, sometimes(0.5, noise(0.05))], self.white)

    def __call__(self, key: Array, batch: Batch, client: ClientView) -> Batch:
        return self._changes(key, batch, client)


def _is_image(x: Array) -> bool:
    return x.dtype == jnp.uint8 and x.ndim == 4


class sometimes(Part):
    """A change, or a motion, that is applied to each image with a probability.

    Args:
        chance: the probability.
        change: what is applied.
    """

    chance: Share
    change: Change

    def __call__(self, key: Array, images: Array) -> Array:
        changed = self.change(jax.random.fold_in(key, 0), images)
        drawn = jax.random.uniform(jax.random.fold_in(key, 1), images.shape[:1], jnp.float32)
        return jnp.where(tree.expand(drawn < self.chance, images), changed, images)


class crop(Part):
    """A random crop of each image after padding it with black; the size is unchanged.

    Args:
        padding: width of the padding in pixels.
    """

    padding: Natural

    def __call__(self, key: Array, images: Array) -> Array:
        edge = (self.padding, self.padding)
        wide = jnp.pad(images, ((0, 0), edge, edge, (0, 0)))
        places = jax.random.randint(key, (len(images), 2), 0, 2 * self.padding + 1, jnp.int32)

        def cut(image: Array, place: Array) -> Array:
            return jax.lax.dynamic_slice(image, (*place, jnp.int32(0)), images.shape[1:])

        return jax.vmap(cut)(wide, places)


class noise(Part):
    """Gaussian noise.

    Args:
        std: its standard deviation, where white is 1.
    """

    std: Finite

    def __call__(self, key: Array, images: Array) -> Array:
        return images + self.std * jax.random.normal(key, images.shape, images.dtype)


class colour_jitter(Part):
    """Random changes of brightness, contrast, saturation and hue, by functions of dm-pix.

    Args:
        brightness: the largest value that is added or subtracted.
        contrast: the largest difference of its factor from 1.
        saturation: the largest difference of its factor from 1.
        hue: the largest shift of the hue, as a fraction of the colour circle.

    Source: DeepMind 2020 <https://github.com/google-deepmind>, dm-pix.
    """

    brightness: Share = 0.2
    contrast: Share = 0.2
    saturation: Share = 0.2
    hue: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"hue must be in [0, 0.5], got {self.hue}")

    def __call__(self, key: Array, images: Array) -> Array:
        return jax.vmap(self._jitter)(jax.random.split(key, len(images)), images)

    def _jitter(self, key: Array, image: Array) -> Array:
        import dm_pix

        keys = jax.random.split(key, 4)

        def drawn(i: int, middle: float, radius: float) -> Array:  # dm-pix draws another dtype
            least, most = middle - radius, middle + radius
            return jax.random.uniform(keys[i], (), jnp.float32, least, most)

        with jax.numpy_dtype_promotion("standard"):  # dm-pix adds bool to float
            image = dm_pix.adjust_brightness(image, drawn(0, 0, self.brightness))
            image = dm_pix.adjust_contrast(image, drawn(1, 1, self.contrast))
            image = jnp.clip(image, 0, 1)  # the next two take no other colours
            image = dm_pix.adjust_saturation(image, drawn(2, 1, self.saturation))
            return dm_pix.adjust_hue(image, drawn(3, 0, self.hue))


def greyscale(key: Array, images: Array) -> Array:
    """Puts the luma (ITU-R BT.601) into all three channels: a change."""
    import dm_pix

    return dm_pix.rgb_to_grayscale(images, keep_dims=True)
