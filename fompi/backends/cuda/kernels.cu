// Kernels on device memory: they move, add, reduce, and convert. Products are those of cuBLAS, but for those in a fixed
// order.
//
// The file includes nothing, so that NVRTC compiles it without headers. `kernels.py` chooses the function and the
// arguments of a call. A C++ compiler compiles the same text for the tests: KERNEL and CUDA's names are defined before.
//
// Half types are computed in float32 and rounded once, to the nearest even. bfloat16 is held in 16-bit integers.
//
// PART is the number of the part that is compiled: 0 moves and sums, 1 other reductions, 2 messages that carry fewer
// bits, 3 products. NVRTC needs seconds for each. Without PART all are compiled.

#ifndef KERNEL
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(256) name(__VA_ARGS__)
#endif

typedef long long Long;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef Long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
struct alignas(16) u128 { u64 low, high; };
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct c64 { float re, im; };
struct c128 { double re, im; };

// ------------------------------------------------------------------------------------------- elements as they compute

#ifdef __CUDA_ARCH__
__device__ float from_half(u16 bits) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
__device__ u16 to_half(float x) { u16 bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits; }
__device__ float times(float a, float b) { return __fmul_rn(a, b); }  // never joined with a sum
#endif

union Bits { u32 bits; float x; };
__device__ float as_float(u32 bits) { Bits b; b.bits = bits; return b.x; }
__device__ u32 as_bits(float x) { Bits b; b.x = x; return b.bits; }

template <class T> __device__ T wide(T x) { return x; }
__device__ float wide(f16 x) { return from_half(x.bits); }
__device__ float wide(bf16 x) { return as_float(u32(x.bits) << 16); }

template <class T> __device__ void put(T& to, T x) { to = x; }
__device__ void put(f16& to, float x) { to.bits = to_half(x); }
__device__ void put(bf16& to, float x) {
  const u32 bits = as_bits(x), up = 0x7FFF + ((bits >> 16) & 1);
  to.bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (bits + up) >> 16;  // a NaN must not round to infinity
}

__device__ c64 operator+(c64 a, c64 b) { return {a.re + b.re, a.im + b.im}; }
__device__ c128 operator+(c128 a, c128 b) { return {a.re + b.re, a.im + b.im}; }
__device__ c64 operator*(c64 a, c64 b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
__device__ c128 operator*(c128 a, c128 b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
__device__ c64 operator/(c64 a, float b) { return {a.re / b, a.im / b}; }
__device__ c128 operator/(c128 a, double b) { return {a.re / b, a.im / b}; }

// V elements that one thread reads or writes at once, at most 16 bytes an access.
template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Few { T of[V]; };

template <class... T> __device__ constexpr int vector() {
  int smallest = 16;
  for (int size : {int(sizeof(T))...}) smallest = size < smallest ? size : smallest;
  return 16 / smallest;
}

// ------------------------------------------------------------------------------------------------ one element for each

// The elements of a call: `count` of them in `dims` dimensions, and the strides of each operand in bytes.
struct Layout {
  Long count, dims, size[5], stride[3][5];
};

__device__ Long first() { return blockIdx.x * Long(blockDim.x) + threadIdx.x; }
__device__ Long step() { return gridDim.x * Long(blockDim.x); }

// at[k] = where operand k has element i.
template <int N, class Int> __device__ void locate(const Layout& l, Int i, Long (&at)[N]) {
  for (int k = 0; k < N; k++) at[k] = 0;
  for (int d = int(l.dims) - 1; d >= 0; d--) {
    const Int rest = d ? i / Int(l.size[d]) : 0, here = i - rest * Int(l.size[d]);
    for (int k = 0; k < N; k++) at[k] += Long(here) * l.stride[k][d];
    i = rest;
  }
}

template <int N> __device__ void locate_any(const Layout& l, Long i, Long (&at)[N]) {
  if (l.count >> 32) locate<N, u64>(l, i, at);
  else locate<N, u32>(l, u32(i), at);
}

template <class T> __device__ const T& at(const void* p, Long offset) { return *(const T*)((const char*)p + offset); }
template <class T> __device__ T& at(void* p, Long offset) { return *(T*)((char*)p + offset); }

// c = f(a), V elements a thread. c may be a.
template <int V, class F, class C, class A> __device__ void map(F f, const Layout& l, C* c, const A* a) {
  for (Long i = first(); i < l.count; i += step()) {
    Long o[2];
    locate_any(l, i, o);
    const Few<A, V> x = at<Few<A, V>>(a, o[1]);
    Few<C, V> z;
    for (int v = 0; v < V; v++) put(z.of[v], f(wide(x.of[v])));
    at<Few<C, V>>(c, o[0]) = z;
  }
}

// c = f(a, b), V elements a thread. c may be a or b.
template <int V, class F, class C, class A, class B>
__device__ void map(F f, const Layout& l, C* c, const A* a, const B* b) {
  for (Long i = first(); i < l.count; i += step()) {
    Long o[3];
    locate_any(l, i, o);
    const Few<A, V> x = at<Few<A, V>>(a, o[1]);
    const Few<B, V> y = at<Few<B, V>>(b, o[2]);
    Few<C, V> z;
    for (int v = 0; v < V; v++) put(z.of[v], f(wide(x.of[v]), wide(y.of[v])));
    at<Few<C, V>>(c, o[0]) = z;
  }
}

struct Same { template <class T> __device__ T operator()(T x) const { return x; } };
struct Sum { template <class T> __device__ T operator()(T x, T y) const { return T(x + y); } };
// NaN if one of both is NaN.
struct Most { template <class T> __device__ T operator()(T x, T y) const { return x >= y || x != x ? x : y; } };
struct Least { template <class T> __device__ T operator()(T x, T y) const { return x <= y || x != x ? x : y; } };
struct Product {
  template <class T> __device__ T operator()(T x, T y) const { return T(x * y); }
  __device__ u16 operator()(u16 x, u16 y) const { return u16(u32(x) * y); }  // as int it could overflow
};
template <class S> struct Mean { S n; template <class T> __device__ T operator()(T x, T y) const { return (x + y) / n; } };
// Each has two functions: for one element a thread, and (`_v`) for 16 bytes of the smallest type.
#define UNARY(name, F, C, A) \
  KERNEL(name, Layout l, C* c, const A* a) { map<1>(F(), l, c, a); } \
  KERNEL(name##_v, Layout l, C* c, const A* a) { map<vector<C, A>()>(F(), l, c, a); }
#define BINARY(name, F, C, A, B) \
  KERNEL(name, Layout l, C* c, const A* a, const B* b) { map<1>(F(), l, c, a, b); } \
  KERNEL(name##_v, Layout l, C* c, const A* a, const B* b) { map<vector<C, A, B>()>(F(), l, c, a, b); }
#define MEAN(C, A, B, S) \
  KERNEL(mean_##C##_##A##_##B, Layout l, C* c, const A* a, const B* b, S n) { map<1>(Mean<S>{n}, l, c, a, b); } \
  KERNEL(mean_##C##_##A##_##B##_v, Layout l, C* c, const A* a, const B* b, S n) \
  { map<vector<C, A, B>()>(Mean<S>{n}, l, c, a, b); }
#define MOVE(T) \
  KERNEL(copy_##T, Layout l, T* c, const T* a) { map<1>(Same(), l, c, a); }
#define CAST(C, A) UNARY(cast_##C##_##A, Same, C, A)
#define ADD(C, A, B) BINARY(add_##C##_##A##_##B, Sum, C, A, B)
#define ADD_HALF(H) \
  ADD(H, H, H) ADD(H, H, f32) ADD(H, f32, H) ADD(H, f32, f32) ADD(f32, H, H) ADD(f32, H, f32) ADD(f32, f32, H)
#define COMBINE(name, F, T) BINARY(name##_##T##_##T##_##T, F, T, T, T)
#define COMBINE_HALF(name, F, H) /* a term is a half type, a result so far is float32 */ \
  COMBINE(name, F, H) BINARY(name##_##H##_f32_##H, F, H, f32, H) BINARY(name##_##H##_f32_f32, F, H, f32, f32) \
  BINARY(name##_f32_##H##_##H, F, f32, H, H) BINARY(name##_f32_f32_##H, F, f32, f32, H)
#define EXTREMES(T) COMBINE(max, Most, T) COMBINE(min, Least, T)
#define PRODUCT(T) COMBINE(prod, Product, T)
#define REDUCE_HALF(H) \
  COMBINE_HALF(max, Most, H) COMBINE_HALF(min, Least, H) COMBINE_HALF(prod, Product, H) \
  MEAN(H, H, H, f32) MEAN(H, f32, H, f32) MEAN(H, f32, f32, f32)
#ifdef PART
#define HAS(part) (PART == part)
#else
#define HAS(part) 1
#endif

#if HAS(0)
MOVE(u8) MOVE(u16) MOVE(u32) MOVE(u64) MOVE(u128)
CAST(f32, f16) CAST(f32, bf16) CAST(f16, f32) CAST(bf16, f32) CAST(f16, bf16) CAST(bf16, f16)
ADD(u8, u8, u8) ADD(u16, u16, u16) ADD(u32, u32, u32) ADD(u64, u64, u64)
ADD(f32, f32, f32) ADD(f64, f64, f64) ADD(c64, c64, c64) ADD(c128, c128, c128)
ADD_HALF(f16) ADD_HALF(bf16)
#endif
#if HAS(1)
EXTREMES(i8) EXTREMES(i16) EXTREMES(i32) EXTREMES(i64) EXTREMES(u8) EXTREMES(u16) EXTREMES(u32) EXTREMES(u64)
EXTREMES(f32) EXTREMES(f64)
PRODUCT(u8) PRODUCT(u16) PRODUCT(u32) PRODUCT(u64) PRODUCT(f32) PRODUCT(f64) PRODUCT(c64) PRODUCT(c128)
MEAN(f32, f32, f32, f32) MEAN(f64, f64, f64, f64) MEAN(c64, c64, c64, f32) MEAN(c128, c128, c128, f64)
REDUCE_HALF(f16) REDUCE_HALF(bf16)
#endif
#if HAS(2)

// ------------------------------------------------------------------------------------ messages that carry fewer bits

// The wires of fompi.base.wires: a scale for each run of 64 elements, then codes, then zeros up to 4 bytes. The bits are
// those of fompi/backends/wires.py.
enum Wire { BFLOAT16, FLOAT16, INT8, FP8, INT4 };
#define RUN 64

__device__ constexpr float top_of(Wire w) { return w == INT8 ? 127.0f : w == FP8 ? 448.0f : 7.0f; }
__device__ Long padded(Long count, int bits) { return (count * bits + 31) / 32 * 4; }

__device__ u8 fp8_of(float x) {
  const u32 bits = as_bits(x), size = bits & 0x7FFFFFFF;
  const u32 small = u32(rintf(as_float(size < 0x3C800000 ? size : 0) * 512));  // below 2^-6 the steps are 2^-9
  u32 normal = ((size + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
  normal = int(normal) > 0x7E ? 0x7E : normal;
  return u8((bits >> 24 & 0x80) | (size < 0x3C800000 ? small : normal));
}

__device__ float of_fp8(u8 code) {
  const float small = float(code & 7) * 0x1p-9f, normal = as_float((u32(code & 0x7F) + (120 << 3)) << 20);
  return as_float(as_bits(code & 0x78 ? normal : small) | u32(code & 0x80) << 24);
}

__device__ int nearest(float x, float top) {  // ties to even
  x = rintf(x);
  return int(x > top ? top : x < -top ? -top : x);
}

// m = a. One warp a run, two elements a lane.
template <Wire W, class T> __device__ void encode(u8* m, const T* a, Long count) {
  const Long runs = (count + RUN - 1) / RUN, bytes = padded(count, W == INT4 ? 4 : 8);
  float* scales = (float*)m;
  u8* codes = m + 4 * runs;
  const int lane = threadIdx.x % 32;
  for (Long r = first() / 32; r < runs; r += step() / 32) {
    const Long e = r * RUN + 2 * lane;
    const float x = e < count ? wide(a[e]) : 0, y = e + 1 < count ? wide(a[e + 1]) : 0;
    const u32 p = as_bits(x) & 0x7FFFFFFF, q = as_bits(y) & 0x7FFFFFFF;
    u32 largest = p > q ? p : q;  // as bits, a NaN is larger than an infinity, and that than all
    for (int distance = 16; distance; distance /= 2) {
      const u32 other = __shfl_xor_sync(0xFFFFFFFF, largest, distance);
      largest = other > largest ? other : largest;
    }
    const u32 most = largest > 0x7F7FFFF8 ? 0x7F7FFFF8 : largest;  // LARGEST of fompi.base.wires
    const float scale = largest >= 0x7F800000 ? as_float(0x7FC00000) : as_float(most) / top_of(W);
    if (lane == 0) scales[r] = scale;
    const bool usable = scale > 0;
    if (W == INT4) {
      const int low = usable ? nearest(x / scale, 7) : 0, high = usable ? nearest(y / scale, 7) : 0;
      if (e / 2 < bytes) codes[e / 2] = u8((low & 15) | high << 4);
    } else {
      const float each[2] = {x, y};
      for (int k = 0; k < 2; k++) {
        const u8 code = !usable ? 0 : W == INT8 ? u8(nearest(each[k] / scale, 127)) : fp8_of(each[k] / scale);
        if (e + k < bytes) codes[e + k] = code;
      }
    }
  }
}

// bfloat16 keeps finite what is finite: it is cut where rounding would make it infinite. float16 does not hold that.
template <class H> __device__ void encode_half(u8* m, const f32* a, Long count) {
  for (Long i = first(); i < padded(count, 16) / 2; i += step()) {
    const u32 bits = as_bits(i < count ? a[i] : 0.0f);
    put(((H*)m)[i], as_float((bits & 0x7FFFFFFF) - 0x7F7F8000 < 0x8000 ? bits & 0xFFFF0000 : bits));
  }
}

// Element i of a block.
template <Wire W> __device__ float decoded(const u8* m, Long count, Long i) {
  if (W == BFLOAT16) return wide(((const bf16*)m)[i]);
  if (W == FLOAT16) return wide(((const f16*)m)[i]);
  const float scale = ((const float*)m)[i / RUN];
  const u8* codes = m + 4 * ((count + RUN - 1) / RUN);
  if (W == INT8) return times(float(i8(codes[i])), scale);
  if (W == FP8) return times(of_fp8(codes[i]), scale);
  const u8 pair = codes[i / 2];
  return times(float(i8(i % 2 ? pair : u8(pair << 4)) >> 4), scale);
}

template <Wire W, class C> __device__ void decode(C* c, const u8* m, Long count) {
  for (Long i = first(); i < count; i += step()) put(c[i], decoded<W>(m, count, i));
}

template <Wire W> __device__ void decode_add(f32* c, const u8* m, const f32* b, Long count) {
  for (Long i = first(); i < count; i += step()) c[i] = decoded<W>(m, count, i) + b[i];
}

#define ENCODE(name, W, T) KERNEL(encode_##name##_##T, u8* m, const T* a, Long count) { encode<W>(m, a, count); }
#define DECODE(name, W, T) KERNEL(decode_##name##_##T, T* c, const u8* m, Long count) { decode<W>(c, m, count); }
#define DECODE_ADD(name, W) \
  KERNEL(decode_add_##name##_f32, f32* c, const u8* m, const f32* b, Long count) { decode_add<W>(c, m, b, count); }
#define SCALED(name, W) \
  ENCODE(name, W, f32) ENCODE(name, W, f16) ENCODE(name, W, bf16) DECODE(name, W, f32) DECODE(name, W, f16) \
  DECODE(name, W, bf16) DECODE_ADD(name, W)
SCALED(int8, INT8) SCALED(fp8_e4m3, FP8) SCALED(int4, INT4)
DECODE(bfloat16, BFLOAT16, f32) DECODE_ADD(bfloat16, BFLOAT16) DECODE(float16, FLOAT16, f32) DECODE_ADD(float16, FLOAT16)
KERNEL(encode_bfloat16_f32, u8* m, const f32* a, Long count) { encode_half<bf16>(m, a, count); }
KERNEL(encode_float16_f32, u8* m, const f32* a, Long count) { encode_half<f16>(m, a, count); }
#endif
#if HAS(3)

// --------------------------------------------------------------------------------------------- products in a fixed order

// As in native/chain.h, with the same bits: y = x @ w, each element a chain of fused multiply-adds in each of `leaves`
// parts of k, which are added in a tree. The first part begins with the bias, or with y if `adds`. A block computes
// tiles of 64 x 64, a thread 4 x 4 of one.
struct ChainSizes { Long m, n, k, leaves, x_step, x_across, w_step, w_across, y_step, adds; };

__device__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ double fused(double a, double b, double c) { return fma(a, b, c); }

template <class T> __device__ void chain(const ChainSizes& s, T* y, const T* x, const T* w, const T* bias) {
  constexpr int SIDE = 64, DEPTH = 16, OWN = 4, LEVELS = 32;
  __shared__ T left[DEPTH][SIDE], right[DEPTH][SIDE];
  const int me = int(threadIdx.x), i0 = me / 16 * OWN, j0 = me % 16 * OWN;
  const Long length = s.k / s.leaves, across = (s.n + SIDE - 1) / SIDE, tiles = (s.m + SIDE - 1) / SIDE * across;
  for (Long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Long row = tile / across * SIDE, column = tile % across * SIDE;
    T sums[LEVELS][OWN][OWN];
    Long sizes[LEVELS];
    int top = 0;
    for (Long leaf = 0; leaf < s.leaves; leaf++) {
      T sum[OWN][OWN];
      for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++) {
          const bool is_first = leaf == 0 && row + i0 + i < s.m && column + j0 + j < s.n;
          sum[i][j] = !is_first ? T(0) : s.adds ? y[(row + i0 + i) * s.y_step + column + j0 + j]
                      : bias            ? bias[column + j0 + j]
                                        : T(0);
        }
      for (Long at = leaf * length; at < (leaf + 1) * length; at += DEPTH) {
        const int depth = int((leaf + 1) * length - at < DEPTH ? (leaf + 1) * length - at : DEPTH);
        __syncthreads();  // all threads have used the last blocks
        for (int e = me; e < DEPTH * SIDE; e += int(blockDim.x)) {
          const int by_k = e / SIDE, by_side = e % SIDE;  // which is contiguous depends on the operand
          const int p = s.x_across == 1 ? e % DEPTH : by_k, i = s.x_across == 1 ? e / DEPTH : by_side;
          const int q = s.w_step == 1 ? e % DEPTH : by_k, j = s.w_step == 1 ? e / DEPTH : by_side;
          left[p][i] = p < depth && row + i < s.m ? x[(row + i) * s.x_step + (at + p) * s.x_across] : T(0);
          right[q][j] = q < depth && column + j < s.n ? w[(at + q) * s.w_step + (column + j) * s.w_across] : T(0);
        }
        __syncthreads();
        for (int p = 0; p < depth; p++)
          for (int i = 0; i < OWN; i++)
            for (int j = 0; j < OWN; j++) sum[i][j] = fused(left[p][i0 + i], right[p][j0 + j], sum[i][j]);
      }
      for (Long size = 1;; size += sizes[top]) {
        const bool merges = top && (sizes[top - 1] == size || leaf + 1 == s.leaves);
        if (!merges) {
          for (int i = 0; i < OWN; i++)
            for (int j = 0; j < OWN; j++) sums[top][i][j] = sum[i][j];
          sizes[top++] = size;
          break;
        }
        top--;
        for (int i = 0; i < OWN; i++)
          for (int j = 0; j < OWN; j++) sum[i][j] = sums[top][i][j] + sum[i][j];
      }
    }
    for (int i = 0; i < OWN; i++)
      for (int j = 0; j < OWN; j++)
        if (row + i0 + i < s.m && column + j0 + j < s.n) y[(row + i0 + i) * s.y_step + column + j0 + j] = sums[0][i][j];
  }
}

KERNEL(chain_f32, f32* y, const f32* x, const f32* w, const f32* bias, ChainSizes s) { chain(s, y, x, w, bias); }
KERNEL(chain_f64, f64* y, const f64* x, const f64* w, const f64* bias, ChainSizes s) { chain(s, y, x, w, bias); }
#endif
