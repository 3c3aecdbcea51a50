/* Attention over the paged KV cache on CPU; attention/sdpa.py computes the same in plain torch.
 *
 * Short chunks (decode) read their pages in place, one task for each sequence and KV head. Long
 * chunks (prefill) widen their context into tiles first, keys transposed, which all tiles of queries
 * share. Both keep a running maximum and sum, so that no row of scores is ever whole; sums are
 * float32. One parallel region a call.
 */

#include "attention_plan.h"
#include "attention_tile.h"
#include "numbers.h"

#if LANES == 16
#define MIX_VECS 4
#else
#define MIX_VECS 2
#endif

#define TYPE float
#define NAME(name) name##_f32
#define LOAD load_f32
#define LOAD_VEC load_vec_f32
#define STORE store_f32
#include "attention_pages.h"

#define TYPE bf16
#define NAME(name) name##_bf16
#define LOAD load_bf16
#define LOAD_VEC load_vec_bf16
#define STORE store_bf16
#include "attention_pages.h"

#include "attention_context.h" /* needs the functions over pages */

/* Floats of one thread's workspace, and of the widened context of a chunk that ends at `end`. */
int64_t pd_workspace_floats(const struct plan *plan) { return tile_floats(plan); }

int64_t pd_context_floats(const struct plan *plan, int64_t end) {
    return plan->num_kv_heads * ((end + KEYS - 1) / KEYS) * 2 * KEYS * plan->head_size;
}

/* Whether a chunk of that many tokens reads its pages in place. */
int64_t pd_is_short(const struct plan *plan, int64_t length) {
    return length == 1 || length * (plan->num_heads / plan->num_kv_heads) <= MAX_SHORT_ROWS;
}

static void attend_short(const struct plan *plan, const struct rows *rows, int64_t layer,
                         int64_t chunk, int64_t head) {
    int64_t offset = head * plan->head_stride + layer * plan->layer_stride;
    struct tile tile = start_tile(plan, rows, chunk, head, 0, plan->lengths[chunk], 0);
    if (plan->kv_is_bf16)
        attend_pages_bf16(plan, &tile, chunk, offset);
    else
        attend_pages_f32(plan, &tile, chunk, offset);
    finish_tile(plan, rows, &tile);
}

static void attend_tile(const struct plan *plan, const struct rows *rows, int64_t chunk,
                        int64_t head, int64_t skip, int64_t length, int64_t num_tiles) {
    struct tile tile = start_tile(plan, rows, chunk, head, skip, length, uses_pairs(plan));
    for (int64_t t = larger(0, tile.first + 1 - plan->window) / KEYS; t * KEYS < tile.end; t++)
        attend_context(plan, &tile, t * KEYS, context_tile(plan, num_tiles, head, t));
    finish_tile(plan, rows, &tile);
}

/* All threads of the region come here together. */
static void attend_long(const struct plan *plan, const struct rows *rows, int64_t layer,
                        int64_t chunk) {
    int64_t heads = plan->num_kv_heads, length = plan->lengths[chunk];
    int64_t end = plan->starts[chunk] + length, num_tiles = (end + KEYS - 1) / KEYS;
    int64_t first_tile = larger(0, plan->starts[chunk] + 1 - plan->window) / KEYS;
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = first_tile; t < num_tiles; t++) {
            int64_t offset = h * plan->head_stride + layer * plan->layer_stride;
            fill_context(plan, chunk, offset, t, end, context_tile(plan, num_tiles, h, t));
        }
    int64_t step = larger(1, MAX_ROWS / (plan->num_heads / heads));
    int64_t num_steps = (length + step - 1) / step;
    /* The last queries see most: first, so that nobody waits for them at the end. */
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t s = num_steps - 1; s >= 0; s--)
        for (int64_t h = 0; h < heads; h++)
            attend_tile(plan, rows, chunk, h, s * step, smaller(step, length - s * step), num_tiles);
}

/* Writes the step's K and V into their pages, then attends. */
void pd_attend(const struct plan *plan, const struct rows *rows, int64_t layer) {
#pragma omp parallel num_threads(plan->num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < plan->num_tokens; t++) {
            if (plan->kv_is_bf16)
                write_token_bf16(plan, rows, layer, t);
            else
                write_token_f32(plan, rows, layer, t);
        }
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t c = 0; c < plan->num_short; c++)
            for (int64_t h = 0; h < plan->num_kv_heads; h++) attend_short(plan, rows, layer, c, h);
        for (int64_t c = plan->num_short; c < plan->num_chunks; c++)
            attend_long(plan, rows, layer, c);
    }
}
