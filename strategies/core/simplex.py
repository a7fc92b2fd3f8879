"""Convex combinations: the weights that make a quadratic form smallest."""

import numpy as np

# Relative to the size of the form: what counts as zero in the conditions for a minimum.
_TOLERANCE = 1e-12


def smallest_combination(form: np.ndarray, start: int) -> np.ndarray:
    """Return ``a`` >= 0 with sum 1 that minimises ``a @ form @ a``, (n,) float64.

    Wolfe's algorithm for the point of least norm in a polytope (Mathematical Programming 11, 1976), on the matrix of
    inner products of its corners: an active-set method, which ends after finitely many steps at the exact minimum.

    Args:
        form: (n, n), symmetric and positive semidefinite, float64.
        start: the corner to begin with; it is the answer if it is as good as any other.
    """
    n = len(form)
    weights = np.zeros(n)
    weights[start] = 1.0
    support = [start]
    # Each corner comes in about once; a form that rounding spoils ends here, at weights that are feasible all the same.
    for _ in range(4 * n):
        slopes = form @ weights
        value = weights @ slopes
        entering = int(np.argmin(slopes))
        if entering in support or slopes[entering] >= value - _TOLERANCE * max(value, form[entering, entering]):
            break
        support.append(entering)
        while True:
            try:
                target = _affine_minimum(form[np.ix_(support, support)])
            except np.linalg.LinAlgError:
                return weights
            if (target > 0).all():
                weights[:] = 0.0
                weights[support] = target
                break
            # Towards the target until the first weight is zero, which leaves the support.
            now = weights[support]
            falling = target <= 0
            with np.errstate(invalid="ignore"):
                steps = now[falling] / (now[falling] - target[falling])
            moved = now + steps.min() * (target - now)
            moved[np.flatnonzero(falling)[np.argmin(steps)]] = 0.0
            if not (moved > 0).any():  # rounding has spoilt the form
                return weights
            weights[:] = 0.0
            weights[support] = np.maximum(moved, 0.0)
            support = [corner for corner in support if weights[corner] > 0]
    weights /= weights.sum()
    return weights


def _affine_minimum(form: np.ndarray) -> np.ndarray:
    """Return the weights of sum 1, of either sign, that minimise ``a @ form @ a``.

    Raises:
        LinAlgError: there is more than one such combination, or none that is finite.
    """
    n = len(form)
    scale = max(float(np.abs(form).max()), np.finfo(float).tiny)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = form / scale
    system[n, n] = 0.0
    right = np.zeros(n + 1)
    right[n] = 1.0
    solution: np.ndarray = np.linalg.solve(system, right)[:n]
    if not np.isfinite(solution).all():
        raise np.linalg.LinAlgError("not finite")
    return solution
