/* Small matrix products in float32, blocked for the registers. */
#pragma once

#include "numbers.h"

#if LANES == 16
#define BLOCK_ROWS 6
#define BLOCK_VECS 4
#else
#define BLOCK_ROWS 4
#define BLOCK_VECS 2
#endif

/* c [rows, vecs * LANES] (+)= a [rows, depth] . b [depth, vecs * LANES] */
INLINE void multiply_block(float *restrict c, int64_t ldc, const float *restrict a, int64_t lda,
                           const float *restrict b, int64_t ldb, int64_t depth, int rows, int vecs,
                           int add) {
    vec sums[BLOCK_ROWS][BLOCK_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            sums[r][v] = add ? load_vec_f32(c + r * ldc + v * LANES) : (vec){0};
    for (int64_t d = 0; d < depth; d++) {
        vec row[BLOCK_VECS];
        for (int v = 0; v < vecs; v++) row[v] = load_vec_f32(b + d * ldb + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) sums[r][v] += a[r * lda + d] * row[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store_vec(c + r * ldc + v * LANES, sums[r][v]);
}

INLINE void multiply_rows(float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                          int64_t ldb, int64_t depth, int64_t num_rows, int vecs, int add) {
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= num_rows; r += BLOCK_ROWS)
        multiply_block(c + r * ldc, ldc, a + r * lda, lda, b, ldb, depth, BLOCK_ROWS, vecs, add);
    for (; r < num_rows; r++)
        multiply_block(c + r * ldc, ldc, a + r * lda, lda, b, ldb, depth, 1, vecs, add);
}

/* c [num_rows, columns] (+)= a [num_rows, depth] . b [depth, columns]; columns divide by LANES. */
INLINE void multiply(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb,
                     int64_t depth, int64_t num_rows, int64_t columns, int add) {
    int64_t i = 0;
    for (; i + BLOCK_VECS * LANES <= columns; i += BLOCK_VECS * LANES)
        multiply_rows(c + i, ldc, a, lda, b + i, ldb, depth, num_rows, BLOCK_VECS, add);
    for (; i < columns; i += LANES)
        multiply_rows(c + i, ldc, a, lda, b + i, ldb, depth, num_rows, 1, add);
}
