// What lies between the products: normalisation, rotation with the KV write, the gated activation.
// Each is one pass over its rows, on several threads only when there is enough to do.
#include <algorithm>

#include "simd.h"

namespace {

constexpr int64_t WORTH_THREADS = 64 * 1024;  // floats below which waking a thread costs more than it saves

vf load_some(const float* p, int64_t n) {
    vf v{};
    memcpy(&v, p, n * sizeof(float));
    return v;
}

float sum_of_squares(const float* x, int64_t n) {
    vf a{}, b{};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        vf u = load(x + i), v = load(x + i + W);
        a += u * u;
        b += v * v;
    }
    for (; i < n; i += W) {
        vf u = load_some(x + i, std::min<int64_t>(W, n - i));
        a += u * u;
    }
    return reduce_add(a + b);
}

void normalise(const float* x, const float* weight, float eps, float* out, int64_t n) {
    float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

// x [D] in place; cos and sin [D / 2].
void rotate(float* x, const float* cos, const float* sin, int64_t D) {
    float *x1 = x, *x2 = x + D / 2;
#pragma omp simd
    for (int64_t i = 0; i < D / 2; i++) {
        float a = x1[i], b = x2[i];
        x1[i] = a * cos[i] - b * sin[i];
        x2[i] = b * cos[i] + a * sin[i];
    }
}

vf silu_mul(vf gate, vf up) {
    // exp2 is right up to 2^127; beyond, the quotient is 0 to within fp32 anyway.
    vf power = gate * -1.44269504088896341f;
    power = power > splat(126.0f) ? splat(126.0f) : power;
    return gate / (exp2(power) + 1.0f) * up;
}

}  // namespace

extern "C" {

// x [rows, n], `ldx` apart -> out [rows, n] contiguous.
void tandem_rms_norm(const float* x, int64_t ldx, const float* weight, float eps, float* out, int64_t rows, int64_t n,
                     int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n >= WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) normalise(x + r * ldx, weight, eps, out + r * n, n);
}

// residual += x; x = normalised residual. Both [rows, n] contiguous.
void tandem_add_rms_norm(float* x, float* residual, const float* weight, float eps, int64_t rows, int64_t n,
                         int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n >= WORTH_THREADS)
    for (int64_t r = 0; r < rows; r++) {
        float *a = x + r * n, *s = residual + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) s[i] += a[i];
        normalise(s, weight, eps, a, n);
    }
}

// q [T, H, D], k and v [T, G, D], tokens `ld*` apart; cos and sin [positions, D / 2]; pages [num_blocks, B, G, D].
void tandem_rope_and_store(float* q, int64_t ldq, float* k, int64_t ldk, const float* v, int64_t ldv, const float* cos,
                           const float* sin, const int64_t* positions, float* k_cache, float* v_cache,
                           int64_t block_stride, const int64_t* slots, int64_t T, int64_t H, int64_t G, int64_t D,
                           int64_t B, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * (H + 2 * G) * D >= WORTH_THREADS)
    for (int64_t t = 0; t < T; t++) {
        const float *c = cos + positions[t] * (D / 2), *s = sin + positions[t] * (D / 2);
        for (int64_t h = 0; h < H; h++) rotate(q + t * ldq + h * D, c, s, D);
        for (int64_t g = 0; g < G; g++) rotate(k + t * ldk + g * D, c, s, D);
        int64_t at = slots[t] / B * block_stride + slots[t] % B * G * D;
        memcpy(k_cache + at, k + t * ldk, G * D * sizeof(float));
        memcpy(v_cache + at, v + t * ldv, G * D * sizeof(float));
    }
}

// gate_up [T, 2 * n] contiguous -> out [T, n].
void tandem_silu_and_mul(const float* gate_up, float* out, int64_t T, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * n >= WORTH_THREADS / 4)
    for (int64_t t = 0; t < T; t++) {
        const float *gate = gate_up + t * 2 * n, *up = gate + n;
        float* o = out + t * n;
        int64_t i = 0;
        for (; i + W <= n; i += W) store(o + i, silu_mul(load(gate + i), load(up + i)));
        if (i < n) {
            vf last = silu_mul(load_some(gate + i, n - i), load_some(up + i, n - i));
            memcpy(o + i, &last, (n - i) * sizeof(float));
        }
    }
}
}
