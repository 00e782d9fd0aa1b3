// What an engine keeps a GPU busy with, for benches. Compiled by NVRTC.

typedef unsigned int u32;
typedef unsigned long long u64;

// A prefill is bound by arithmetic: c = a b, square matrices of n rows, a
// thread for each value of c.
extern "C" __global__ void kvbm_matmul(const float *a, const float *b, float *c, u32 n) {
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column >= n) return;
    float sum = 0;
    for (u32 k = 0; k < n; k++) sum += a[(u64)row * n + k] * b[(u64)k * n + column];
    c[(u64)row * n + column] = sum;
}

// A decode is bound by the device's memory: each part of the rows of a times the same rows of x; their sums are y, a row
// for each part (`blockIdx.y`).
extern "C" __global__ void kvbm_matvec(const float *a, const float *x, float *y, u32 n) {
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x, part = blockIdx.y;
    if (column >= n) return;
    const u32 rows = n / gridDim.y, first = part * rows;
    float sum = 0;
#pragma unroll 8
    for (u32 k = first; k < first + rows; k++) sum += x[k] * a[(u64)k * n + column];
    y[(u64)part * n + column] = sum;
}
