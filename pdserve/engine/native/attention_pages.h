/* Work on pages of the KV cache as they lie; included once for each element TYPE of the cache. */

/* scores[r][j] = q[r] . k[j]: `rows`, `keys` and mostly `size` are constants where it is called. */
INLINE void NAME(dot_keys)(float *restrict scores, const float *restrict q, const TYPE *restrict k,
                           int rows, int keys, int64_t size) {
    vec sums[4][4] = {0};
    for (int64_t i = 0; i < size; i += LANES)
        for (int j = 0; j < keys; j++) {
            vec key = LOAD_VEC(k + j * size + i);
            for (int r = 0; r < rows; r++) sums[r][j] += load_vec_f32(q + r * size + i) * key;
        }
    for (int r = 0; r < rows; r++) {
        float *to = scores + r * KEYS;
        if (keys == 4)
            store_sums(to, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        else
            to[0] = sum_of(sums[r][0]);
    }
}

INLINE void NAME(dot_rows)(float *restrict scores, const float *restrict q, const TYPE *restrict k,
                           int64_t n, int rows, int64_t size) {
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) NAME(dot_keys)(scores + j, q, k + j * size, rows, 4, size);
    for (; j < n; j++) NAME(dot_keys)(scores + j, q, k + j * size, rows, 1, size);
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
INLINE void NAME(score_run)(const struct tile *tile, int64_t column, const TYPE *k, int64_t n,
                            int64_t size) {
    for (int64_t r = 0; r < tile->rows; r += 4) {
        float *scores = tile->scores + r * KEYS + column;
        const float *q = tile->q + r * size;
        switch (tile->rows - r) {
            case 1: NAME(dot_rows)(scores, q, k, n, 1, size); break;
            case 2: NAME(dot_rows)(scores, q, k, n, 2, size); break;
            case 3: NAME(dot_rows)(scores, q, k, n, 3, size); break;
            default: NAME(dot_rows)(scores, q, k, n, 4, size);
        }
    }
}

INLINE void NAME(mix_run)(const struct tile *tile, int64_t column, const TYPE *v, int64_t n,
                          int64_t size) {
    for (int64_t r = 0; r < tile->rows; r += 4) {
        float *out = tile->out + r * size;
        const float *weights = tile->scores + r * KEYS + column;
        switch (tile->rows - r) {
            case 1: NAME(mix_rows)(out, weights, v, n, 1, size); break;
            case 2: NAME(mix_rows)(out, weights, v, n, 2, size); break;
            case 3: NAME(mix_rows)(out, weights, v, n, 3, size); break;
            default: NAME(mix_rows)(out, weights, v, n, 4, size);
        }
    }
}

/* K of the page that holds the position; `offset`: of the head and layer. */
INLINE const TYPE *NAME(page_at)(const struct plan *plan, int64_t chunk, int64_t offset,
                                 int64_t position) {
    return (const TYPE *)plan->kv + offset + key_offset(plan, chunk, position);
}

/* Positions from `at` on that lie in one page, and before `end`. */
INLINE int64_t NAME(run_at)(const struct plan *plan, int64_t at, int64_t end) {
    return smaller(plan->block_size - at % plan->block_size, end - at);
}

/* Attends to all positions that the tile sees, KEYS at a time, page by page where they lie. */
INLINE void NAME(attend_sized)(const struct plan *plan, struct tile *tile, int64_t chunk,
                               int64_t offset, int64_t size) {
    int64_t v_offset = plan->block_size * size, n;
    for (int64_t at = larger(0, tile->first + 1 - plan->window); at < tile->end; at += KEYS) {
        int64_t end = smaller(at + KEYS, tile->end);
        for (int64_t p = at; p < end; p += n) {
            n = NAME(run_at)(plan, p, end);
            NAME(score_run)(tile, p - at, NAME(page_at)(plan, chunk, offset, p), n, size);
        }
        absorb(plan, tile, at, end - at);
        for (int64_t p = at; p < end; p += n) {
            n = NAME(run_at)(plan, p, end);
            NAME(mix_run)(tile, p - at, NAME(page_at)(plan, chunk, offset, p) + v_offset, n, size);
        }
    }
}

static void NAME(attend_pages)(const struct plan *plan, struct tile *tile, int64_t chunk,
                               int64_t offset) {
    switch (plan->head_size) { /* a constant where that is common */
        case 64: NAME(attend_sized)(plan, tile, chunk, offset, 64); break;
        case 128: NAME(attend_sized)(plan, tile, chunk, offset, 128); break;
        default: NAME(attend_sized)(plan, tile, chunk, offset, plan->head_size);
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
