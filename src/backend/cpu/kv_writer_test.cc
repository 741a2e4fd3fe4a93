#include "backend/cpu/kv_writer.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/isa.h"
#include "backend/cpu/kv_rows.h"

namespace nibble::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// GPUs count the same ones (StaticRanges.KnownNumbersAreCounted).
TEST(KvWriter, CountsNumbersFarOutsideOfStaticRanges) {
  constexpr int64_t kDim = 64;
  constexpr int64_t kHeads = 2;
  std::vector<float> key_steps(kHeads * kDim, 1e3F);
  std::vector<float> value_steps(kHeads * kDim, 8.0F);  // to 128 on each side
  value_steps[kDim + 9] = 0.0F;
  KvView kv{.code = KvCode::kInt4Static, .page_size = 16, .kv_heads = kHeads, .head_dim = kDim};
  kv.basis.key_step = key_steps.data();
  kv.basis.value_step = value_steps.data();
  std::vector<std::byte> pages(static_cast<size_t>(kv.page_bytes()));
  kv.pages = pages.data();
  for (const std::string_view isa : supported_isas()) {
    SCOPED_TRACE(isa);
    const KvWriter writer(*find_kernels(isa).value(), kv, layout_of(kv));
    const auto counted = [&](bool value, std::initializer_list<float> numbers) {
      const int64_t before = writer.far_outside();
      std::vector<float> x(kDim, 0.0F);
      std::ranges::copy(numbers, x.begin() + 6);  // the fourth has a step of 0
      const KvSlot slot{.kv_head = 1, .slot = 5};
      value ? writer.write_value(slot, x.data()) : writer.write_key(slot, x.data());
      return writer.far_outside() - before;
    };
    EXPECT_EQ(counted(true, {}), 0);
    EXPECT_EQ(counted(true, {128.0F, -128.0F, 1.0F, 0.0F}), 0);
    EXPECT_EQ(counted(true, {129.0F, -129.0F, 1.0F, 0.5F}), 3);
    EXPECT_EQ(counted(true, {kNan, kInfinity, -kInfinity, kNan, 0x1p100F}), 5);
    EXPECT_EQ(counted(false, {129.0F, -129.0F, 1.0F, 0.5F}), 0);
    EXPECT_EQ(counted(false, {16001.0F, kNan}), 2);
  }
}

}  // namespace
}  // namespace nibble::cpu
