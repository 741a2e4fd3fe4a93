#include "base/utf8.h"

#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace nibble {
namespace {

// Shortest valid encoding of a code point, by the definition (RFC 3629).
std::string encode(uint32_t point) {
  std::string out;
  const int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
  constexpr uint32_t kLead[] = {0, 0xc0, 0xe0, 0xf0};
  out.push_back(static_cast<char>(kLead[more] | (point >> (6 * more))));
  for (int i = more - 1; i >= 0; --i) {
    out.push_back(static_cast<char>(0x80 | ((point >> (6 * i)) & 0x3f)));
  }
  return out;
}

TEST(Utf8, EveryCodePointIsOneSequence) {
  for (uint32_t point = 0; point <= 0x110000; ++point) {
    const bool valid = point < 0xd800 || (point > 0xdfff && point < 0x110000);
    const std::string text = encode(point);
    ASSERT_EQ(utf8_length(text, 0), valid ? text.size() : 0) << point;
    ASSERT_EQ(is_utf8(text), valid) << point;
  }
}

TEST(Utf8, CutAndOverlongSequencesAreNotValid) {
  for (const std::string_view bad :
       {"\x80", "\xc3", "\xe4\xb8", "\xf0\x9f\x98", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf",
        "\xf0\x8f\xbf\xbf", "\xff", "\xf5\x80\x80\x80", "\xe4\x41\x96"}) {
    EXPECT_EQ(utf8_length(bad, 0), 0U) << bad;
    EXPECT_FALSE(is_utf8(std::string("a") + std::string(bad)));
  }
  EXPECT_TRUE(is_utf8(""));
  EXPECT_TRUE(is_utf8("a\xe4\xb8\x96z"));
}

}  // namespace
}  // namespace nibble
