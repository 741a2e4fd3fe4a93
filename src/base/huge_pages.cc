#include "base/huge_pages.h"

#include <cstdint>

#include <sys/mman.h>

#include "base/math.h"

namespace nibble {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{1} << 21;

}  // namespace

void reserve_in_huge_pages(std::vector<float>& numbers, size_t count) {
  numbers.reserve(count);
  const auto first = reinterpret_cast<uintptr_t>(numbers.data());
  const uintptr_t begin = round_up(first, kHugePage);
  const uintptr_t end = (first + numbers.capacity() * sizeof(float)) / kHugePage * kHugePage;
  if (begin < end) {  // advice: a refusal costs time, never correctness
    static_cast<void>(::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
  }
}

}  // namespace nibble
