// CUDA C on the CPU: a compiler that reads this file first compiles kernels.cu for the tests.
//
// A kernel runs block by block. The threads of a block are fibers: each runs until it ends or reaches a barrier. A
// barrier opens when all threads that have not ended stand at it. If no barrier can open, the launch returns 1.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <memory>
#include <utility>

#define __device__
#define __shared__ static  // blocks run one after the other
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace fiber {
enum State { READY, AT_WARP, AT_BLOCK, ENDED };
constexpr int MOST = 1024, STACK = 1 << 16;
static ucontext_t scheduler, threads[MOST];
static State state[MOST];
static char exchanged[2][MOST][8];
static int turn[MOST];
static void (*body)(void*);
static void* argument;

inline void wait(State at) {
  const unsigned me = threadIdx.x;
  state[me] = at;
  swapcontext(&threads[me], &scheduler);
  threadIdx.x = me;
}
inline void run() { body(argument); state[threadIdx.x] = ENDED; }
inline bool all(int begin, int end, State at) {
  for (int t = begin; t < end; t++) if (state[t] != at) return false;
  return true;
}
inline bool open(int begin, int end, State at) {
  if (!all(begin, end, at)) return false;
  for (int t = begin; t < end; t++) state[t] = READY;
  return true;
}

// Runs one block. False if its threads stand at different barriers.
inline bool run_block(int count, char* stacks) {
  for (int t = 0; t < count; t++) {
    getcontext(&threads[t]);
    threads[t].uc_stack.ss_sp = stacks + size_t(t) * STACK;
    threads[t].uc_stack.ss_size = STACK;
    threads[t].uc_link = &scheduler;
    makecontext(&threads[t], run, 0);
    state[t] = READY, turn[t] = 0;
  }
  for (bool going = true; going;) {
    for (int t = 0; t < count; t++)
      if (state[t] == READY) threadIdx.x = t, swapcontext(&scheduler, &threads[t]);
    going = open(0, count, AT_BLOCK);
    for (int w = 0; w < count; w += 32) going |= open(w, w + 32 < count ? w + 32 : count, AT_WARP);
  }
  return all(0, count, ENDED);
}

template <class... P, size_t... I>
int launch(void (*kernel)(P...), std::index_sequence<I...>, unsigned grid, unsigned block, void** args) {
  auto call = [&] { kernel(*(P*)args[I]...); };
  body = [](void* f) { (*(decltype(call)*)f)(); };
  argument = &call;
  std::unique_ptr<char[]> stacks(new char[size_t(block) * STACK]);
  gridDim = {grid, 1, 1}, blockDim = {block, 1, 1};
  for (unsigned b = 0; b < grid; b++) {
    blockIdx = {b, 0, 0};
    if (!run_block(block, stacks.get())) return 1;
  }
  return 0;
}
}  // namespace fiber

// As cuLaunchKernel takes it: run_NAME(grid, block, pointers to the arguments).
template <class... P> int launch(void (*kernel)(P...), unsigned grid, unsigned block, void** args) {
  return fiber::launch(kernel, std::index_sequence_for<P...>(), grid, block, args);
}
#define KERNEL(name, ...) \
  extern "C" void name(__VA_ARGS__); \
  extern "C" int run_##name(unsigned grid, unsigned block, void** args) { return launch(name, grid, block, args); } \
  extern "C" void name(__VA_ARGS__)

inline void __syncthreads() { fiber::wait(fiber::AT_BLOCK); }
template <class T> T __shfl_xor_sync(unsigned, T value, int distance) {
  const unsigned me = threadIdx.x, turn = fiber::turn[me]++ % 2;  // two: a thread may be one exchange ahead
  *(T*)fiber::exchanged[turn][me] = value;
  fiber::wait(fiber::AT_WARP);
  return *(T*)fiber::exchanged[turn][me ^ distance];
}

inline float from_half(unsigned short bits) { _Float16 x; __builtin_memcpy(&x, &bits, 2); return x; }
inline unsigned short to_half(float x) {
  const _Float16 half = x;
  unsigned short bits;
  __builtin_memcpy(&bits, &half, 2);
  return bits;
}
inline float times(float a, float b) { return a * b; }  // compiled without contraction
