#pragma once

#include <cstdint>

// The loop of ceilings_*.cc over vector registers, compiled for each instruction set.
namespace nibble::cpu {
namespace {

/// Twelve sums, each sum = add(sum, x, y) once a turn. The empty instructions keep the compiler
/// from making one of equal sums, from taking x and y out of the loop, and from dropping it.
template <typename Vector, typename Add>
[[gnu::always_inline]] inline void register_loop(Vector x,
                                                 Vector y,
                                                 int64_t turns,
                                                 const Add& add) {
  Vector sums[12] = {};
  for (Vector& sum : sums) {
    __asm__ volatile("" : "+v"(sum));
  }
  for (int64_t turn = 0; turn < turns; ++turn) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 12
    for (Vector& sum : sums) {
      sum = add(sum, x, y);
    }
  }
  for (Vector& sum : sums) {
    __asm__ volatile("" : "+v"(sum));
  }
}

}  // namespace
}  // namespace nibble::cpu
