/* Vectors, element types and the exponential: what the kernels compute with. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16 /* floats in a vector register */
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float unaligned_vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef uint16_t bf16; /* the upper half of a float */
typedef uint16_t halves __attribute__((vector_size(LANES * sizeof(bf16)), aligned(2)));
typedef uint32_t words __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint32_t unaligned_words __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(4)));

INLINE float load_f32(float x) { return x; }
INLINE float store_f32(float x) { return x; }

INLINE float load_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest, ties to even. NaN may become infinite: our inputs are finite. */
INLINE bf16 store_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vec load_vec_f32(const float *p) { return *(const unaligned_vec *)p; }

INLINE vec load_vec_bf16(const bf16 *p) {
    return (vec)(__builtin_convertvector(*(const halves *)p, words) << 16);
}

INLINE void store_vec(float *p, vec x) { *(unaligned_vec *)p = x; }

#if LANES == 16
#define SHUFFLE(a, b, i0, i1, i2, i3)                                                             \
    __builtin_shuffle(a, b, (words){i0, i1, i2, i3, i0 + 4, i1 + 4, i2 + 4, i3 + 4, i0 + 8, i1 + 8, \
                                    i2 + 8, i3 + 8, i0 + 12, i1 + 12, i2 + 12, i3 + 12})
#define ROTATE(a, by)                                                                      \
    __builtin_shuffle(a, (words){by, 1 + by, 2 + by, 3 + by, 4 + by, 5 + by, 6 + by, 7 + by, \
                                 8 + by, 9 + by, 10 + by, 11 + by, 12 + by, 13 + by, 14 + by, 15 + by})
#else
#define SHUFFLE(a, b, i0, i1, i2, i3) \
    __builtin_shuffle(a, b, (words){i0, i1, i2, i3, i0 + 4, i1 + 4, i2 + 4, i3 + 4})
#define ROTATE(a, by) \
    __builtin_shuffle(a, (words){by, 1 + by, 2 + by, 3 + by, 4 + by, 5 + by, 6 + by, 7 + by})
#endif

typedef float quad __attribute__((vector_size(16), aligned(4)));

/* The sums over the lanes of four vectors at once, in fewer steps than one by one. */
INLINE void store_sums(float *to, vec a, vec b, vec c, vec d) {
    vec ab = SHUFFLE(a, b, 0, LANES, 1, LANES + 1) + SHUFFLE(a, b, 2, LANES + 2, 3, LANES + 3);
    vec cd = SHUFFLE(c, d, 0, LANES, 1, LANES + 1) + SHUFFLE(c, d, 2, LANES + 2, 3, LANES + 3);
    vec sums = SHUFFLE(ab, cd, 0, 1, LANES, LANES + 1) + SHUFFLE(ab, cd, 2, 3, LANES + 2, LANES + 3);
    for (int by = LANES / 2; by >= 4; by /= 2) sums += by == 8 ? ROTATE(sums, 8) : ROTATE(sums, 4);
    *(quad *)to = (quad){sums[0], sums[1], sums[2], sums[3]};
}

INLINE float sum_of(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* 2^x within 2 units of the last place; for x < -126 a tiny number, never more than 2^126. */
INLINE float fast_exp2(float x) {
    x = x < -126.0f ? -126.0f : x;
    x = x > 126.0f ? 126.0f : x;
    float n = __builtin_rintf(x), r = x - n; /* |r| <= 1/2: a polynomial, fitted to 2e-9 */
    float p = 1.53533616e-4f;
    p = p * r + 1.33988745e-3f;
    p = p * r + 9.61843736e-3f;
    p = p * r + 5.55033247e-2f;
    p = p * r + 2.40226479e-1f;
    p = p * r + 6.93147203e-1f;
    p = p * r + 1.0f;
    uint32_t power = (uint32_t)((int32_t)n + 127) << 23; /* 2^n */
    float scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

/* e^x, likewise. Two products' rounding errors grow with x: the last factor takes them out. */
INLINE float fast_exp(float x) {
    float t = x * 1.44269502f;
    float lost = __builtin_fmaf(x, 1.44269502f, -t) + x * 1.92596303e-8f;
    return fast_exp2(t) * (1.0f + 0.693147181f * lost);
}
