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


@register_jitable
def nine_products(a, b, c, x, y, z):
    """The inner products of each of the first three vectors with each of the last three, in float64."""
    ax = ay = az = bx = by = bz = cx = cy = cz = 0.0
    for e in range(a.size):
        p, q, r = np.float64(a[e]), np.float64(b[e]), np.float64(c[e])
        u, v, w = np.float64(x[e]), np.float64(y[e]), np.float64(z[e])
        ax, ay, az = ax + p * u, ay + p * v, az + p * w
        bx, by, bz = bx + q * u, by + q * v, bz + q * w
        cx, cy, cz = cx + r * u, cy + r * v, cz + r * w
    return (ax, ay, az), (bx, by, bz), (cx, cy, cz)


# Three by three, because converting an element to float64 takes longer than multiplying it. If K is not a multiple of
# 3, the last vector stands in for those that are missing. reassoc lets the compiler vectorize the sums; infinities and
# NaNs are still propagated.
@numba.njit(parallel=True, fastmath={"contract", "reassoc"}, error_model="numpy", cache=True)
def gramian(vectors, products):
    last = len(vectors) - 1
    for block in numba.prange(products.shape[0]):
        start = block * BLOCK
        stop = min(start + BLOCK, vectors[0].size)
        for i in range(0, last + 1, 3):
            rows = i, min(i + 1, last), min(i + 2, last)
            a, b, c = vectors[rows[0]][start:stop], vectors[rows[1]][start:stop], vectors[rows[2]][start:stop]
            for j in range(0, i + 1, 3):
                columns = j, min(j + 1, last), min(j + 2, last)
                x, y, z = vectors[columns[0]], vectors[columns[1]], vectors[columns[2]]
                sums = nine_products(a, b, c, x[start:stop], y[start:stop], z[start:stop])
                for row, of_row in zip(rows, sums):  # noqa: B905, numba's zip has no strict
                    for column, product in zip(columns, of_row):  # noqa: B905
                        products[block, row, column] = products[block, column, row] = product


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
