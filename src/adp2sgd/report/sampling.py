"""Fewer points for the same picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from adp2sgd.report.run_data import Floats

MOST = 1000  # points of a line
METHOD = (
    f"Lines of more than {MOST:,} points are thinned with largest-triangle-three-buckets; the CSV holds all points."
)


def thinned(x: Floats, y: Floats, most: int = MOST) -> NDArray[np.intp]:
    """Indices of at most `most` points that keep the line's shape (largest triangle, three buckets).

    The first and the last point stay. Of each bucket in between the point stays that spans the largest triangle with
    the point kept before it and the mean of the next bucket. Points that are not finite are dropped.
    """
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if len(finite) <= most:
        return finite
    x, y = x[finite], y[finite]
    edges = np.linspace(1, len(x) - 1, most - 1).astype(np.intp)  # of the most − 2 buckets
    kept = [0]
    for k in range(most - 2):
        low, high = edges[k], edges[k + 1]
        after = slice(high, edges[k + 2] if k + 2 < len(edges) else len(x))
        ax, ay = x[kept[-1]], y[kept[-1]]
        cx, cy = x[after].mean(), y[after].mean()
        areas = np.abs((ax - cx) * (y[low:high] - ay) - (ax - x[low:high]) * (cy - ay))
        kept.append(int(low + areas.argmax()))
    found: NDArray[np.intp] = finite[np.array([*kept, len(x) - 1])]
    return found
