// y = x W^T + b with W packed into panels: memory-bound for few rows, a blocked GEMM for many.
//
// Packed weight: [ceil(N / NR)][K][NR], the last panel padded with zeros.
#include <algorithm>

#include "gemm.h"

namespace {

constexpr int64_t KC = 384;            // depth of a block: KC x NR weights stay in L1/L2 while the rows pass
constexpr int64_t MC = 96;             // rows of a block: MC x KC inputs stay in L2 while the panels pass
constexpr int64_t SMALL = 192 * 1024;  // bytes of x that surely stay in L2 whole

struct Linear {
    const float* x;
    int64_t ldx;
    const float* w;
    const float* bias;
    int64_t N, K;
    float* out;

    const float* block(int64_t panel, int64_t k) const { return w + (panel * K + k) * NR; }

    void write_bias(float* o, int64_t ldo, int64_t rows, int64_t n, int64_t width) const {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t j = 0; j < width; j++) o[m * ldo + j] = bias ? bias[n + j] : 0.0f;
    }

    // Rows [m0, m1) x block (panel, k0).
    void one(int64_t m0, int64_t m1, int64_t panel, int64_t k0, const float* next) const {
        int64_t depth = std::min(KC, K - k0), n = panel * NR, width = std::min<int64_t>(NR, N - n);
        const float* rows = x + m0 * ldx + k0;
        float* o = out + m0 * N + n;
        bool first = k0 == 0 && !bias;
        if (width == NR) {
            if (k0 == 0 && bias) write_bias(o, N, m1 - m0, n, NR);
            if (first)
                multiply_panel<false>(m1 - m0, rows, ldx, block(panel, k0), depth, o, N, next);
            else
                multiply_panel<true>(m1 - m0, rows, ldx, block(panel, k0), depth, o, N, next);
            return;
        }
        float edge[MC * NR];  // the last panel is wider than the output
        multiply_panel<false>(m1 - m0, rows, ldx, block(panel, k0), depth, edge, NR, next);
        if (k0 == 0) write_bias(o, N, m1 - m0, n, width);
        for (int64_t m = 0; m < m1 - m0; m++)
            for (int64_t j = 0; j < width; j++) o[m * N + j] += edge[m * NR + j];
    }

    void item(int64_t m0, int64_t m1, int64_t p0, int64_t p1) const {
        if ((m1 - m0) * K * (int64_t)sizeof(float) <= SMALL) {  // one pass through the weights as they lie
            for (int64_t p = p0; p < p1; p++)
                for (int64_t k = 0; k < K; k += KC)
                    one(m0, m1, p, k, block(p, k) + std::min(KC, K - k) * NR);
            return;
        }
        for (int64_t k = 0; k < K; k += KC)
            for (int64_t p = p0; p < p1; p++) one(m0, m1, p, k, block(p + 1, k));
    }
};

}  // namespace

extern "C" {

int64_t tandem_panel_width() { return NR; }

// weight [N, K], rows `ldw` apart -> packed.
void tandem_pack(const float* weight, int64_t ldw, int64_t N, int64_t K, float* packed, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < (N + NR - 1) / NR; panel++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t j = 0; j < NR; j++) {
                int64_t n = panel * NR + j;
                packed[(panel * K + k) * NR + j] = n < N ? weight[n * ldw + k] : 0.0f;
            }
}

// x [M, K], rows `ldx` apart; out [M, N] contiguous; bias [N] or null.
void tandem_linear(const float* x, int64_t ldx, int64_t M, const float* packed, const float* bias, int64_t N,
                   int64_t K, float* out, int threads) {
    Linear linear{x, ldx, packed, bias, N, K, out};
    int64_t panels = (N + NR - 1) / NR, blocks = (M + MC - 1) / MC;
    // Enough pieces that a thread which lost its core to another process does not hold up the others.
    int64_t group = std::clamp<int64_t>(panels * blocks / (8 * threads), 1, 16);
    if (group > 4) group -= group % 4;
    int64_t groups = (panels + group - 1) / group;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t g = 0; g < groups; g++)
            linear.item(b * M / blocks, (b + 1) * M / blocks, g * group, std::min(panels, (g + 1) * group));
}
}
