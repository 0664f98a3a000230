// Entries of one token's recurrence and of products of few rows.
#include "step.h"

extern "C" {
void step_fp32(const Step* step, int threads) {
    in_parts(threads, [=](Part part) { run_step<float>(*step, part); });
}

void step_bf16(const Step* step, int threads) {
    in_parts(threads, [=](Part part) { run_step<uint16_t>(*step, part); });
}

void linear_fp32(const float* W, const float* x, float* y, int N, int K, int M, int threads) {
    Linear<float> layer{W, nullptr, x, nullptr, y, N, K, M};
    in_parts(threads, [=](Part part) { run_linear(layer, part); });
}

void linear_bf16(const uint16_t* W, const uint16_t* x, uint16_t* y, int N, int K, int M,
                 int threads) {
    Linear<uint16_t> layer{W, nullptr, x, nullptr, y, N, K, M};
    in_parts(threads, [=](Part part) { run_linear(layer, part); });
}
}
