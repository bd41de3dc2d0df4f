// Vectors as wide as the target has them, and the few functions on them that C++ lacks.
// Only GCC/Clang vector extensions: the same source serves AVX-512, AVX2, SSE and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int W = 16;   // floats in a vector
constexpr int MR = 12;  // rows of the largest register tile: MR x 2 accumulators + 2 weights + broadcasts
#elif defined(__AVX__)
constexpr int W = 8;
constexpr int MR = 6;
#else
constexpr int W = 4;
constexpr int MR = sizeof(void*) == 8 ? 6 : 2;
#endif
constexpr int NR = 2 * W;  // outputs of a register tile = width of a panel

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));

// Lanes i, j, k, l of the eight of a and b; GCC before 12 has no __builtin_shufflevector.
#if defined(__clang__)
#define SHUFFLE4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE4(a, b, i, j, k, l) __builtin_shuffle(a, b, v4i{i, j, k, l})
#endif

static inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static inline vf splat(float x) { return x - vf{}; }

static inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

static inline float reduce_max(vf v) {
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
}

static inline float reduce_add(vf v) {
    float lanes[W];
    store(lanes, v);
    for (int width = W / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// 2^x to about 1 ulp for x <= 127; exactly 0 below -126, -inf included.
static inline vf exp2(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
    vf t = x + magic;
    vf r = x - (t - magic);  // in [-0.5, 0.5], exact
    vf p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    vf y = (vf)((vi)p + ((vi)t << 23));
    return select(x < splat(-126.0f), vf{}, y);
}

static inline float exp2(float x) { return exp2(splat(x))[0]; }
