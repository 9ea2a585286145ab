"""The loops of kernels.py, which numba compiles for the machine at first use and keeps in its cache.

A loop that calls `read` and `write` works on float32 and on bfloat16, which NumPy does not have: its bits are stored as
uint16, and are the upper half of those of the same number in float32.
"""

import numba
import numpy as np
from numba.extending import overload, register_jitable
from numpy import float32, int32, uint16, uint32

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


def read(x, i):
    """x[i] as a float32."""


def write(x, i, value):
    """x[i] = value, rounded to the nearest number that x can hold, to even ones if there are two."""


@overload(read)
def _read(x, i):
    if x.dtype == numba.types.uint16:
        return lambda x, i: uint32(uint32(x[i]) << uint32(16)).view(float32)  # numba widens every result, so cast back
    return lambda x, i: x[i]


@overload(write)
def _write(x, i, value):
    def write_bfloat16(x, i, value):
        bits = float32(value).view(uint32)
        rounded = uint32(bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1)))
        x[i] = uint16(rounded >> uint32(16)) if value == value else uint16(0x7FC0)  # NaN

    def write_float32(x, i, value):
        x[i] = value

    return write_bfloat16 if x.dtype == numba.types.uint16 else write_float32


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def dropout(x, out, key1, key2, threshold, scale):
    for i in numba.prange(x.size):
        h = uint32(uint32(i) * uint32(GOLDEN) + key1)
        h = uint32((h ^ (h >> uint32(16))) * uint32(ROUND_1))
        h = uint32((h ^ (h >> uint32(15))) * uint32(ROUND_2))
        h = uint32((h ^ (h >> uint32(16))) + key2)
        # a second round: with one alone, similar keys give similar masks
        h = uint32((h ^ (h >> uint32(16))) * uint32(ROUND_1))
        h = uint32((h ^ (h >> uint32(15))) * uint32(ROUND_2))
        h = h ^ (h >> uint32(16))
        write(out, i, read(x, i) * scale if h >= threshold else float32(0))


@register_jitable
def exp_of_negative(x):
    """e^x for x <= 0, to about 1e-7: x = n ln 2 + r, then a polynomial of r (Cephes) times 2^n."""
    x = max(x, float32(-87))
    n = int32(x * float32(1.44269504) - float32(0.5))
    r = x - float32(n) * float32(0.693359375) + float32(n) * float32(2.12194440e-4)
    p = float32(1.9875691500e-4) * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    return (p * r * r + r + float32(1)) * int32(int32(n + int32(127)) << int32(23)).view(float32)


@register_jitable
def normal_cdf(x, exp):
    """The normal distribution function, to 1e-7, with exp = e^(-x^2 / 2): Abramowitz & Stegun 1964, 7.1.26."""
    t = float32(1) / (float32(1) + float32(0.3275911 / np.sqrt(2)) * abs(x))
    p = float32(-1.453152027) + t * float32(1.061405429)
    p = float32(0.254829592) + t * (float32(-0.284496736) + t * (float32(1.421413741) + t * p))
    tail = float32(0.5) * t * p * exp
    return float32(1) - tail if x > 0 else tail


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def gelu(x, out):
    for i in numba.prange(x.size):
        v = read(x, i)
        write(out, i, v * normal_cdf(v, exp_of_negative(float32(-0.5) * v * v)))


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def gelu_backward(x, grad, out):
    for i in numba.prange(x.size):
        v = read(x, i)
        exp = exp_of_negative(float32(-0.5) * v * v)
        slope = normal_cdf(v, exp) + v * float32(1 / np.sqrt(2 * np.pi)) * exp
        write(out, i, read(grad, i) * slope)


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


@numba.njit(parallel=True, fastmath={"contract", "reassoc"}, error_model="numpy", cache=True)
def gramian_of_three(a, b, c, products):
    """The same in one pass for three vectors, the usual number of tasks: each element is converted once."""
    for block in numba.prange(products.shape[0]):
        start = block * BLOCK
        stop = min(start + BLOCK, a.size)
        x, y, z = a[start:stop], b[start:stop], c[start:stop]
        xx = xy = xz = yy = yz = zz = 0.0
        for e in range(x.size):
            p, q, r = np.float64(x[e]), np.float64(y[e]), np.float64(z[e])
            xx += p * p
            xy += p * q
            xz += p * r
            yy += q * q
            yz += q * r
            zz += r * r
        products[block, 0, 0], products[block, 1, 1], products[block, 2, 2] = xx, yy, zz
        products[block, 0, 1] = products[block, 1, 0] = xy
        products[block, 0, 2] = products[block, 2, 0] = xz
        products[block, 1, 2] = products[block, 2, 1] = yz


@numba.njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)
def weighted_sum(vectors, weights, zeros):
    out = vectors[0]
    for block in numba.prange(-(-out.size // BLOCK)):
        if zeros[block]:
            continue
        start = block * BLOCK
        stop = min(start + BLOCK, out.size)
        total = np.empty(BLOCK)
        first = out[start:stop]
        for e in range(first.size):
            total[e] = weights[0] * np.float64(first[e])
        for k in range(1, len(vectors)):
            x = vectors[k][start:stop]
            for e in range(x.size):
                total[e] += weights[k] * np.float64(x[e])
        for e in range(first.size):
            first[e] = total[e]
