"""The loops of kernels.py, which numba compiles for the machine at first use and keeps in its cache."""

import numba
import numpy as np

GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive indices over the 32-bit range
ROUND_1, ROUND_2 = 0x7FEB352D, 0x846CA68B  # multipliers of the hash function "lowbias32" (hash-prospector)
BLOCK = 2048  # elements; the blocks of three gradients take 24 KB, so all six inner products read from the L1 cache


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def adamw(theta, grad, m, v, beta1, rest1, beta2, rest2, alpha_t, eps, decay):
    for i in numba.prange(theta.size):
        g = grad[i]
        m[i] = beta1 * m[i] + rest1 * g
        v[i] = beta2 * v[i] + rest2 * g * g
        theta[i] -= alpha_t * m[i] / (np.sqrt(v[i]) + eps) + decay * theta[i]


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def dropout(x, out, key1, key2, threshold, scale):
    for i in numba.prange(x.size):
        h = np.uint32(np.uint32(i) * np.uint32(GOLDEN) + key1)  # numba widens every product, so cast back to 32 bits
        h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(ROUND_1))
        h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(ROUND_2))
        h = np.uint32((h ^ (h >> np.uint32(16))) + key2)
        # a second round: with one alone, similar keys give similar masks
        h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(ROUND_1))
        h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(ROUND_2))
        h = h ^ (h >> np.uint32(16))
        out[i] = x[i] * scale if h >= threshold else np.float32(0)


# reassoc lets the compiler vectorize the sums; infinities and NaNs are still propagated
@numba.njit(parallel=True, fastmath={"contract", "reassoc"}, error_model="numpy", cache=True)
def gramian(vectors, products):
    for block in numba.prange(products.shape[0]):
        start = block * BLOCK
        stop = min(start + BLOCK, vectors[0].size)
        for i in range(len(vectors)):
            for j in range(i + 1):
                x, y = vectors[i][start:stop], vectors[j][start:stop]
                total = 0.0
                for e in range(x.size):
                    total += np.float64(x[e]) * np.float64(y[e])
                products[block, i, j] = products[block, j, i] = total


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def weighted_sum(vectors, weights, zeros):
    out = vectors[0]
    for block in numba.prange(-(-out.size // BLOCK)):
        if zeros[block]:
            continue
        start = block * BLOCK
        stop = min(start + BLOCK, out.size)
        total = np.zeros(BLOCK)
        for k in range(len(vectors)):
            x, weight = vectors[k][start:stop], weights[k]
            for e in range(x.size):
                total[e] += weight * np.float64(x[e])
        for e in range(stop - start):
            out[start + e] = total[e]
