// One token through a mixer, from the projections to o_proj: the delta rule, linear attention, or attention over kept
// rows. T is the model's dtype. Sums and states are fp32, and values are rounded to T where the torch code rounds them.
#pragma once
#include "maps.h"
#include "rows.h"
#include "structures.h"

enum Scores { NONE, SOFTMAX, POSITIVE };
enum Activation { BY_SILU, BY_SIGMOID, PLAIN };

// A token of a layer: the fields of structures.py.
struct Step : StepFields {
    // Heads of k. Each serves several heads of v, or in attention several of q.
    int heads() const { return H < HV ? H : HV; }
    int queries() const { return H / heads(); }
    int values() const { return HV / heads(); }
    int features() const { return key.name == POWER ? 2 * K : K; }
};

// Where a token of a step is: its sequence, its place among the sequence's `tokens`, and its row in arrays of inputs.
struct Place {
    int n, t;
    long row;
};

// Channels of x behind their convolution. x, filter, past and moved begin at the first of them; past has D channels.
template <class T, class X>
void convolve(const X* x, const T* filter, const T* past, T* moved, int channels, long D, int W, float* y) {
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
        store(moved + (W - 2) * D + c, load(x + c));
        y[c] = rounded<T>(y[c]);
    }
}

// x / √(mean x² + ε) ⊙ weight
template <class T>
void norm_head(float* x, const T* weight, int size, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int c = 0; c < size; c++) squares += x[c] * x[c];
    float root = 1 / std::sqrt(squares / size + eps);
    for (int c = 0; c < size; c++) x[c] = rounded<T>(x[c] * root * load(weight + c));
}

// held += Σ_r e_r S_r over R rows of S.
template <int R, class X>
void read_rows(const X* S, const float* e, int columns, float* held) {
#pragma omp simd
    for (int c = 0; c < columns; c++) {
        float sum = held[c];
        for (int r = 0; r < R; r++) sum += e[r] * load(S + long(r) * columns + c);
        held[c] = sum;
    }
}

// held = Σ_r e_r S_r over all rows.
template <class X>
void read_all(const X* S, const float* e, long rows, int columns, float* held) {
    long r = 0;
    for (int c = 0; c < columns; c++) held[c] = 0;
    for (; r + 8 <= rows; r += 8) read_rows<8>(S + r * columns, e + r, columns, held);
    for (; r < rows; r++) read_rows<1>(S + r * columns, e + r, columns, held);
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

// Arrays of one thread. columns: of the state.
struct Memory {
    std::vector<float> numbers, scores, arranged;
    int F, columns;
    long turned = -1;  // the row of these cosines and sines
    float *q, *k, *v, *local, *map_q, *map_k, *lengths, *decay, *dt, *erased, *u, *o, *powers, *units, *row;
    float *cosines, *sines;

    explicit Memory(const Step& s) : F(s.features()), columns(s.V + s.denominator) {
        int values = s.values() * s.V;
        struct { float*& array; int size; } arrays[] = {
            {q, s.queries() * s.K}, {k, s.steps * s.K}, {v, s.steps * values}, {local, values},
            {map_q, (s.queries() + s.swapped) * F}, {map_k, s.steps * F}, {lengths, s.steps}, {decay, F}, {dt, 1},
            {erased, F}, {u, columns}, {o, columns}, {powers, s.K}, {units, s.K}, {row, 2 * s.K}, {cosines, s.pairs},
            {sines, s.pairs}};
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

// The q of a head of k, and its k and v of all steps, behind convolutions; v also behind SiLU and the write gate.
template <class T>
void form_inputs(const Step& s, Place at, int h, Memory& m) {
    int K = s.K, heads = s.heads(), queries = s.queries() * K, values = s.values() * s.V;
    // `count` channels of D from `first` on; `copies` of the same filters serve all heads.
    auto channels = [&](const auto* x, const void* filter, const void* past, void* moved, long first, int count, long D,
                        int W, float* y, bool copies = false) {
        long before = long(at.n) * (W - 1) * D + first;
        const T* own = (const T*)filter + (copies ? 0 : first * W);
        convolve(x, own, (const T*)(at.t ? moved : past) + before, (T*)moved + before, count, D, W, y);
    };
    long size_q = long(s.H) * K, size_k = long(s.steps) * heads * K, size_v = long(s.steps) * s.HV * s.V;
    const T *x_q = (const T*)s.q + at.row * size_q, *x_k = (const T*)s.k + at.row * size_k;
    const T *x_v = (const T*)s.v + at.row * size_v, *x_w = (const T*)s.w + at.row * size_v;

    long query = long(h) * queries, value = long(h) * values;
    // Its input has SiLU where that belongs to the short convolution, and no gate of what is written.
    auto convolve_local = [&] {
        channels(m.v, s.local_filter, s.local_past, s.local_moved, value, values, size_v, s.local_width, m.local,
                 s.local_copies);
    };
    channels(x_q + query, s.q_filter, s.q_past, s.q_moved, query, queries, size_q, s.W, m.q);
    for (int j = 0; j < s.steps; j++) {
        // Step j's heads follow those of the steps before.
        long i = long(j) * heads + h, key_j = i * K, value_j = i * values;
        float *k = m.k + j * K, *v = m.v + j * values;
        channels(x_k + key_j, s.k_filter, s.k_past, s.k_moved, key_j, K, size_k, s.W, k);
        channels(x_v + value_j, s.v_filter, s.v_past, s.v_moved, value_j, values, size_v, s.W, v);
        if (s.local_width && !s.W) convolve_local();
        for (int c = 0; c < values && s.silu; c++) v[c] = rounded<T>(v[c] * sigmoid32(v[c]));
        if (s.local_width && s.W) convolve_local();
        for (int c = 0; c < values && s.w; c++) v[c] = rounded<T>(v[c] * rounded<T>(sigmoid32(load(x_w + value_j + c))));
    }

    for (int i = 0; i < queries && s.q_norm; i += K) norm_head(m.q + i, (const T*)s.q_norm, K, s.eps);
    if (s.k_norm) norm_head(m.k, (const T*)s.k_norm, K, s.eps);
}

// Cosines and sines of the angles by which the heads of a token rotate.
inline void form_angles(const Step& s, Place at, Memory& m) {
    long place = s.positions[at.n] + at.t;
    float position = s.blocks ? place % s.reach : place;
    for (int i = 0; i < s.pairs; i++) {
        m.cosines[i] = std::cos(position * s.frequencies[i]);
        m.sines[i] = std::sin(position * s.frequencies[i]);
    }
    m.turned = at.row;
}

// Features, rounded to T; those of some mixers are reflected, and the pairs (x_i, x_{i + pairs}) rotated.
template <class T>
void turn(const Step& s, const Memory& m, float* x) {
    float along = 0;
    for (int i = 0; i < m.F; i++) x[i] = rounded<T>(x[i]);
    for (int i = 0; i < m.F && s.mirror; i++) along += x[i] * s.mirror[i];
    for (int i = 0; i < m.F && s.mirror; i++) x[i] -= 2 * along * s.mirror[i];
    for (int i = 0; i < s.pairs; i++) {
        float a = x[i], b = x[s.pairs + i];
        x[i] = a * m.cosines[i] - b * m.sines[i];
        x[s.pairs + i] = b * m.cosines[i] + a * m.sines[i];
    }
    for (int i = 0; i < m.F && s.pairs; i++) x[i] = rounded<T>(x[i]);
}

// φ(q), scaled, and φ(k) of each step, rounded to T; and by which length β of each step is divided.
template <class T>
void form_features(const Step& s, int h, Memory& m) {
    const float* powers = nullptr;
    if (s.map_powers) {
        powers = m.powers;
        for (int i = 0; i < s.K; i++) {
            m.powers[i] = 1 + s.map_alpha * sigmoid32(s.map_powers[h * s.K + i]);
            m.units[i] = s.map_units ? 1 / softplus32(s.map_units[h * s.K + i]) : 1;
        }
    }
    int F = m.F;
    Settings query = s.query;
    query.l2 |= s.unit_queries;
    for (int j = 0; j < s.queries(); j++) {
        float* q = m.map_q + j * F;
        forward_row(m.q + j * s.K, q, s.K, query, powers, m.units, m.row);
        turn<T>(s, m, q);
        for (int i = 0; i < F && !s.scores; i++) q[i] *= s.scale;
        // [q⁻; q⁺] of Pola, for the second head of v.
        for (int i = 0; i < F && s.swapped; i++) q[F + i] = q[(i + s.K) % F];
    }

    for (int j = 0; j < s.steps; j++) {
        float *k = m.map_k + j * F, squares = 0;
        forward_row(m.k + j * s.K, k, s.K, s.key, powers, m.units, m.row);
        turn<T>(s, m, k);
        for (int i = 0; i < F; i++) squares += k[i] * k[i];
        // A rounded key may be longer than 1. Near β = 2 each token would then lengthen the state.
        bool divided = sizeof(T) < 4 && s.beta_scale > 1 && squares > 1;
        m.lengths[j] = divided ? squares : 1;
    }
}

// e^g of all features, and the step Δ of a head.
template <class T>
void form_decay(const Step& s, Place at, int h_v, Memory& m) {
    long head = long(h_v) * s.G, row = at.row * s.HV * s.G;
    const T* a = (const T*)s.a + row + head;
    auto fill = [&](auto log_decay) {
        float* decay = m.decay;
#pragma omp simd
        for (int i = 0; i < s.G; i++) decay[i] = exp32(log_decay(i));
    };
    const float *g = s.g + row + head, *bias = s.dt_bias + head;
    if (s.A_log) {
        float rate = -exp32(s.A_log[h_v]);
        *m.dt = softplus32(load(a) + *bias);
        fill([=](int i) { return rate * softplus32(load(a + i) + bias[i]); });
    } else if (s.temperature > 0) {
        float temperature = s.temperature;
        fill([=](int i) { return -softplus32(-load(a + i)) / temperature; });
    } else {
        fill([=](int i) { return g[i]; });
    }
    if (s.G < 2) {
        float same = s.G ? m.decay[0] : 1;
        for (int i = 0; i < m.F; i++) m.decay[i] = same;
    }
}

// The state of a head of v after the token, in new_state, and its readout m.o.
template <class T>
void update(const Step& s, Place at, int h_v, Memory& m) {
    int V = s.V, F = m.F, columns = m.columns, group = s.values(), four = F / 4 * 4;
    long head = (long(at.n) * s.HV + h_v) * F * columns;
    const float *S = (at.t ? s.new_state : s.state) + head, *q = m.map_q + (s.swapped ? h_v % 2 * F : 0);
    float* moved = s.new_state + head;
    form_decay<T>(s, at, h_v, m);

    for (int j = 0; j < s.steps; j++) {
        const float *k = m.map_k + j * F, *v = m.v + (j * group + h_v % group) * V;
        float step = s.skip ? *m.dt : 1;
        for (int c = 0; c < columns; c++) m.u[c] = c < V ? v[c] * step : 1;
        if (s.delta) {
            // β of the head, or of each feature beside a write gate.
            long logit = ((at.row * s.steps + j) * s.HV + h_v) * (s.w ? F : 1);
            const T* b = (const T*)s.b + logit;
            float beta = s.w ? 1 : s.beta_scale * sigmoid32(load(b)) / m.lengths[j];
            for (int i = 0; i < F; i++) {
                float erase = s.w ? s.beta_scale * sigmoid32(load(b + i)) / m.lengths[j] : 1;
                m.erased[i] = erase * k[i] * m.decay[i];
            }
            // The value under the key, in m.o for now.
            read_all(S, m.erased, F, columns, m.o);
            for (int c = 0; c < columns; c++) m.u[c] = beta * (m.u[c] - m.o[c]);
        }

        for (int c = 0; c < columns; c++) m.o[c] = 0;
        auto write = [&](auto rows, int f) {
            long row = long(f) * columns;
            write_state<rows.value>(S + row, moved + row, m.decay + f, k + f, m.u, q + f, columns, m.o);
        };
        for (int f = 0; f < four; f += 4) write(Constant<4>(), f);
        for (int f = four; f < F; f++) write(Constant<1>(), f);
        // Later steps go on from here, without decay.
        S = moved;
        for (int f = 0; f < F && s.steps > 1; f++) m.decay[f] = 1;
    }
}

// The token's key and value in their rows, and p [queries, seen], the weight of each row that it sees.
template <class T>
long weigh_rows(const Step& s, Place at, int h, Memory& m) {
    int K = s.K, V = s.V, queries = s.queries();
    long position = s.positions[at.n] + at.t, seen = position + 1;
    long last = s.used + *s.written + at.t, head = long(at.n) * s.HV + h;
    if (s.reach) seen = s.blocks ? position % s.reach + 1 : seen < s.reach ? seen : s.reach;
    T* k = (T*)s.k_rows + (head * s.k_room + last) * K;
    T* v = (T*)s.v_rows + (head * s.v_room + last) * V;
    for (int c = 0; c < K; c++) store(k + c, m.map_k[c]);
    for (int c = 0; c < V; c++) store(v + c, m.v[c]);

    m.scores.resize(queries * seen);
    const float* q = arrange<T>(m.map_q, queries, K, m.arranged);
    multiply_all(k - (seen - 1) * K, q, queries, K, 0, seen, [&](int i, long j, float sum) {
        float score = s.scores == SOFTMAX ? sum : rounded<T>(sum);
        m.scores[i * seen + j] = score * s.scale;
    });
    return seen;
}

// o of a query of a head of k, in m.o.
template <class T>
void attend(const Step& s, Place at, int h, int i, long seen, Memory& m) {
    float *p = m.scores.data() + i * seen, most = -INFINITY, total = s.scores == SOFTMAX ? 0 : 1;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < seen; j++) most = p[j] > most ? p[j] : most;
    if (s.scores == SOFTMAX) {
#pragma omp simd reduction(+ : total)
        for (long j = 0; j < seen; j++) {
            float weight = exp32(p[j] - most);
            total += weight;
            p[j] = rounded<T>(weight);
        }
    }
    for (long j = 0; j < seen && s.scores == POSITIVE; j++) p[j] = p[j] < 0 ? 0 : rounded<T>(p[j]);

    long first = (long(at.n) * s.HV + h) * s.v_room + s.used + *s.written + at.t + 1 - seen;
    read_all((const T*)s.v_rows + first * s.V, p, seen, s.V, m.o);
    for (int c = 0; c < s.V; c++) m.o[c] /= total;
}

// o of a head behind its denominator, its share of v, the convolution of v, norm and gate. value: its head of v.
template <class T>
void read_out(const Step& s, Place at, int head, int value, Memory& m) {
    int V = s.V, heads = s.H > s.HV ? s.H : s.HV;
    long out = (at.row * heads + head) * V, sums = (long(at.n) * heads + head) * V;
    const float *v = m.v + value * V, *local = m.local + value * V, *past = at.t ? s.new_sum : s.sum;
    float *o = m.o, t = s.positions ? s.positions[at.n] + at.t + 1 : 1, z = s.denominator ? o[V] : 0;
    float total = s.denominator ? z + EPS * t : 1, skip = s.skip ? s.skip[head] : 0;
    bool narrow = !s.denominator && !s.skip;
    if (s.magnitude) {
        float c_t = s.by_count ? s.magnitude / t : s.magnitude;
        for (int c = 0; c < V; c++) {
            float sum = past[sums + c] + v[c];
            s.new_sum[sums + c] = sum;
            // r/z + c_t (r − z v̄), of which the division by z follows
            o[c] += total * c_t * (o[c] - z * sum / t);
        }
    }
#pragma omp simd
    for (int c = 0; c < V; c++) o[c] = narrow ? rounded<T>(o[c]) : o[c] / total + skip * v[c];

    auto gate = [&] {
        const T* x = (const T*)s.gate + (at.row * heads + head) * s.gate_width;
#pragma omp simd
        for (int c = 0; c < V; c++) {
            float g = load(x + (s.gate_width > 1 ? c : 0));
            float share = s.activation == PLAIN ? g : sigmoid32(g) * (s.activation == BY_SILU ? g : 1);
            o[c] = rounded<T>(rounded<T>(o[c]) * rounded<T>(share));
        }
    };
    if (s.gate && s.gate_first) gate();
    for (int c = 0; c < V && s.local_width; c++) o[c] = narrow ? rounded<T>(o[c] + local[c]) : o[c] + local[c];
    if (s.norm) norm_head(o, (const T*)s.norm, V, s.eps);
    if (s.gate && !s.gate_first) gate();
    for (int c = 0; c < V && s.wide_out; c++) ((float*)s.out)[out + c] = o[c];
    for (int c = 0; c < V && !s.wide_out; c++) store((T*)s.out + out + c, o[c]);
}

// A token of a head of k, with the heads of v or q that it serves.
template <class T>
void run_head(const Step& s, Place at, int h, Memory& m) {
    if (s.pairs && m.turned != at.row) form_angles(s, at, m);
    form_inputs<T>(s, at, h, m);
    form_features<T>(s, h, m);
    if (s.scores) {
        long seen = weigh_rows<T>(s, at, h, m);
        for (int j = 0; j < s.queries(); j++) {
            attend<T>(s, at, h, j, seen, m);
            read_out<T>(s, at, h * s.queries() + j, 0, m);
        }
        return;
    }
    for (int j = 0; j < s.values(); j++) {
        update<T>(s, at, h * s.values() + j, m);
        read_out<T>(s, at, h * s.values() + j, j, m);
    }
}

// A part of the sequences' heads of k, each with its tokens one after another.
template <class T>
void run_step(const Step& s, Part part) {
    Memory m(s);
    long heads = s.heads();
    for (long i = part.first(s.N * heads); i < part.end(s.N * heads); i++) {
        int n = i / heads, h = i % heads;
        for (int t = 0; t < s.tokens; t++) run_head<T>(s, {n, t, long(n) * s.tokens + t}, h, m);
    }
}
