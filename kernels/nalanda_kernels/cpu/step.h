// One token through the delta rule or linear attention, from the projections to o_proj: `nalanda.model.step` in one pass.
// T is the model's dtype. Sums and the state are fp32, and values are rounded to T where the torch code rounds them.
#pragma once
#include <vector>

#include "maps.h"
#include "parts.h"

// `Step` of step.py. Pointers are null for what a mixer lacks.
struct Step {
    const void *q, *k, *v, *b, *w, *a, *gate;                      // [N, ·] of T, as projected
    int64_t q_stride, k_stride, v_stride, b_stride, w_stride, a_stride, gate_stride;  // entries between rows
    const float* g;                                                // [N, HV·G], log-decays
    const int64_t* positions;                                      // [N] or [1]
    const void *q_filter, *k_filter, *v_filter;                    // [·, W] of T
    const void *q_past, *k_past, *v_past;                          // [N, W−1, ·] of T
    void *q_moved, *k_moved, *v_moved;                             // the same after this token, or the same memory
    const float *A_log, *dt_bias;                                  // [HV], [HV·G]
    const float *map_powers, *map_units;                           // [H, K] of Pola
    const void* norm;                                              // [V] of T
    const float* state;                                            // [N, HV, F, V (+ 1)]
    float* new_state;                                              // the same after this token, or the same memory
    void* out;                                                     // [N, HV, V], of T or fp32
    int32_t N, H, HV, K, V, W, G, steps;                           // G: decays a head, 0, 1 or F
    int32_t delta, denominator, silu, sigmoid_gate, wide_out, position_stride;
    float beta_scale, scale, eps, map_alpha;
    Settings query, key;
};

// Channels of x behind their convolution. x, filter, past and moved begin at the first of them; past has D channels.
template <class T>
void convolve(const T* x, const T* filter, const T* past, T* moved, int channels, long D, int W, float* y) {
    if (W == 0) {
        for (int c = 0; c < channels; c++) y[c] = load(x + c);
        return;
    }
#pragma omp simd
    for (int c = 0; c < channels; c++) y[c] = load(x + c) * load(filter + c * W + W - 1);
    for (int i = 0; i < W - 1; i++) {
        // Row i − 1 has been read, so `moved` may be the memory of `past`.
#pragma omp simd
        for (int c = 0; c < channels; c++) {
            T before = past[i * D + c];
            y[c] += load(&before) * load(filter + c * W + i);
            if (i > 0) moved[(i - 1) * D + c] = before;
        }
    }
#pragma omp simd
    for (int c = 0; c < channels; c++) {
        moved[(W - 2) * D + c] = x[c];
        y[c] = rounded<T>(y[c]);
    }
}

// held += Σ_r e_r S_r over R rows of the state.
template <int R>
void read_state(const float* S, const float* e, int columns, float* held) {
#pragma omp simd
    for (int c = 0; c < columns; c++) {
        float sum = held[c];
        for (int r = 0; r < R; r++) sum += e[r] * S[long(r) * columns + c];
        held[c] = sum;
    }
}

// R rows of the state, S ← decay S + k uᵀ, and their share of the readout, o += Σ_r q_r S_r.
template <int R>
void write_state(const float* S, float* moved, const float* decay, const float* k, const float* u, const float* q,
                 int columns, float* o) {
#pragma omp simd
    for (int c = 0; c < columns; c++) {
        float sum = o[c];
        for (int r = 0; r < R; r++) {
            float s = S[long(r) * columns + c] * decay[r] + k[r] * u[c];
            moved[long(r) * columns + c] = s;
            sum += q[r] * s;
        }
        o[c] = sum;
    }
}

// Arrays of one thread. F features, columns of the state: V (+ 1).
struct Memory {
    std::vector<float> numbers;
    float *q, *k, *v, *map_q, *map_k, *lengths, *decay, *erased, *u, *o, *powers, *units, *row;

    Memory(const Step& s, int F, int columns) {
        int values = s.steps * (s.HV / s.H) * s.V;
        struct { float*& array; int size; } arrays[] = {
            {q, s.K}, {k, s.steps * s.K}, {v, values}, {map_q, F}, {map_k, s.steps * F}, {lengths, s.steps},
            {decay, F}, {erased, F}, {u, columns}, {o, columns}, {powers, s.K}, {units, s.K}, {row, 2 * s.K}};
        long total = 0;
        for (auto& x : arrays) total += x.size;
        numbers.resize(total);
        float* next = numbers.data();
        for (auto& x : arrays) {
            x.array = next;
            next += x.size;
        }
    }
};

// A head's q, and its k and v of all steps, behind convolutions; v also behind SiLU and the write gate.
template <class T>
void form_inputs(const Step& s, int n, int h, Memory& m) {
    int K = s.K, V = s.V, W = s.W, group = s.HV / s.H;
    auto channels = [&](const void* x, int64_t stride, const void* filter, const void* past, void* moved, long first,
                        int count, long D, float* y) {
        long before = long(n) * (W - 1) * D + first;
        convolve((const T*)x + n * stride + first, (const T*)filter + first * W, (const T*)past + before,
                 (T*)moved + before, count, D, W, y);
    };
    channels(s.q, s.q_stride, s.q_filter, s.q_past, s.q_moved, long(h) * K, K, long(s.H) * K, m.q);
    for (int j = 0; j < s.steps; j++) {
        // Step j's heads follow those of the steps before.
        long key = (long(j) * s.H + h) * K, value = (long(j) * s.HV + h * group) * V;
        float* v = m.v + j * group * V;
        channels(s.k, s.k_stride, s.k_filter, s.k_past, s.k_moved, key, K, long(s.steps) * s.H * K, m.k + j * K);
        channels(s.v, s.v_stride, s.v_filter, s.v_past, s.v_moved, value, group * V, long(s.steps) * s.HV * V, v);
        if (s.silu) {
#pragma omp simd
            for (int c = 0; c < group * V; c++) v[c] = rounded<T>(v[c] * sigmoid32(v[c]));
        }
        if (s.w) {
            const T* w = (const T*)s.w + n * s.w_stride + value;
#pragma omp simd
            for (int c = 0; c < group * V; c++) v[c] = rounded<T>(v[c] * rounded<T>(sigmoid32(load(w + c))));
        }
    }
}

// φ(q), scaled, and φ(k) of each step, rounded to T; and by which length β of each step is divided.
template <class T>
void form_features(const Step& s, int h, int F, Memory& m) {
    const float* powers = nullptr;
    if (s.map_powers) {
        powers = m.powers;
        for (int i = 0; i < s.K; i++) {
            m.powers[i] = 1 + s.map_alpha * sigmoid32(s.map_powers[h * s.K + i]);
            m.units[i] = s.map_units ? 1 / softplus32(s.map_units[h * s.K + i]) : 1;
        }
    }
    forward_row(m.q, m.map_q, s.K, s.query, powers, m.units, m.row);
    for (int i = 0; i < F; i++) m.map_q[i] = rounded<T>(m.map_q[i]) * s.scale;

    for (int j = 0; j < s.steps; j++) {
        float *k = m.map_k + j * F, squares = 0;
        forward_row(m.k + j * s.K, k, s.K, s.key, powers, m.units, m.row);
        for (int i = 0; i < F; i++) {
            k[i] = rounded<T>(k[i]);
            squares += k[i] * k[i];
        }
        // A rounded key may be longer than 1. Near β = 2 each token would then lengthen the state.
        bool divided = sizeof(T) < 4 && s.beta_scale > 1 && squares > 1;
        m.lengths[j] = divided ? squares : 1;
    }
}

// e^g of F features.
template <class T>
void form_decay(const Step& s, int n, int h_v, int F, float* decay) {
    long head = long(h_v) * s.G, row = long(n) * s.HV * s.G;
    const T* a = (const T*)s.a + n * s.a_stride + head;
    float rate = s.A_log ? -exp32(s.A_log[h_v]) : 0;
    for (int i = 0; i < s.G; i++) {
        float g = s.g ? s.g[row + head + i] : rate * softplus32(load(a + i) + s.dt_bias[head + i]);
        decay[i] = exp32(g);
    }
    if (s.G < 2) {
        float same = s.G ? decay[0] : 1;
        for (int i = 0; i < F; i++) decay[i] = same;
    }
}

// The state of a head of v after the token, in new_state, and its readout m.o.
template <class T>
void update(const Step& s, int n, int h_v, int F, int columns, Memory& m) {
    int V = s.V, group = s.HV / s.H, four = F / 4 * 4;
    long at = (long(n) * s.HV + h_v) * F * columns;
    const float* S = s.state + at;
    float* moved = s.new_state + at;
    form_decay<T>(s, n, h_v, F, m.decay);

    for (int j = 0; j < s.steps; j++) {
        const float *k = m.map_k + j * F, *v = m.v + (j * group + h_v % group) * V;
        for (int c = 0; c < columns; c++) m.u[c] = c < V ? v[c] : 1;
        if (s.delta) {
            // β of the head, or of each feature beside a write gate.
            long logit = n * s.b_stride + (long(j) * s.HV + h_v) * (s.w ? F : 1);
            const T* b = (const T*)s.b + logit;
            float beta = s.w ? 1 : s.beta_scale * sigmoid32(load(b)) / m.lengths[j];
            for (int i = 0; i < F; i++) {
                float erase = s.w ? s.beta_scale * sigmoid32(load(b + i)) / m.lengths[j] : 1;
                m.erased[i] = erase * k[i] * m.decay[i];
            }
            // The value under the key, in m.o for now.
            for (int c = 0; c < columns; c++) m.o[c] = 0;
            for (int f = 0; f < four; f += 4) read_state<4>(S + long(f) * columns, m.erased + f, columns, m.o);
            for (int f = four; f < F; f++) read_state<1>(S + long(f) * columns, m.erased + f, columns, m.o);
            for (int c = 0; c < columns; c++) m.u[c] = beta * (m.u[c] - m.o[c]);
        }

        for (int c = 0; c < columns; c++) m.o[c] = 0;
        for (int f = 0; f < four; f += 4) {
            long row = long(f) * columns;
            write_state<4>(S + row, moved + row, m.decay + f, k + f, m.u, m.map_q + f, columns, m.o);
        }
        for (int f = four; f < F; f++) {
            long row = long(f) * columns;
            write_state<1>(S + row, moved + row, m.decay + f, k + f, m.u, m.map_q + f, columns, m.o);
        }
        // Later steps go on from here, without decay.
        S = moved;
        for (int f = 0; f < F && s.steps > 1; f++) m.decay[f] = 1;
    }
}

// Denominator, norm and gate of a head's readout o.
template <class T>
void read_out(const Step& s, int n, int h_v, float* o) {
    int V = s.V;
    float total = 1;
    if (s.denominator) total = o[V] + EPS * float(s.positions[n * s.position_stride] + 1);
    for (int c = 0; c < V; c++) o[c] = s.denominator ? o[c] / total : rounded<T>(o[c]);

    if (s.norm) {
        const T* weight = (const T*)s.norm;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < V; c++) squares += o[c] * o[c];
        float root = 1 / std::sqrt(squares / V + s.eps);
        for (int c = 0; c < V; c++) o[c] = rounded<T>(o[c] * root * load(weight + c));
    }
    if (s.gate) {
        const T* gate = (const T*)s.gate + n * s.gate_stride + long(h_v) * V;
#pragma omp simd
        for (int c = 0; c < V; c++) {
            float g = load(gate + c), share = sigmoid32(g) * (s.sigmoid_gate ? 1 : g);
            o[c] = rounded<T>(rounded<T>(o[c]) * rounded<T>(share));
        }
    }
    long at = (long(n) * s.HV + h_v) * V;
    for (int c = 0; c < V && s.wide_out; c++) ((float*)s.out)[at + c] = o[c];
    for (int c = 0; c < V && !s.wide_out; c++) store((T*)s.out + at + c, o[c]);
}

// A part of the sequences' heads of q and k, each with the heads of v that it serves.
template <class T>
void run_step(const Step& s, Part part) {
    int F = s.key.name == POWER ? 2 * s.K : s.K, columns = s.V + s.denominator, group = s.HV / s.H;
    Memory m(s, F, columns);
    long heads = long(s.N) * s.H;
    for (long i = part.first(heads); i < part.end(heads); i++) {
        int n = i / s.H, h = i % s.H;
        form_inputs<T>(s, n, h, m);
        form_features<T>(s, h, F, m);
        for (int h_v = h * group; h_v < (h + 1) * group; h_v++) {
            update<T>(s, n, h_v, F, columns, m);
            read_out<T>(s, n, h_v, m.o);
        }
    }
}
