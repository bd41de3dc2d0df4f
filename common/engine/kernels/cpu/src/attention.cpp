// Paged, causal, grouped-query attention over chunks of any length: decodes and prefills in one call.
//
// The context is cut into tiles of KB positions, aligned to position 0. Each tile is reduced on its own to
// (maximum, sum of exponentials, weighted values) per query row, and a row's tiles are merged from left to right.
// Whoever computes a tile, and whatever else is in the batch, a row comes out the same to the last bit: a token
// prefilled in one chunk, in three, or decoded, gets equal bits. Block size does not matter either.
//
// A work item is a block of queries of one (sequence, kv head). A sequence whose chunk is one block (a decode, most
// often) is split by tiles instead, so that one long context occupies all cores; a second phase merges. Such an item
// takes as many heads as leave work for all threads: their pages lie side by side, and memory that is read in order
// comes four times as fast as every third of its rows.
#include <algorithm>
#include <tuple>
#include <vector>

#include "gemm.h"

namespace {

constexpr int64_t KB = 128;   // positions of a tile
constexpr int64_t ROWS = 96;  // query rows of a block: tokens x query heads of the group
constexpr int64_t TOGETHER = 256 * 1024;  // bytes of a tile's keys and values that stay in L2 while its heads pass
constexpr int64_t LINE = 16;  // floats of a cache line
constexpr float LOG2E = 1.44269504088896341f;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Attention {
    const float* q;  // [T, H, D], tokens `ldq` apart
    int64_t ldq;
    const float *k_cache, *v_cache;  // [num_blocks, B, G, D], blocks `block_stride` apart
    int64_t block_stride;
    const int32_t *block_tables, *cu_seqlens, *seq_lens;  // [S, table_width], [S + 1], [S]
    int64_t table_width, S, H, G, D, B;
    float scale;
    float* out;  // [T, H, D]

    int64_t group() const { return H / G; }
    int64_t padded() const { return ceil_div(D, NR) * NR; }
    int64_t block_tokens() const { return std::max<int64_t>(1, ROWS / group()); }
    int64_t most_rows() const { return block_tokens() * group(); }
    int64_t chunk(int64_t s) const { return cu_seqlens[s + 1] - cu_seqlens[s]; }
    int64_t start(int64_t s) const { return seq_lens[s] - chunk(s); }
};

// Tokens [t0, t1) of sequence s's chunk, kv heads [g0, g1), tiles [tile0, tile1) of the context.
struct Item {
    int64_t s, g0, g1, t0, t1, tile0, tile1;
    int64_t partial;      // where the first head's slot in the partial results starts; -1: writes the output itself
    int64_t head_stride;  // from one head's slot to the next one's

    int64_t cost() const { return (g1 - g0) * (t1 - t0) * (tile1 - tile0); }
};

// What is known of each row after some tiles. A slot of partial results is laid out the same way.
struct State {
    float *max, *sum, *values;  // [rows], [rows], [rows, padded D]

    State(float* memory, int64_t rows) : max(memory), sum(memory + rows), values(memory + 2 * rows) {}
    static int64_t floats(int64_t rows, int64_t padded) { return rows * (padded + 2); }

    void clear(int64_t rows, int64_t padded) {
        std::fill_n(max, rows, -__builtin_inff());
        std::fill_n(sum, rows, 0.0f);
        std::fill_n(values, rows * padded, 0.0f);
    }

    // Joins one more tile for rows [first, rows).
    void merge(const State& tile, int64_t first, int64_t rows, int64_t padded) {
        for (int64_t row = first; row < rows; row++) {
            float top = std::max(max[row], tile.max[row]);
            float keep = exp2(max[row] - top), add = exp2(tile.max[row] - top);
            max[row] = top;
            sum[row] = sum[row] * keep + tile.sum[row] * add;
            float* v = values + row * padded;
            for (int64_t d = 0; d < padded; d += W)
                store(v + d, load(v + d) * keep + load(tile.values + row * padded + d) * add);
        }
    }
};

// One thread's working memory, kept between calls.
struct Scratch {
    float *queries, *keys, *values, *scores, *tile, *total, *zeros;

    explicit Scratch(const Attention& a) {
        int64_t rows = a.most_rows(), state = State::floats(rows, a.padded());
        int64_t sizes[] = {rows * a.D, KB * a.D, KB * a.padded(), rows * KB, state, state, a.D};
        float** fields[] = {&queries, &keys, &values, &scores, &tile, &total, &zeros};
        static thread_local std::vector<float> memory;
        int64_t needed = 16;
        for (int64_t size : sizes) needed += ceil_div(size, 16) * 16;
        if ((int64_t)memory.size() < needed) memory.resize(needed);
        float* p = (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
        for (int i = 0; i < 7; i++) {
            *fields[i] = p;
            p += ceil_div(sizes[i], 16) * 16;
        }
        std::fill_n(zeros, a.D, 0.0f);
    }
};

// rows: NR pointers to D floats -> panel [D][NR].
void transpose_into_panel(const float* const* rows, int64_t D, float* panel) {
    for (int64_t j = 0; j < NR; j += 4) {
        int64_t d = 0;
        for (; d + 4 <= D; d += 4) {
            v4 a, b, c, e;
            memcpy(&a, rows[j] + d, 16);
            memcpy(&b, rows[j + 1] + d, 16);
            memcpy(&c, rows[j + 2] + d, 16);
            memcpy(&e, rows[j + 3] + d, 16);
            v4 ab0 = SHUFFLE4(a, b, 0, 4, 1, 5), ab1 = SHUFFLE4(a, b, 2, 6, 3, 7);
            v4 ce0 = SHUFFLE4(c, e, 0, 4, 1, 5), ce1 = SHUFFLE4(c, e, 2, 6, 3, 7);
            v4 columns[4] = {
                SHUFFLE4(ab0, ce0, 0, 1, 4, 5), SHUFFLE4(ab0, ce0, 2, 3, 6, 7),
                SHUFFLE4(ab1, ce1, 0, 1, 4, 5), SHUFFLE4(ab1, ce1, 2, 3, 6, 7)};
            for (int i = 0; i < 4; i++) memcpy(panel + (d + i) * NR + j, &columns[i], 16);
        }
        for (; d < D; d++)
            for (int i = 0; i < 4; i++) panel[d * NR + j + i] = rows[j + i][d];
    }
}

struct Worker {
    const Attention& a;
    Scratch& scratch;

    // The block's queries, scaled: [rows, D], row = token * group + head of the group.
    void gather_queries(const Item& item, int64_t g) {
        float factor = a.scale * LOG2E;
        float* row = scratch.queries;
        for (int64_t t = item.t0; t < item.t1; t++) {
            const float* from = a.q + (a.cu_seqlens[item.s] + t) * a.ldq + g * a.group() * a.D;
            for (int64_t i = 0; i < a.group() * a.D; i++) *row++ = from[i] * factor;
        }
    }

    // Calls use(i, at) for positions p0 + i, i < count, of sequence s: their first head lies `at` floats into the pages.
    template <typename Use>
    void for_positions(int64_t s, int64_t p0, int64_t count, Use use) const {
        const int32_t* entry = a.block_tables + s * a.table_width + p0 / a.B;
        int64_t offset = p0 % a.B;
        for (int64_t i = 0; i < count; i++) {
            use(i, *entry * a.block_stride + offset * a.G * a.D);
            if (++offset == a.B) {
                offset = 0;
                entry++;
            }
        }
    }

    // Reads all heads' keys and values of a tile in the order in which they lie, so that they are in the cache.
    void touch_tile(const Item& item, int64_t p0, int64_t count) const {
        for (const float* pages : {a.k_cache, a.v_cache})
            for_positions(item.s, p0, count, [&](int64_t, int64_t at) {
                for (int64_t d = item.g0 * a.D; d < item.g1 * a.D; d += LINE) (void)*(const volatile float*)(pages + at + d);
            });
    }

    // Positions [p0, p0 + count): keys as panels [.][D][NR], values as panels [.][count][NR].
    void gather_tile(const Item& item, int64_t g, int64_t p0, int64_t count) {
        const float *keys[KB], *values[KB];
        for_positions(item.s, p0, count, [&](int64_t i, int64_t at) {
            keys[i] = a.k_cache + at + g * a.D;
            values[i] = a.v_cache + at + g * a.D;
        });
        for (int64_t i = count; i < ceil_div(count, NR) * NR; i++) keys[i] = scratch.zeros;
        for (int64_t i = 0; i < count; i += NR) transpose_into_panel(keys + i, a.D, scratch.keys + i * a.D);
        for (int64_t d = 0; d < a.D; d += NR) {
            int64_t width = std::min<int64_t>(NR, a.D - d);
            float* panel = scratch.values + d * count;
            for (int64_t i = 0; i < count; i++, panel += NR) {
                if (width == NR) {
                    store(panel, load(values[i] + d));
                    store(panel + W, load(values[i] + d + W));
                } else {
                    for (int64_t j = 0; j < NR; j++) panel[j] = j < width ? values[i][d + j] : 0.0f;
                }
            }
        }
    }

    // Scores of a row -> their exponentials, of which `valid` count and the rest is 0.
    static void softmax_row(float* scores, int64_t valid, int64_t count, float& max, float& sum) {
        int64_t end = ceil_div(count, W) * W;
        for (int64_t i = valid; i < end; i++) scores[i] = -__builtin_inff();
        vf top = load(scores);
        for (int64_t i = W; i < end; i += W) top = vmax(top, load(scores + i));
        max = reduce_max(top);
        vf total{};
        for (int64_t i = 0; i < end; i += W) {
            vf e = exp2(load(scores + i) - max);
            store(scores + i, e);
            total += e;
        }
        sum = reduce_add(total);
    }

    // One tile for all rows of the block that see any of it; returns the first such row.
    int64_t attend_tile(const Item& item, int64_t g, int64_t tile, State& result) {
        int64_t p0 = tile * KB, rows = (item.t1 - item.t0) * a.group();
        int64_t first_position = a.start(item.s) + item.t0;
        int64_t count = std::min(KB, first_position + (item.t1 - item.t0) - p0);
        int64_t first = std::max<int64_t>(0, p0 - first_position) * a.group();
        if (g == item.g0 && item.g1 > g + 1) touch_tile(item, p0, count);
        gather_tile(item, g, p0, count);

        const float* queries = scratch.queries + first * a.D;
        float* scores = scratch.scores + first * KB;
        for (int64_t i = 0; i < count; i += NR) {
            const float* panel = scratch.keys + i * a.D;
            multiply_panel<false>(rows - first, queries, a.D, panel, a.D, scores + i, KB, panel);
        }
        for (int64_t row = first; row < rows; row++) {
            int64_t valid = std::min(count, first_position + row / a.group() + 1 - p0);
            softmax_row(scratch.scores + row * KB, valid, count, result.max[row], result.sum[row]);
        }
        float* values = result.values + first * a.padded();
        for (int64_t d = 0; d < a.D; d += NR) {
            const float* panel = scratch.values + d * count;
            multiply_panel<false>(rows - first, scores, KB, panel, count, values + d, a.padded(), panel);
        }
        return first;
    }

    void write(const Item& item, int64_t g, const State& state) {
        int64_t rows = (item.t1 - item.t0) * a.group();
        for (int64_t row = 0; row < rows; row++) {
            int64_t token = a.cu_seqlens[item.s] + item.t0 + row / a.group();
            float* o = a.out + (token * a.H + g * a.group() + row % a.group()) * a.D;
            const float* v = state.values + row * a.padded();
            for (int64_t d = 0; d < a.D; d++) o[d] = v[d] / state.sum[row];
        }
    }

    void run(const Item& item, float* partials) {
        int64_t rows = (item.t1 - item.t0) * a.group();
        for (int64_t g = item.g0; g < item.g1; g++) {
            gather_queries(item, g);
            if (item.partial >= 0) {
                State slot(partials + item.partial + (g - item.g0) * item.head_stride, rows);
                attend_tile(item, g, item.tile0, slot);
                continue;
            }
            State tile(scratch.tile, rows), total(scratch.total, rows);
            total.clear(rows, a.padded());
            for (int64_t i = item.tile0; i < item.tile1; i++) {
                int64_t first = attend_tile(item, g, i, tile);
                total.merge(tile, first, rows, a.padded());
            }
            write(item, g, total);
        }
    }

    // `whole`, of one head, was computed as one item per tile, whose slots follow one another.
    void finish(const Item& whole, float* partials) {
        int64_t rows = (whole.t1 - whole.t0) * a.group();
        State total(scratch.total, rows);
        total.clear(rows, a.padded());
        for (int64_t i = whole.tile0; i < whole.tile1; i++) {
            State slot(partials + whole.partial + i * State::floats(rows, a.padded()), rows);
            int64_t first = std::max<int64_t>(0, i * KB - a.start(whole.s)) * a.group();
            total.merge(slot, first, rows, a.padded());
        }
        write(whole, whole.g0, total);
    }
};

struct Plan {
    std::vector<Item> items;   // independent of one another
    std::vector<Item> merges;  // after all items
    int64_t partial_floats = 0;

    Plan(const Attention& a, int threads) {
        int64_t tiles = 0;  // of sequences that are split by tiles
        for (int64_t s = 0; s < a.S; s++)
            if (a.chunk(s) <= a.block_tokens()) tiles += ceil_div(a.seq_lens[s], KB);
        int64_t fitting = TOGETHER / (2 * KB * a.D * (int64_t)sizeof(float));
        int64_t heads = std::clamp<int64_t>(std::min(fitting, tiles * a.G / threads), 1, a.G);
        for (int64_t s = 0; s < a.S; s++) {
            int64_t step = a.chunk(s) <= a.block_tokens() ? heads : 1;
            for (int64_t g = 0; g < a.G; g += step) add(a, s, g, std::min(a.G, g + step));
        }
        // Heaviest first, to end together; equal ones so that heads that lie side by side are read together.
        auto before = [](const Item& x, const Item& y) {
            if (x.cost() != y.cost()) return x.cost() > y.cost();
            return std::tie(x.s, x.tile0, x.t0, x.g0) < std::tie(y.s, y.tile0, y.t0, y.g0);
        };
        std::sort(items.begin(), items.end(), before);
    }

    void add(const Attention& a, int64_t s, int64_t g0, int64_t g1) {
        int64_t tokens = a.chunk(s), tiles = ceil_div(a.seq_lens[s], KB);
        if (tokens > a.block_tokens() || tiles == 1) {
            for (int64_t t0 = 0; t0 < tokens; t0 += a.block_tokens()) {
                int64_t t1 = std::min(tokens, t0 + a.block_tokens());
                items.push_back({s, g0, g1, t0, t1, 0, ceil_div(a.start(s) + t1, KB), -1, 0});
            }
            return;
        }
        int64_t slot = State::floats(tokens * a.group(), a.padded());
        for (int64_t i = 0; i < tiles; i++)
            items.push_back({s, g0, g1, 0, tokens, i, i + 1, partial_floats + i * slot, tiles * slot});
        for (int64_t g = g0; g < g1; g++, partial_floats += tiles * slot)
            merges.push_back({s, g, g + 1, 0, tokens, 0, tiles, partial_floats, 0});
    }
};

}  // namespace

extern "C" void tandem_paged_attention(const float* q, int64_t ldq, const float* k_cache, const float* v_cache,
                                       int64_t block_stride, const int32_t* block_tables, int64_t table_width,
                                       const int32_t* cu_seqlens, const int32_t* seq_lens, int64_t S, int64_t H,
                                       int64_t G, int64_t D, int64_t B, float scale, float* out, int threads) {
    Attention a{q, ldq, k_cache, v_cache, block_stride, block_tables, cu_seqlens, seq_lens, table_width,
                S, H,   G,       D,       B,            scale,        out};
    Plan plan(a, threads);
    std::vector<float> partials(plan.partial_floats);
    int64_t items = plan.items.size(), merges = plan.merges.size();
#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)
    {
        Scratch scratch(a);
        Worker worker{a, scratch};
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items; i++) worker.run(plan.items[i], partials.data());
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < merges; i++) worker.finish(plan.merges[i], partials.data());
    }
}
