#include "kvcache/kv_cache_shape.h"

#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/backend.h"

namespace nibble {
namespace {

using testing::HasSubstr;

KvSpec latent(KvCode code, int64_t rank, int64_t rope) {
  return {.code = code, .kv_heads = 1, .key_dim = rank + rope, .value_dim = rank, .latent = true};
}

KvSpec heads_of(int64_t dim) {
  return {.code = KvCode::kBf16, .kv_heads = 2, .key_dim = dim, .value_dim = dim};
}

class KvCacheShapeTest : public testing::Test {
 protected:
  [[nodiscard]] Status check(const KvSpec& layer, int64_t heads = 16) const {
    return KvCacheShape::equal_pools({layer, layer}, 64, 1).check(*backend_, heads);
  }
  std::unique_ptr<Backend> backend_ = make_cpu_backend({.threads = 1}).value();
};

// The bytes that ops/kv.h draws: codes, the rotated key in BF16, parameters.
TEST_F(KvCacheShapeTest, LatentPagesHoldWhatTheirFormatSays) {
  const auto bytes = [](KvCode code, int64_t rank, int64_t rope) {
    return layer_page_bytes(latent(code, rank, rope), 16, nullptr);
  };
  EXPECT_EQ(bytes(KvCode::kF32, 512, 64), 16 * 2304);
  EXPECT_EQ(bytes(KvCode::kBf16, 512, 64), 16 * 1152);
  EXPECT_EQ(bytes(KvCode::kFp8, 512, 64), 16 * (512 + 128 + 4));
  EXPECT_EQ(bytes(KvCode::kInt8, 512, 64), 16 * (512 + 128 + 4));
  EXPECT_EQ(bytes(KvCode::kInt4, 512, 64), 16 * (256 + 128 + 4 * 4));
  EXPECT_EQ(bytes(KvCode::kInt4, 136, 8), 16 * (68 + 16 + 2 * 4));  // a group that is not full
  for (const KvCode code : {KvCode::kF32, KvCode::kBf16, KvCode::kInt8, KvCode::kInt4}) {
    EXPECT_EQ(static_cast<double>(bytes(code, 512, 64)),
              16 * kv_token_bytes(latent(code, 512, 64)));
  }
}

TEST_F(KvCacheShapeTest, LatentsTakeTheFormatsThatHaveAFormForThem) {
  for (const KvCode code : kKvCodes) {
    const Status status = check(latent(code, 512, 64));
    EXPECT_EQ(status.ok(), kv_format(code).latent.kept) << status.message();
    if (!status.ok()) {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported);
      EXPECT_THAT(status.message(),
                  testing::AllOf(HasSubstr(std::string(kv_code_name(code))),
                                 HasSubstr("--kv-cache-dtype f32, bf16, fp8, int8, int4")));
    }
  }
}

TEST_F(KvCacheShapeTest, RowsThatNoKernelHoldsAreRefusedWithTheRemedy) {
  EXPECT_TRUE(check(heads_of(256)).ok());
  EXPECT_TRUE(check(latent(KvCode::kInt4, 24, 8)).ok());
  struct Case {
    KvSpec layer;
    int64_t heads;
    const char* says;
  };
  const Case cases[] = {
      {latent(KvCode::kBf16, 1024, 64), 16, "latent rows of up to 576 numbers"},
      {latent(KvCode::kBf16, 512, 65), 16, "this model has 577"},
      {latent(KvCode::kInt8, 20, 12), 16, "20 and 12"},
      {heads_of(584), 16, "heads of up to 576 numbers"},
      {heads_of(100), 16, "multiples of 8; this model has 100"},
      {latent(KvCode::kBf16, 512, 64), 2049, "up to 2048 query heads"},
  };
  for (const Case& refused : cases) {
    const Status status = check(refused.layer, refused.heads);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(),
                testing::AllOf(HasSubstr(refused.says), HasSubstr("quantized, not run")));
  }
}

}  // namespace
}  // namespace nibble
