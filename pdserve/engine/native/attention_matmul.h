/* c [rows, columns] (+)= a [rows, depth] . b [depth, columns], blocked for the registers. Included
 * once for each kind of OPERAND: floats, or pairs of bf16 whose depth counts pairs. */

/* One block; `rows` and `vecs` are constants where it is called. */
INLINE void NAME(multiply_block)(float *restrict c, int64_t ldc, const OPERAND *restrict a,
                                 int64_t lda, const OPERAND *restrict b, int64_t ldb,
                                 int64_t depth, int rows, int vecs, int add) {
    vec sums[BLOCK_ROWS][BLOCK_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            sums[r][v] = add ? load_vec_f32(c + r * ldc + v * LANES) : (vec){0};
    for (int64_t d = 0; d < depth; d++)
        for (int v = 0; v < vecs; v++) {
            OPERAND_VEC row = *(const OPERAND_VEC *)(b + d * ldb + v * LANES);
            for (int r = 0; r < rows; r++)
                sums[r][v] = MULTIPLY_ADD(sums[r][v], a[r * lda + d], row);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store_vec(c + r * ldc + v * LANES, sums[r][v]);
}

INLINE void NAME(multiply_rows)(float *c, int64_t ldc, const OPERAND *a, int64_t lda,
                                const OPERAND *b, int64_t ldb, int64_t depth, int64_t num_rows,
                                int vecs, int add) {
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= num_rows; r += BLOCK_ROWS)
        NAME(multiply_block)(c + r * ldc, ldc, a + r * lda, lda, b, ldb, depth, BLOCK_ROWS, vecs, add);
    for (; r < num_rows; r++)
        NAME(multiply_block)(c + r * ldc, ldc, a + r * lda, lda, b, ldb, depth, 1, vecs, add);
}

/* Columns divide by LANES. */
INLINE void NAME(multiply)(float *c, int64_t ldc, const OPERAND *a, int64_t lda, const OPERAND *b,
                           int64_t ldb, int64_t depth, int64_t num_rows, int64_t columns, int add) {
    int64_t i = 0;
    for (; i + BLOCK_VECS * LANES <= columns; i += BLOCK_VECS * LANES)
        NAME(multiply_rows)(c + i, ldc, a, lda, b + i, ldb, depth, num_rows, BLOCK_VECS, add);
    for (; i < columns; i += LANES)
        NAME(multiply_rows)(c + i, ldc, a, lda, b + i, ldb, depth, num_rows, 1, add);
}

#undef OPERAND
#undef OPERAND_VEC
#undef NAME
#undef MULTIPLY_ADD
