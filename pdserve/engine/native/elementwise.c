/* The small operations between matrix products; kernels/torch_kernels.py says what each computes. */

#include "numbers.h"

/* Elements from which a second thread pays for waking it. */
#define PARALLEL_FROM 32768

#define TYPE float
#define NAME(name) name##_f32
#define LOAD load_f32
#define STORE store_f32
#include "elementwise_typed.h"

#define TYPE bf16
#define NAME(name) name##_bf16
#define LOAD load_bf16
#define STORE store_bf16
#include "elementwise_typed.h"
