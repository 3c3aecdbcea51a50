/* A long chunk's context, copied from its pages into tiles of KEYS positions that all query tiles
 * share, and the products of a tile of queries with one of them.
 *
 * A context tile has its keys transposed, [D, KEYS], then its values, [KEYS, D]: as floats, or where
 * the processor multiplies bf16 and everything is bf16, as pairs along the summed dimension.
 */
#pragma once

#include "attention_plan.h"
#include "attention_tile.h"
#include "numbers.h"

#if LANES == 16
#define BLOCK_ROWS 6
#define BLOCK_VECS 4
#else
#define BLOCK_ROWS 4
#define BLOCK_VECS 2
#endif

#define OPERAND float
#define OPERAND_VEC unaligned_vec
#define NAME(name) name##_floats
#define MULTIPLY_ADD(sum, a, b) ((sum) + (a) * (b))
#include "attention_matmul.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#define OPERAND uint32_t
#define OPERAND_VEC unaligned_words
#define NAME(name) name##_pairs
#define MULTIPLY_ADD(sum, a, b) \
    (vec) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32(a), (__m512bh)(b))
#include "attention_matmul.h"
#endif

static inline int uses_pairs(const struct plan *plan) {
#ifdef __AVX512BF16__
    return plan->kv_is_bf16 && plan->x_is_bf16;
#else
    return 0;
#endif
}

static inline float *context_tile(const struct plan *plan, int64_t num_tiles, int64_t head,
                                  int64_t index) {
    return plan->context + (head * num_tiles + index) * 2 * KEYS * plan->head_size;
}

#ifdef __AVX512BF16__
/* Two neighbouring elements of K are a pair as they lie; V's pairs are of neighbouring positions. */
static void pair_up(const struct plan *plan, int64_t chunk, int64_t offset, int64_t first,
                    int64_t end, uint32_t *restrict keys, uint32_t *restrict values) {
    int64_t size = plan->head_size;
    for (int64_t j = 0; j < KEYS; j++) {
        if (first + j >= end) {
            for (int64_t i = 0; i < size / 2; i++) keys[i * KEYS + j] = 0;
            if (j % 2 == 0) memset(values + j / 2 * size, 0, size * sizeof *values);
            continue;
        }
        const bf16 *k = page_at_bf16(plan, chunk, offset, first + j);
        const bf16 *v = k + plan->block_size * size;
        for (int64_t i = 0; i < size / 2; i++) memcpy(keys + i * KEYS + j, k + 2 * i, sizeof *keys);
        uint32_t *pairs = values + j / 2 * size;
        if (j % 2 == 0)
            for (int64_t i = 0; i < size; i++) pairs[i] = v[i];
        else
            for (int64_t i = 0; i < size; i++) pairs[i] |= (uint32_t)v[i] << 16;
    }
}

/* Weights [rows, KEYS] become bf16 where they stand. */
static void narrow_weights(const struct tile *tile) {
    for (int64_t r = 0; r < tile->rows; r++) {
        float *row = tile->scores + r * KEYS;
        for (int64_t j = 0; j < KEYS; j += LANES) {
            __m256bh narrow = _mm512_cvtneps_pbh((__m512)load_vec_f32(row + j));
            memcpy((bf16 *)row + j, &narrow, sizeof narrow);
        }
    }
}
#endif

/* Copies the positions KEYS * index .. of a chunk that ends at `end`; zeros behind it. */
static void fill_context(const struct plan *plan, int64_t chunk, int64_t offset, int64_t index,
                         int64_t end, float *context) {
    int64_t first = index * KEYS, half = KEYS * plan->head_size;
#ifdef __AVX512BF16__
    if (uses_pairs(plan)) {
        uint32_t *keys = (uint32_t *)context;
        pair_up(plan, chunk, offset, first, end, keys, keys + half / 2);
        return;
    }
#endif
    if (plan->kv_is_bf16)
        widen_bf16(plan, chunk, offset, first, end, context, context + half);
    else
        widen_f32(plan, chunk, offset, first, end, context, context + half);
}

/* Attends a tile of queries to a tile of context whose first position is `first`. */
static void attend_context(const struct plan *plan, struct tile *tile, int64_t first,
                           const float *context) {
    int64_t size = plan->head_size, rows = tile->rows;
#ifdef __AVX512BF16__
    if (uses_pairs(plan)) {
        const uint32_t *keys = (const uint32_t *)context, *values = keys + KEYS * size / 2;
        const uint32_t *q = (const uint32_t *)tile->q, *weights = (const uint32_t *)tile->scores;
        multiply_pairs(tile->scores, KEYS, q, size / 2, keys, KEYS, size / 2, rows, KEYS, 0);
        absorb(plan, tile, first, KEYS);
        narrow_weights(tile);
        multiply_pairs(tile->out, size, weights, KEYS, values, size, KEYS / 2, rows, size, 1);
        return;
    }
#endif
    const float *values = context + KEYS * size;
    multiply_floats(tile->scores, KEYS, tile->q, size, context, KEYS, size, rows, KEYS, 0);
    absorb(plan, tile, first, KEYS);
    multiply_floats(tile->out, size, tile->scores, KEYS, values, size, KEYS, rows, size, 1);
}
