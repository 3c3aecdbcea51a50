/* Work on pages of the KV cache as they lie; included once for each element TYPE of the cache. */

/* scores[r][j] = q[r] . k[j]: `rows` and `size` are constants where this is called. */
INLINE void NAME(dot_rows)(float *restrict scores, const float *restrict q, const TYPE *restrict k,
                           int64_t n, int rows, int64_t size) {
    for (int64_t j = 0; j < n; j++) {
        vec sums[4] = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            vec key = LOAD_VEC(k + j * size + i);
            for (int r = 0; r < rows; r++) sums[r] += load_vec_f32(q + r * size + i) * key;
        }
        for (int r = 0; r < rows; r++) scores[r * KEYS + j] = sum_of(sums[r]);
    }
}

/* out[r] += sum of weights[r][j] * v[j], `vecs` vectors of columns at once. */
INLINE void NAME(mix_columns)(float *restrict out, const float *restrict weights,
                              const TYPE *restrict v, int64_t n, int rows, int vecs, int64_t size) {
    vec sums[4][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) sums[r][c] = load_vec_f32(out + r * size + c * LANES);
    for (int64_t j = 0; j < n; j++)
        for (int c = 0; c < vecs; c++) {
            vec value = LOAD_VEC(v + j * size + c * LANES);
            for (int r = 0; r < rows; r++) sums[r][c] += weights[r * KEYS + j] * value;
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) store_vec(out + r * size + c * LANES, sums[r][c]);
}

INLINE void NAME(mix_rows)(float *restrict out, const float *restrict weights,
                           const TYPE *restrict v, int64_t n, int rows, int64_t size) {
    int64_t i = 0;
    for (; i + MIX_VECS * LANES <= size; i += MIX_VECS * LANES)
        NAME(mix_columns)(out + i, weights, v + i, n, rows, MIX_VECS, size);
    for (; i < size; i += LANES) NAME(mix_columns)(out + i, weights, v + i, n, rows, 1, size);
}

/* Four rows at a time, so that they stay in registers; `size` is a constant for common head sizes. */
INLINE void NAME(score_run)(const struct tile *tile, const TYPE *k, int64_t n, int64_t size) {
    for (int64_t r = 0; r < tile->rows; r += 4) {
        float *scores = tile->scores + r * KEYS;
        const float *q = tile->q + r * size;
        switch (tile->rows - r) {
            case 1: NAME(dot_rows)(scores, q, k, n, 1, size); break;
            case 2: NAME(dot_rows)(scores, q, k, n, 2, size); break;
            case 3: NAME(dot_rows)(scores, q, k, n, 3, size); break;
            default: NAME(dot_rows)(scores, q, k, n, 4, size);
        }
    }
}

INLINE void NAME(mix_run)(const struct tile *tile, const TYPE *v, int64_t n, int64_t size) {
    for (int64_t r = 0; r < tile->rows; r += 4) {
        float *out = tile->out + r * size;
        const float *weights = tile->scores + r * KEYS;
        switch (tile->rows - r) {
            case 1: NAME(mix_rows)(out, weights, v, n, 1, size); break;
            case 2: NAME(mix_rows)(out, weights, v, n, 2, size); break;
            case 3: NAME(mix_rows)(out, weights, v, n, 3, size); break;
            default: NAME(mix_rows)(out, weights, v, n, 4, size);
        }
    }
}

/* Pages lie anywhere in memory: no hardware prefetcher knows the next one. */
INLINE void NAME(prefetch)(const TYPE *page, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / sizeof(TYPE)) __builtin_prefetch(page + i);
}

/* Attends to all positions that the tile sees, page by page. `offset`: of the head and layer. */
static void NAME(attend_pages)(const struct plan *plan, struct tile *tile, int64_t chunk,
                               int64_t offset) {
    int64_t size = plan->head_size, block_size = plan->block_size, n;
    for (int64_t at = larger(0, tile->first + 1 - plan->window); at < tile->end; at += n) {
        n = smaller(smaller(block_size - at % block_size, tile->end - at), KEYS);
        const TYPE *k = (const TYPE *)plan->kv + offset + key_offset(plan, chunk, at);
        const TYPE *v = k + block_size * size;
        int64_t after = at + n < tile->end ? at + n : at;
        const TYPE *next = (const TYPE *)plan->kv + offset + key_offset(plan, chunk, after);
        NAME(prefetch)(next, n * size);
        switch (size) {
            case 64: NAME(score_run)(tile, k, n, 64); break;
            case 128: NAME(score_run)(tile, k, n, 128); break;
            default: NAME(score_run)(tile, k, n, size);
        }
        absorb(plan, tile, at, n);
        NAME(prefetch)(next + block_size * size, n * size);
        switch (size) {
            case 64: NAME(mix_run)(tile, v, n, 64); break;
            case 128: NAME(mix_run)(tile, v, n, 128); break;
            default: NAME(mix_run)(tile, v, n, size);
        }
    }
}

/* Widens KEYS positions from `first` on: keys [D, KEYS], values [KEYS, D]; zeros from `end` on. */
static void NAME(widen)(const struct plan *plan, int64_t chunk, int64_t offset, int64_t first,
                        int64_t end, float *restrict keys, float *restrict values) {
    int64_t size = plan->head_size;
    for (int64_t j = 0; j < KEYS; j++) {
        if (first + j >= end) {
            for (int64_t i = 0; i < size; i++) keys[i * KEYS + j] = values[j * size + i] = 0;
            continue;
        }
        const TYPE *k = (const TYPE *)plan->kv + offset + key_offset(plan, chunk, first + j);
        const TYPE *v = k + plan->block_size * size;
        for (int64_t i = 0; i < size; i++) keys[i * KEYS + j] = LOAD(k[i]);
        for (int64_t i = 0; i < size; i++) values[j * size + i] = LOAD(v[i]);
    }
}

static void NAME(write_token)(const struct plan *plan, const struct rows *rows, int64_t layer,
                              int64_t token) {
    int64_t size = plan->head_size;
    for (int64_t h = 0; h < plan->num_kv_heads; h++) {
        TYPE *k = (TYPE *)plan->kv + plan->pages[token] + h * plan->head_stride +
                  layer * plan->layer_stride;
        TYPE *v = k + plan->block_size * size;
        int64_t from_k = token * rows->k_stride + h * size;
        int64_t from_v = token * rows->v_stride + h * size;
        if (plan->x_is_bf16) {
            const bf16 *x = rows->k, *y = rows->v;
            for (int64_t i = 0; i < size; i++) k[i] = STORE(load_bf16(x[from_k + i]));
            for (int64_t i = 0; i < size; i++) v[i] = STORE(load_bf16(y[from_v + i]));
        } else {
            const float *x = rows->k, *y = rows->v;
            for (int64_t i = 0; i < size; i++) k[i] = STORE(x[from_k + i]);
            for (int64_t i = 0; i < size; i++) v[i] = STORE(y[from_v + i]);
        }
    }
}

#undef TYPE
#undef NAME
#undef LOAD
#undef LOAD_VEC
#undef STORE
