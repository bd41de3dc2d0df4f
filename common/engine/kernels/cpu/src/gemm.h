// The register tile that both the linear layers and attention are made of.
//
// A panel is NR outputs wide: [K][NR], so that step k reads NR neighbours. Each output is one chain of
// fused multiply-adds over k = 0, 1, 2, ...: its value does not depend on the number of rows, on the tile
// it fell into, or on the thread, which is what makes a row's result the same in every batch.
#pragma once

#include "simd.h"

// out[m][j] (+)= sum over k < depth of x[m][k] * w[k][j], for ROWS rows and one panel.
// `prefetch` walks through memory that is wanted next, `stride` bytes a step.
template <int ROWS, bool ACCUMULATE>
static inline void tile(const float* x, int64_t ldx, const float* w, int64_t depth, float* out, int64_t ldo,
                        const char* prefetch, int64_t stride) {
    vf acc[ROWS][2] = {};
    for (int64_t k = 0; k < depth; k++) {
        __builtin_prefetch(prefetch);
        prefetch += stride;
        vf w0 = load(w + k * NR), w1 = load(w + k * NR + W);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            vf s = splat(x[m * ldx + k]);
            acc[m][0] += s * w0;
            acc[m][1] += s * w1;
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        float* o = out + m * ldo;
        store(o, ACCUMULATE ? load(o) + acc[m][0] : acc[m][0]);
        store(o + W, ACCUMULATE ? load(o + W) + acc[m][1] : acc[m][1]);
    }
}

// `rows` <= MR rows against one panel.
template <bool ACCUMULATE, int ROWS = MR>
static inline void tile_rows(int rows, const float* x, int64_t ldx, const float* w, int64_t depth, float* out,
                             int64_t ldo, const char* prefetch, int64_t stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<ROWS, ACCUMULATE>(x, ldx, w, depth, out, ldo, prefetch, stride);
        else
            tile_rows<ACCUMULATE, ROWS - 1>(rows, x, ldx, w, depth, out, ldo, prefetch, stride);
    }
}

// Any number of rows against one panel, in tiles of nearly equal height; meanwhile `next` (depth * NR floats) is
// brought into the cache.
template <bool ACCUMULATE>
static void multiply_panel(int64_t rows, const float* x, int64_t ldx, const float* w, int64_t depth, float* out,
                           int64_t ldo, const float* next) {
    int64_t tiles = (rows + MR - 1) / MR;
    int64_t stride = (int64_t)sizeof(float) * NR / tiles;
    const char* prefetch = (const char*)next;
    for (int64_t t = 0, m = 0; t < tiles; t++) {
        int height = (int)((rows - m + tiles - t - 1) / (tiles - t));
        tile_rows<ACCUMULATE>(height, x + m * ldx, ldx, w, depth, out + m * ldo, ldo, prefetch, stride);
        prefetch += stride * depth;
        m += height;
    }
}
