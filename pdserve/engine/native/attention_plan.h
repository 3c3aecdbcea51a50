/* One step's attention over the paged KV cache: what the Python side plans and hands over. */
#pragma once

#include <stdint.h>

/* Mirrored field by field in attention/cpu_paged.py. Strides and offsets count elements. */
struct plan {
    void *kv; /* [N, Hkv, L, 2, B, D] */
    int64_t block_stride, head_stride, layer_stride; /* V lies block_size * head_size behind K */
    int64_t block_size, num_heads, num_kv_heads, head_size;
    int64_t window;                /* a token sees so many positions, itself included */
    int64_t kv_is_bf16, x_is_bf16; /* element types of the cache, and of q, k, v and out */
    int64_t num_tokens, num_chunks, num_short; /* short chunks come before long ones */
    const int64_t *starts, *lengths;           /* [num_chunks] */
    const int64_t *first_tokens;               /* [num_chunks] first row in q, k, v and out */
    const int64_t *table_rows;                 /* [num_chunks] row of the block tables */
    const int32_t *tables;                     /* [.., table_stride] block tables */
    int64_t table_stride;
    const int64_t *pages; /* [num_tokens] offset of each token's K of head 0, layer 0 */
    float *context;       /* pd_context_floats of the longest long chunk */
    float *workspace;     /* pd_workspace_floats for each of num_threads */
    int64_t num_threads;
    float scale;
};

/* One layer's input and output; rows of contiguous heads. */
struct rows {
    const void *q, *k, *v; /* [num_tokens, heads, D], rows so many elements apart */
    void *out;             /* [num_tokens, num_heads * D], contiguous */
    int64_t q_stride, k_stride, v_stride;
};

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where K of one position of a sequence lies, for KV head 0 of layer 0. */
static inline int64_t key_offset(const struct plan *plan, int64_t chunk, int64_t position) {
    const int32_t *table = plan->tables + plan->table_rows[chunk] * plan->table_stride;
    int64_t block = table[position / plan->block_size]; /* 64 bits before it is multiplied */
    return block * plan->block_stride + position % plan->block_size * plan->head_size;
}
