"""How likely one of k samples is right, from n samples of a task."""

from math import comb


def pass_at_k(num_samples: int, num_right: int, k: int) -> float | None:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).

    None when k is larger than the number of samples: the samples do not tell.

    Raises:
        ValueError: counts that cannot be.
    """
    if not 0 <= num_right <= num_samples or k < 1:
        raise ValueError(
            f"{num_right} right of {num_samples} samples, k {k}; expected 0 <= right <= samples and k >= 1"
        )
    if k > num_samples:
        return None
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)
