/* Included once for each element TYPE. Sizes and strides count elements. */

static void NAME(normalise)(TYPE *restrict out, const TYPE *restrict x,
                            const TYPE *restrict weight, int64_t n, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += LOAD(x[i]) * LOAD(x[i]);
    float scale = 1.0f / __builtin_sqrtf(squares / (float)n + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = STORE(LOAD(x[i]) * scale * LOAD(weight[i]));
}

/* out [rows, heads, n] contiguous; x strided in rows and heads. */
void NAME(pd_rms_norm)(TYPE *out, const TYPE *x, const TYPE *weight, int64_t rows, int64_t heads,
                       int64_t row_stride, int64_t head_stride, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * heads * n > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            NAME(normalise)(out + (r * heads + h) * n, x + r * row_stride + h * head_stride, weight,
                            n, eps);
}

/* residual += x; out = norm(residual). All [rows, n], contiguous. */
void NAME(pd_add_rms_norm)(TYPE *out, const TYPE *x, TYPE *residual, const TYPE *weight,
                           int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const TYPE *restrict added = x + r * n;
        TYPE *restrict stream = residual + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) stream[i] = STORE(LOAD(stream[i]) + LOAD(added[i]));
        NAME(normalise)(out + r * n, stream, weight, n, eps);
    }
}

/* gate_up [rows, 2n] -> out [rows, n]. */
void NAME(pd_silu_mul)(TYPE *out, const TYPE *gate_up, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_FROM / 4)
    for (int64_t r = 0; r < rows; r++) {
        const TYPE *restrict gate = gate_up + r * 2 * n, *restrict up = gate + n;
        TYPE *restrict to = out + r * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float g = LOAD(gate[i]);
            to[i] = STORE(g / (1.0f + fast_exp(-g)) * LOAD(up[i]));
        }
    }
}

static void NAME(rotate_heads)(TYPE *x, int64_t heads, int64_t n, const float *restrict cosines) {
    int64_t half = n / 2;
    const float *restrict sines = cosines + half;
    for (int64_t h = 0; h < heads; h++) {
        TYPE *restrict left = x + h * n, *restrict right = left + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float a = LOAD(left[i]), b = LOAD(right[i]);
            left[i] = STORE(a * cosines[i] - b * sines[i]);
            right[i] = STORE(b * cosines[i] + a * sines[i]);
        }
    }
}

/* Rotates q and k [rows, heads, n] in place; heads are contiguous, rows strided. */
void NAME(pd_rotate)(TYPE *q, TYPE *k, const int64_t *positions, const float *table, int64_t rows,
                     int64_t q_heads, int64_t k_heads, int64_t q_stride, int64_t k_stride,
                     int64_t n) {
#pragma omp parallel for schedule(static) if (rows * (q_heads + k_heads) * n > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        NAME(rotate_heads)(q + r * q_stride, q_heads, n, table + positions[r] * n);
        NAME(rotate_heads)(k + r * k_stride, k_heads, n, table + positions[r] * n);
    }
}

#undef TYPE
#undef NAME
#undef LOAD
#undef STORE
