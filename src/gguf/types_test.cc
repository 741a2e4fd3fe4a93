#include "gguf/types.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble::gguf {
namespace {

TEST(GgufTypes, HaveTheSizesOfGgml) {
  EXPECT_EQ(type_traits(Type::kQ4_0).bytes, 18);
  EXPECT_EQ(type_traits(Type::kQ6_K).bytes, 210);
  EXPECT_EQ(type_traits(Type::kQ6_K).elements, 256);
  EXPECT_EQ(type_traits(Type::kMXFP4).bytes, 17);
  EXPECT_EQ(type_traits(Type::kBF16).bytes, 2);
  EXPECT_TRUE(type_traits(Type::kF64).is_number);
  EXPECT_FALSE(type_traits(Type::kQ8_0).is_number);
}

TEST(GgufTypes, ThatAreNotReadAreRefusedByName) {
  int read = 0;
  int named = 0;
  for (uint32_t number = 0; number <= 41; ++number) {
    const auto type = type_from_number(number);
    if (type.ok()) {
      EXPECT_EQ(static_cast<uint32_t>(*type), number);
      EXPECT_EQ(type_traits(*type).type, *type);
      ++read;
    } else {
      EXPECT_EQ(type.status().code(), StatusCode::kUnsupported) << type.status().message();
      ++named;
    }
  }
  EXPECT_EQ(read, 19);
  EXPECT_EQ(named, 23);
  EXPECT_THAT(type_from_number(23).status().message(), testing::HasSubstr("IQ4_XS"));
  EXPECT_THAT(type_from_number(40).status().message(), testing::HasSubstr("NVFP4"));
  EXPECT_EQ(type_from_number(42).status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(type_from_number(0xffffffff).status().code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace nibble::gguf
