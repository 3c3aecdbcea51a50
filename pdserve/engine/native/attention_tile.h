/* A tile of query rows with its running softmax, and rows on their way in and out.
 *
 * A tile has the queries of one KV head: rows go token by token, within one head by head of the group.
 */
#pragma once

#include <omp.h>

#include "attention_plan.h"
#include "numbers.h"

#define MASKED -1e30f
#define NO_MAXIMUM -1e20f /* above MASKED: what a row sees of masked scores weighs nothing */

#define KEYS 64           /* positions that are worked on at once */
#define MAX_ROWS 192      /* query rows of a tile; one token's group of heads may be more */
#define MAX_SHORT_ROWS 32 /* rows of a short chunk; one token is always short */

struct tile {
    float *q, *out;         /* [rows, D]; out is not yet divided by the sums */
    float *scores;          /* [rows, KEYS], then weights */
    float *maxima, *sums;   /* [rows] */
    int64_t rows, group;    /* group: rows of one token */
    int64_t token;          /* of the first row, in q and out */
    int64_t column;         /* of the first head, in q and out */
    int64_t first, end;     /* positions of the first token and behind the last */
};

/* Floats of one thread's tile. */
static inline int64_t tile_floats(const struct plan *plan) {
    int64_t most = larger(MAX_ROWS, plan->num_heads / plan->num_kv_heads);
    return most * (2 * plan->head_size + KEYS + 2);
}

static void read_row(float *to, const void *from, int64_t offset, int64_t n, int64_t is_bf16) {
    if (is_bf16) {
        const bf16 *x = (const bf16 *)from + offset;
        for (int64_t i = 0; i < n; i++) to[i] = load_bf16(x[i]);
    } else {
        memcpy(to, (const float *)from + offset, n * sizeof(float));
    }
}

static void write_row(void *to, int64_t offset, const float *from, int64_t n, int64_t is_bf16,
                      float scale) {
    if (is_bf16) {
        bf16 *x = (bf16 *)to + offset;
        for (int64_t i = 0; i < n; i++) x[i] = store_bf16(from[i] * scale);
    } else {
        float *x = (float *)to + offset;
        for (int64_t i = 0; i < n; i++) x[i] = from[i] * scale;
    }
}

/* The queries of `length` tokens of a chunk, from its token `skip` on, in this thread's memory.
 * They stay bf16 where `narrow` is set. */
static struct tile start_tile(const struct plan *plan, const struct rows *rows, int64_t chunk,
                              int64_t head, int64_t skip, int64_t length, int narrow) {
    int64_t size = plan->head_size, group = plan->num_heads / plan->num_kv_heads;
    int64_t most = larger(MAX_ROWS, group), first = plan->starts[chunk] + skip;
    struct tile tile = {.rows = length * group, .group = group, .first = first};
    tile.end = first + length;
    tile.token = plan->first_tokens[chunk] + skip;
    tile.column = head * group * size;
    tile.q = plan->workspace + omp_get_thread_num() * tile_floats(plan);
    tile.out = tile.q + most * size;
    tile.scores = tile.out + most * size;
    tile.maxima = tile.scores + most * KEYS;
    tile.sums = tile.maxima + most;
    for (int64_t t = 0; t < length; t++) {
        int64_t from = (tile.token + t) * rows->q_stride + tile.column, to = t * group * size;
        if (narrow)
            memcpy((bf16 *)tile.q + to, (const bf16 *)rows->q + from, group * size * sizeof(bf16));
        else
            read_row(tile.q + to, rows->q, from, group * size, plan->x_is_bf16);
    }
    memset(tile.out, 0, tile.rows * size * sizeof(float));
    for (int64_t r = 0; r < tile.rows; r++) {
        tile.maxima[r] = NO_MAXIMUM;
        tile.sums[r] = 0;
    }
    return tile;
}

static void finish_tile(const struct plan *plan, const struct rows *rows, const struct tile *tile) {
    int64_t size = plan->head_size, width = plan->num_heads * size;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t row = (tile->token + r / tile->group) * width + tile->column;
        write_row(rows->out, row + r % tile->group * size, tile->out + r * size, size,
                  plan->x_is_bf16, 1.0f / tile->sums[r]);
    }
}

/* The products of queries with n keys from position `first` on are there: mask them, make them weights
 * of the running softmax, and scale what was summed before to the new maximum. */
INLINE void absorb(const struct plan *plan, struct tile *tile, int64_t first, int64_t n) {
    int64_t size = plan->head_size;
    float scale = plan->scale * 1.44269504f; /* log2(e): weights are powers of two */
    for (int64_t r = 0; r < tile->rows; r++) {
        float *restrict scores = tile->scores + r * KEYS, *restrict out = tile->out + r * size;
        int64_t position = tile->first + r / tile->group;
        for (int64_t j = larger(0, position + 1 - first); j < n; j++) scores[j] = MASKED;
        for (int64_t j = 0; j < smaller(n, position + 1 - plan->window - first); j++)
            scores[j] = MASKED;
        float old = tile->maxima[r], top = old, total = 0;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < n; j++) top = scores[j] > top ? scores[j] : top;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < n; j++) {
            scores[j] = fast_exp2((scores[j] - top) * scale);
            total += scores[j];
        }
        if (top != old) {
            float shrink = fast_exp2((old - top) * scale);
            tile->maxima[r] = top;
            tile->sums[r] *= shrink;
            for (int64_t i = 0; i < size; i++) out[i] *= shrink;
        }
        tile->sums[r] += total;
    }
}
