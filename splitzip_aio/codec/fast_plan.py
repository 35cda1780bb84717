"""What a plan needs to know of exponent counts, in machine code: for a few hundred segments numpy's calls add up."""

from __future__ import annotations

from typing import Any

import numpy as np

from splitzip_aio.codec.simd import compiled, entry

__all__ = ["survey_counts"]


@compiled
def _sort(ranks: Any, order: Any) -> None:
    """Exponents by falling rank, equal ones by value; few occur, so that insertion is quick."""
    listed = 0
    for exponent in range(256):
        if ranks[exponent] > 0:
            place = listed
            while place > 0 and ranks[order[place - 1]] < ranks[exponent]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = exponent
            listed += 1
    for exponent in range(256):
        if ranks[exponent] <= 0:
            order[listed] = exponent
            listed += 1


@entry
def survey_counts(counts: Any, ranking: Any, costs: Any, total: Any, order: Any, sums: Any) -> Any:
    """What ``schedule.survey_counts`` does: see there.

    ``counts`` is (segments, 256), ``ranking`` (256,) int64 or empty for ``total``, ``costs`` (256, n) float64. Written
    are ``total``, (256,) int64 zeros, ``order``, (256,) int64, and ``sums``, (n, segments) int64.
    """
    for segment in range(counts.shape[0]):
        for exponent in range(256):
            total[exponent] += counts[segment, exponent]
    _sort(ranking if ranking.size else total, order)
    occurring = 256
    while occurring and total[order[occurring - 1]] == 0:
        occurring -= 1
    sum_of = np.empty(costs.shape[1])
    for segment in range(counts.shape[0]):
        sum_of[:] = 0
        for rank in range(occurring):
            count = np.float64(counts[segment, order[rank]])
            for column in range(costs.shape[1]):
                sum_of[column] += count * costs[rank, column]
        for column in range(costs.shape[1]):
            sums[column, segment] = np.int64(sum_of[column])
