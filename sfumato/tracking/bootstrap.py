"""Bootstrap intervals of differences between two models that answered the same prompts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
_DRAWN_AT_ONCE = 2**22
"""Most indices in memory at a time."""


class Interval(NamedTuple):
    """A mean difference and its interval; the bounds are NaN where there is no second prompt to resample."""

    mean: float
    low: float
    high: float


def paired_bootstrap(
    differences: Sequence[float],
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    *,
    clusters: Sequence[Hashable] | None = None,
) -> Interval:
    """The mean of paired differences with its percentile bootstrap interval.

    Samples of one prompt are alike, so that drawing them one by one would give too narrow an interval: where prompts
    have several samples, whole prompts are drawn, and the mean is over the samples of those that were drawn (Field and
    Welsh 2007, "Bootstrapping clustered data").

    Args:
        differences: ``[n]``, for each pair the value of one model minus that of the other.
        seed: of the resampling; the same arguments give the same interval.
        num_resamples: how often the prompts are drawn anew.
        clusters: ``[n]``, the prompt of each pair; None counts each pair as a prompt.

    Returns:
        Mean, lower and upper bound. Differences that are all 0 with two prompts or more give exactly (0, 0, 0).

    Raises:
        ValueError: when there is no difference, one is not finite, or there is another number of clusters.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"differences of shape {list(values.shape)}: a list of at least one number is needed")
    if not np.isfinite(values).all():
        raise ValueError("a difference is not finite: leave out pairs without a value, and say how many")
    if clusters is not None and len(clusters) != len(values):
        raise ValueError(f"{len(values)} differences have {len(clusters)} clusters")
    names = range(len(values)) if clusters is None else clusters
    index_of_cluster = {name: index for index, name in enumerate(dict.fromkeys(names))}
    cluster_of_value = np.array([index_of_cluster[name] for name in names])
    num_clusters = len(index_of_cluster)
    mean = math.fsum(values) / len(values)
    if num_clusters == 1:
        return Interval(mean, math.nan, math.nan)

    sums = np.bincount(cluster_of_value, weights=values)
    sizes = np.bincount(cluster_of_value)
    generator = np.random.default_rng(seed)
    means = []
    chunk = max(_DRAWN_AT_ONCE // num_clusters, 1)
    for start in range(0, num_resamples, chunk):
        drawn = generator.integers(num_clusters, size=(min(chunk, num_resamples - start), num_clusters))
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(mean, float(low), float(high))
