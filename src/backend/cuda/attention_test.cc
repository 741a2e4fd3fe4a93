#include "backend/cuda/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cuda/testing/attention_case.h"
#include "backend/testing/bf16_rows.h"
#include "base/f16.h"
#include "ops/attention.h"
#include "quant/hadamard.h"

namespace nibble::cuda {
namespace {

using testing::AttentionCase;
using testing::CaseSequence;
using testing::DeviceArray;
using testing::random_values;

constexpr KvCode kOwnCodes[] = {KvCode::kBf16, KvCode::kFp8, KvCode::kInt8, KvCode::kInt4};
constexpr KvCode kCodes[] = {KvCode::kBf16, KvCode::kFp8,      KvCode::kInt8,
                             KvCode::kInt4, KvCode::kInt4Page, KvCode::kInt4Static};

AttentionShape shape_of(KvCode code, int heads, int kv_heads, int head_dim, int page_size = 64) {
  AttentionShape shape;
  shape.kv = {code, page_size, kv_heads, head_dim};
  shape.heads = heads;
  shape.scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  if (code == KvCode::kFp8) {
    shape.k_scale = 0.5F;
    shape.v_scale = 2.0F;
  }
  return shape;
}

std::string name_of(const AttentionShape& shape) {
  return fmt::format("{} heads {}/{} dim {} page {} window {} form {}", kv_code_name(shape.kv.code),
                     shape.heads, shape.kv.kv_heads, shape.kv.head_dim, shape.kv.page_size,
                     shape.sliding_window, static_cast<int>(shape.form));
}

// Rounding of the weights (bf16 or fp16) and of the result; prefill also rounds what it widens,
// whose offset that all numbers of a head share is no help where heads are turned.
constexpr double kTolerance = 6e-3;
constexpr double kWidenedTolerance = 1.5e-2;

void check_case(const AttentionShape& shape,
                const std::vector<CaseSequence>& sequences,
                int32_t longest = INT32_MAX) {
  SCOPED_TRACE(name_of(shape));
  AttentionCase test(shape, sequences, 7U + static_cast<uint32_t>(shape.kv.head_dim));
  test.longest = longest;
  test.fill_cache();
  test.run({nullptr, false});
  const bool widens =
      shape.kv.code != KvCode::kBf16 &&
      std::ranges::any_of(sequences, [](const CaseSequence& s) { return s.q_len > 1; });
  test.check(widens ? kWidenedTolerance : kTolerance);
  test.add_sinks();
  test.run({nullptr, false});
  test.check(widens ? kWidenedTolerance : kTolerance);
  if (shape.kv.code == KvCode::kBf16 && shape.form == AttentionForm::kOwn) {
    AttentionShape shared = shape;
    shared.form = AttentionForm::kShared;
    check_case(shared, sequences, longest);
  }
  if (testing::brief_tests()) {
    return;
  }
  const std::vector<uint16_t> first = test.out->host();
  test.run({nullptr, true});
  EXPECT_EQ(first, test.out->host()) << "two runs differ";
}

std::vector<CaseSequence> decode_lengths() {
  return {{1, 1}, {1, 3}, {1, 17}, {1, 63}, {1, 64}, {1, 65}, {1, 257}, {1, 700}};
}

TEST(DecodeAttention, EveryFormatAndHeadDim) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    for (const int dim : {64, 128, 256}) {
      check_case(shape_of(code, 8, 2, dim), decode_lengths());
    }
  }
}

TEST(DecodeAttention, QueryHeadsPerKvHead) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kBf16, KvCode::kInt4}) {
    for (const int ratio : {1, 5, 7, 8, 12, 16, 20}) {
      check_case(shape_of(code, ratio, 1, 128), {{1, 40}, {1, 300}});
    }
    check_case(shape_of(code, 10, 1, 256), {{1, 40}, {1, 300}});
    check_case(shape_of(code, 16, 1, 64), {{1, 40}, {1, 300}});
  }
}

TEST(DecodeAttention, SlidingWindow) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    for (const int window : {1, 50, 64, 100}) {
      AttentionShape shape = shape_of(code, 4, 2, 128);
      shape.sliding_window = window;
      check_case(shape, decode_lengths());
    }
  }
}

TEST(DecodeAttention, PageSizes) {
  NIBBLE_NEEDS_GPU();
  for (const int page : {16, 32, 48, 128}) {
    for (const KvCode code : kCodes) {
      const AttentionShape shape = shape_of(code, 4, 2, 128, page);
      if (check_attention(shape).ok()) {
        check_case(shape, decode_lengths());
      }
    }
  }
}

TEST(DecodeAttention, LongSequencesAreCutAndManyShareBlocks) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    check_case(shape_of(code, 4, 1, 128), {{1, 9001}, {1, 5}, {1, 2000}});
    std::vector<CaseSequence> many;
    for (int i = 0; i < 70; ++i) {
      many.push_back({1, 1 + i * 37 % 900});
    }
    check_case(shape_of(code, 4, 4, 64), many);
  }
}

/// Kernels for short sequences, where the shape and the number of sequences have them.
void check_short(const AttentionShape& shape,
                 const std::vector<CaseSequence>& sequences,
                 int32_t longest = kShortAttention) {
  StepMetadata step;
  step.sequences = static_cast<int32_t>(sequences.size()) + 2;  // with the case's padding
  step.longest = longest;
  const bool hopper = query_device(0).value().hopper() && !kv_has_residual(shape.kv.code);
  EXPECT_EQ(decode_reads_plan(shape, step), !hopper) << name_of(shape);
  check_case(shape, sequences, longest);
  const auto appended = [](const CaseSequence& s) { return s.q_len == 1 && s.kv_len < 2500; };
  if (hopper && std::ranges::all_of(sequences, appended)) {
    SCOPED_TRACE(name_of(shape));
    const std::vector<float> norm(static_cast<size_t>(shape.kv.head_dim), 1.25F);
    const DeviceArray<float> device_norm(norm);
    for (const bool normed : {false, true}) {
      if (testing::brief_tests() && !normed) {
        continue;
      }
      AttentionCase test(shape, sequences, 5U + static_cast<uint32_t>(shape.heads));
      test.longest = longest;
      test.q_norm = test.k_norm = normed ? device_norm.data() : nullptr;
      if (normed) {
        test.add_sinks();
      }
      test.fill_cache();
      for (const bool overlap : {false, true}) {
        if (testing::brief_tests() && !overlap) {
          continue;
        }
        test.run_appending({nullptr, overlap});
        test.check(kTolerance);
      }
    }
  }
}

class ShortDecodeAttention : public ::testing::TestWithParam<KvCode> {};

TEST_P(ShortDecodeAttention, FewSequences) {
  NIBBLE_NEEDS_GPU();
  const KvCode code = GetParam();
  for (const int dim : {64, 128}) {
    check_short(shape_of(code, 8, 2, dim), decode_lengths());
  }
  for (const int ratio : {1, 2, 3, 5, 7, 8}) {
    if (!testing::brief_tests() || ratio == 1 || ratio == 7) {
      check_short(shape_of(code, ratio, 1, 128), {{1, 40}, {1, 600}});
    }
  }
  for (const int window : {1, 50, 64, 100}) {
    if (testing::brief_tests() && window != 50) {
      continue;
    }
    AttentionShape shape = shape_of(code, 4, 2, 128);
    shape.sliding_window = window;
    check_short(shape, decode_lengths());
  }
  check_short(shape_of(code, 4, 2, 128, 192), decode_lengths());
  check_short(shape_of(code, 8, 2, 128), {{1, 300}, {90, 200}, {1, 1}, {5, 5}, {1, 129}});
}

INSTANTIATE_TEST_SUITE_P(Caches, ShortDecodeAttention, ::testing::ValuesIn(kCodes));

/// So many that a warp has whole items alone, blocks' first and last ones being cut; longer ones
/// and a prompt among them.
TEST(DecodeAttention, ManyShortSequences) {
  NIBBLE_NEEDS_GPU();
  std::vector<CaseSequence> sequences;
  for (int i = 0; i < 220; ++i) {
    sequences.push_back({1, i % 97 == 5 ? 800 + i : 1 + i * 53 % 140});
  }
  sequences[110] = {9, 40};
  for (const KvCode code : kCodes) {
    if (code != KvCode::kBf16) {  // which has kernels of all warps alone
      check_case(shape_of(code, 8, 8, 64), sequences);
    }
  }
  AttentionShape shape = shape_of(KvCode::kInt8, 8, 8, 128);
  shape.sliding_window = 70;
  check_case(shape, sequences);
}

// More of them than clusters of four or two leave room for.
TEST(DecodeAttention, MoreShortSequences) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    for (const int count : {7, 20, 40}) {
      std::vector<CaseSequence> sequences;
      for (int i = 0; i < count; ++i) {
        sequences.push_back({1, 1 + i * 331 % 200});
      }
      sequences.back().kv_len = 600;
      check_short(shape_of(code, 8, 8, count == 7 ? 128 : 64), sequences, kShorterAttention);
    }
  }
}

TEST(DecodeAttention, FewLongerSequences) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    for (const int dim : {64, 128}) {
      check_short(shape_of(code, 32, 8, dim), {{1, 1040}});
      check_short(shape_of(code, 8, 8, dim), {{1, 700}, {1, 64}, {1, 310}, {1, 1}});
      check_short(shape_of(code, 8, 2, dim), {{1, 511}, {1, 8192}});
    }
    for (const int ratio : {1, 2, 3, 5, 7, 8}) {
      check_short(shape_of(code, ratio, 1, 128), {{1, 40}, {1, 2100}});
    }
    AttentionShape shape = shape_of(code, 4, 2, 128);
    shape.sliding_window = 1000;
    check_short(shape, {{1, 999}, {1, 1000}, {1, 1001}, {1, 2100}});
  }
}

// Clusters of two blocks and of one, as many tiles of a warp as there can be.
TEST(DecodeAttention, TheLongestOfMoreShortSequences) {
  NIBBLE_NEEDS_GPU();
  for (const int heads : {24, 40}) {
    check_short(shape_of(KvCode::kBf16, heads, heads, 64), {{1, kShorterAttention}, {1, 5}},
                kShorterAttention);
  }
}

/// Whether the results of a KV head's queries of row `row` are all NaN, and those of others none.
void expect_spoiled(const AttentionCase& test, int row, int kv_head) {
  const std::vector<uint16_t> out = test.out->host();
  const int ratio = test.shape.heads / test.shape.kv.kv_heads;
  const int width = test.shape.heads * test.shape.kv.head_dim;
  for (size_t i = 0; i < out.size(); ++i) {
    const int head = static_cast<int>(i) % width / test.shape.kv.head_dim;
    const bool spoiled = static_cast<int>(i) / width == row && head / ratio == kv_head;
    if (static_cast<int>(i) / width < static_cast<int>(test.sequences.size())) {
      ASSERT_EQ(std::isnan(bf16_to_f32(out[i])), spoiled)
          << "row " << i / width << " head " << head;
    }
  }
}

// A key or value that is not finite shows in the result: codes that hid it would make nonsense of
// what the model says.
TEST(DecodeAttention, NumbersThatAreNotFiniteShow) {
  NIBBLE_NEEDS_GPU();
  constexpr int kToken = 100, kKvHead = 1;
  for (const KvCode code : {KvCode::kInt8, KvCode::kInt4, KvCode::kInt4Page}) {
    const AttentionShape shape = shape_of(code, 4, 2, 128);
    for (const bool value : {false, true}) {
      for (const float number : {NAN, INFINITY, -INFINITY}) {
        for (const int length : {kToken + 1, 300}) {
          if (kv_has_residual(code) && !value && std::isinf(number) && length == kToken + 1) {
            continue;  // the key is multiplied as it is, and -inf as a score is no weight at all
          }
          SCOPED_TRACE(::testing::Message() << name_of(shape) << (value ? " value " : " key ")
                                            << number << " length " << length);
          AttentionCase test(shape, {{1, length}, {1, 140}}, 9);
          const int head = shape.heads + kKvHead + (value ? shape.kv.kv_heads : 0);
          test.set_number(static_cast<size_t>((kToken * 8 + head) * shape.kv.head_dim + 3), number);
          test.fill_cache();
          test.run({nullptr, false});
          expect_spoiled(test, 0, kKvHead);
          if (!kv_has_residual(code) && query_device(0).value().hopper()) {
            test.longest = kShortAttention;
            test.run_appending({nullptr, true});
            expect_spoiled(test, 0, kKvHead);
          }
        }
      }
    }
  }
}

TEST(PrefillAttention, EveryFormatAndHeadDim) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    for (const int dim : {64, 128, 256}) {
      check_case(shape_of(code, 4, 2, dim), {{2, 2}, {17, 17}, {64, 64}, {130, 130}, {65, 300}});
    }
  }
}

// Rows read keys of their own group as they are and earlier ones by codes, whatever groups share a
// block.
TEST(PrefillAttention, RowsOfSeveralGroups) {
  NIBBLE_NEEDS_GPU();
  for (const int dim : {64, 128, 256}) {
    for (const int window : {0, 100}) {
      for (const int page : {64, 128}) {
        AttentionShape shape = shape_of(KvCode::kInt4Page, 4, 2, dim, page);
        shape.sliding_window = window;
        check_case(shape, {{128, 128}, {128, 160}, {129, 193}, {300, 420}, {64, 127}, {66, 129}});
      }
    }
  }
}

TEST(PrefillAttention, WindowAndPageSizes) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    for (const int page : {16, 32, 64}) {
      AttentionShape shape = shape_of(code, 4, 2, 128, page);
      shape.sliding_window = page == 32 ? 1 : 70;
      if (check_attention(shape).ok()) {
        check_case(shape, {{100, 230}, {3, 200}, {2, 129}});
      }
    }
  }
}

TEST(Attention, MixedSteps) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    check_case(shape_of(code, 8, 2, 128), {{1, 300}, {90, 200}, {1, 1}, {5, 5}, {1, 129}});
  }
}

TEST(Attention, ACapturedStepServesOtherLengths) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kCodes) {
    AttentionCase test(shape_of(code, 8, 2, 128), {{1, 900}, {1, 400}, {1, 77}}, 3);
    test.fill_cache();
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    test.launch_all({stream, true});
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (const std::vector<CaseSequence>& lengths :
         {std::vector<CaseSequence>{{1, 900}, {1, 400}, {1, 77}},
          std::vector<CaseSequence>{{1, 3}, {1, 399}, {1, 12}},
          std::vector<CaseSequence>{{1, 901 - 1}, {1, 1}, {1, 64}}}) {
      test.change_lengths(lengths);
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      test.check(kTolerance);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST(CheckAttention, RefusesWhatHasNoKernel) {
  NIBBLE_NEEDS_GPU();
  EXPECT_TRUE(check_attention(shape_of(KvCode::kInt4, 8, 2, 128)).ok());
  EXPECT_FALSE(check_attention(shape_of(KvCode::kInt4, 8, 2, 128, 32)).ok());
  EXPECT_FALSE(check_attention(shape_of(KvCode::kBf16, 8, 3, 128)).ok());
  EXPECT_FALSE(check_attention(shape_of(KvCode::kBf16, 8, 2, 96)).ok());
  EXPECT_FALSE(check_attention(shape_of(KvCode::kF32, 8, 2, 128)).ok());
}

/// k and v of the case's tokens as the CPU's oracle leaves them in a cache of this format, after an
/// optional norm of the heads.
struct Oracle {
  KvView kv;
  std::vector<std::byte> pages;
  std::vector<float> qkv;
  std::vector<int32_t> table;
};

Oracle append_on_host(const AttentionCase& test,
                      KvCode code,
                      const std::vector<float>& norm,
                      const KvBasis& basis) {
  const std::vector<float> inv_freq = test.inv_freq->host();
  const KvLayout& kv = test.shape.kv;
  Oracle oracle;
  oracle.qkv = test.qkv;
  const int64_t heads = test.shape.heads + 2 * kv.kv_heads;
  for (size_t start = 0; start < oracle.qkv.size(); start += static_cast<size_t>(kv.head_dim)) {
    const auto head = static_cast<int64_t>(start) / kv.head_dim % heads;
    if (norm.empty() || head >= test.shape.heads + kv.kv_heads) {
      continue;
    }
    double squares = 0.0;
    for (int d = 0; d < kv.head_dim; ++d) {
      squares += std::pow(oracle.qkv[start + static_cast<size_t>(d)], 2);
    }
    const double factor = 1.0 / std::sqrt(squares / kv.head_dim + 1e-6);
    for (size_t d = 0; d < static_cast<size_t>(kv.head_dim); ++d) {
      oracle.qkv[start + d] = static_cast<float>(oracle.qkv[start + d] * factor * norm[d]);
    }
  }
  const int32_t tokens = test.sequences[0].kv_len;
  oracle.kv = {code, tokens, kv.kv_heads, kv.head_dim, nullptr};
  oracle.kv.basis = basis;
  oracle.pages.resize(static_cast<size_t>(oracle.kv.page_bytes()));
  oracle.kv.pages = oracle.pages.data();
  oracle.table = {0};
  const SequenceSpan span{0, tokens, tokens, oracle.table.data(), test.sequences[0].prompt_len};
  RopeAppendArgs args;
  args.qkv = oracle.qkv.data();
  args.stride = heads * kv.head_dim;
  args.heads = test.shape.heads;
  args.inv_freq = inv_freq.data();
  args.kv = oracle.kv;
  args.sequences = {&span, 1};
  args.dynamic = test.dynamic;
  reference_rope_append(args);
  return oracle;
}

double oracle_value(const Oracle& oracle, int32_t token, int32_t head, bool value, int32_t d) {
  const KvView& kv = oracle.kv;
  const std::byte* half = value ? kv.values(0, head) : kv.keys(0, head);
  const std::byte* row = half + token * kv_row_bytes(kv.code, kv.head_dim);
  float parameters[2] = {};
  std::memcpy(parameters, half + kv.params_offset() + token * kv_row_params(kv.code) * 4,
              static_cast<size_t>(kv_row_params(kv.code)) * 4);
  if (kv.code == KvCode::kInt4Static) {
    return ((static_cast<int>(row[d / 2]) >> (d % 2 * 4)) & 15) - 8;
  }
  if (kv.code == KvCode::kInt4) {
    return ((static_cast<int>(row[d / 2]) >> (d % 2 * 4)) & 15) * parameters[0] + parameters[1];
  }
  if (kv.code == KvCode::kInt8) {
    return static_cast<int8_t>(row[d]) * static_cast<double>(parameters[0]);
  }
  float exact = 0.0F;
  std::memcpy(&exact, row + d * 4, 4);
  return exact;
}

/// Means of keys and values, on the host and on the device, and what a basis with them is there.
struct Means {
  std::vector<float> keys;
  std::vector<float> values;
  DeviceArray<float> device_keys{keys};
  DeviceArray<float> device_values{values};

  Means(int kv_heads, int head_dim)
      : keys(random_values(static_cast<size_t>(kv_heads * head_dim), 5, 0.5F)),
        values(random_values(static_cast<size_t>(kv_heads * head_dim), 6, 0.5F)) {}

  /// Of the form for keys and values; on the device or on the host.
  [[nodiscard]] KvBasis basis(HeadForm form, bool device) const {
    return {.turns_keys = form.turned,
            .turns_values = form.turned,
            .key_mean = !form.centred ? nullptr
                        : device      ? device_keys.data()
                                      : keys.data(),
            .value_mean = !form.centred ? nullptr
                          : device      ? device_values.data()
                                        : values.data()};
  }
};

enum class HeadNorm { kNone, kWeighted };

struct AppendCase {
  HeadNorm norm = HeadNorm::kNone;
  DynamicRope dynamic = {};
  HeadForm form = {.turned = true};
};

/// Mean squared error of the GPU's cache, and of the CPU's of the same format, against F32.
void check_append(const AttentionShape& shape,
                  const CaseSequence& sequence,
                  const AppendCase& how) {
  const KvCode code = shape.kv.code;
  const int head_dim = shape.kv.head_dim;
  const int tokens = sequence.kv_len;
  const bool with_norm = how.norm == HeadNorm::kWeighted;
  AttentionCase test(shape, {sequence}, 11);
  test.dynamic = how.dynamic;
  SCOPED_TRACE(name_of(test.shape));
  std::vector<float> norm;
  for (int d = 0; with_norm && d < head_dim; ++d) {
    norm.push_back(0.5F + 0.01F * static_cast<float>(d));
  }
  const DeviceArray<float> device_norm(norm);
  test.q_norm = with_norm ? device_norm.data() : nullptr;
  test.k_norm = test.q_norm;
  const Means means(shape.kv.kv_heads, head_dim);
  const bool formed = kv_format(code).turned;
  test.basis = formed ? means.basis(how.form, true) : KvBasis{};
  test.fill_cache();
  const KvBasis basis = formed ? means.basis(how.form, false) : KvBasis{};
  const Oracle exact = append_on_host(test, KvCode::kF32, norm, basis);
  const bool quantized = code == KvCode::kInt4 || code == KvCode::kInt8;
  const Oracle same = append_on_host(test, quantized ? code : KvCode::kF32, norm, basis);
  double ours = 0.0;
  double theirs = 0.0;
  double power = 0.0;
  for (int token = 0; token < tokens; ++token) {
    for (int index = 0; index < 2 * 2 * head_dim; ++index) {
      const int head = index / head_dim % 2;
      const bool value = index / head_dim >= 2;
      const int d = index % head_dim;
      const double truth = oracle_value(exact, token, head, value, d);
      ours += std::pow(test.cached(0, token, head, value, d) - truth, 2);
      theirs += std::pow(oracle_value(same, token, head, value, d) - truth, 2);
      power += truth * truth;
    }
  }
  if (quantized) {
    // Of INT4 the CPU fits each line again, which saves 2 to 4 % of normal numbers' error.
    EXPECT_LE(ours, (code == KvCode::kInt4 ? 1.05 : 1.01) * theirs + 1e-6 * power);
    EXPECT_GE(ours, 0.9 * theirs);
  } else {
    EXPECT_LE(std::sqrt(ours / power), code == KvCode::kBf16 ? 0.002 : 0.03);
  }
  const std::vector<uint16_t> rotated = test.device_qkv->host();
  const size_t width = exact.qkv.size() / static_cast<size_t>(tokens);
  for (size_t i = 0; i < exact.qkv.size(); ++i) {
    if (i % width < 4 * static_cast<size_t>(head_dim)) {
      ASSERT_NEAR(bf16_to_f32(rotated[i]), exact.qkv[i], 0.004 * std::fabs(exact.qkv[i]) + 1e-5);
    }
  }
}

/// turn_back_heads() of results of a form, with three query heads of each KV head.
void check_turn_back(int dim, HeadForm form, bool steps) {
  SCOPED_TRACE(fmt::format("{} {}{}", dim, head_form_name(form), steps ? " in steps" : ""));
  constexpr int kRows = 5, kHeads = 6, kKvHeads = 2;
  const int stride = kHeads * dim + 8;  // what lies between rows stays
  const std::vector<uint16_t> before =
      to_bf16(random_values(static_cast<size_t>(kRows * stride), 3, 1.0F));
  const DeviceArray<uint16_t> out(before);
  const Means means(kKvHeads, dim);
  AttentionLaunch launch;
  launch.shape = shape_of(KvCode::kInt4, kHeads, kKvHeads, dim);
  launch.step.rows = kRows;
  launch.out = const_cast<uint16_t*>(out.data());
  launch.out_stride = stride;
  launch.basis = means.basis(form, true);
  launch.basis.value_step = steps ? means.device_keys.data() : nullptr;  // any numbers
  ASSERT_EQ(turn_back_heads(launch, {}), cudaSuccess);
  std::vector<uint16_t> expected = before;
  for (int index = 0; index < kRows * kHeads; ++index) {
    const int head = index % kHeads;
    const auto at = static_cast<size_t>(index / kHeads * stride + head * dim);
    std::vector<float> values(static_cast<size_t>(dim));
    std::transform(before.begin() + at, before.begin() + at + dim, values.begin(), bf16_to_f32);
    const auto channels = static_cast<size_t>(head / (kHeads / kKvHeads) * dim);
    for (size_t d = 0; steps && d < values.size(); ++d) {
      values[d] *= means.keys[channels + d];
    }
    if (form.turned) {
      inverse_hadamard(values.data(), dim);
    }
    for (int d = 0; form.centred && d < dim; ++d) {
      values[static_cast<size_t>(d)] += means.values[channels + static_cast<size_t>(d)];
    }
    std::transform(values.begin(), values.end(), expected.begin() + at, f32_to_bf16);
  }
  EXPECT_EQ(out.host(), expected);
}

TEST(TurnBack, EqualsTheHosts) {
  NIBBLE_NEEDS_GPU();
  for (const int dim : {64, 128, 256}) {
    for (const HeadForm form : kHeadForms) {
      if (form != HeadForm{}) {
        check_turn_back(dim, form, false);
      }
      check_turn_back(dim, form, true);
    }
  }
}

TEST(RopeAppend, RotatesAndQuantizesAsTheOracle) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kOwnCodes) {
    for (const int dim : {64, 128, 256}) {
      const AttentionShape shape = shape_of(code, 4, 2, dim);
      check_append(shape, {1, 150}, {});
      check_append(shape, {1, 90}, {.norm = HeadNorm::kWeighted});
    }
  }
}

/// Keys as they are equal the CPU's but for the last bit of their rotation, and codes of full
/// groups lose as much as the CPU's.
void check_page_append(int dim, int page_size, HeadForm form) {
  constexpr int kTokens = 150;
  SCOPED_TRACE(fmt::format("{} pages of {} {}", dim, page_size, head_form_name(form)));
  AttentionCase test(shape_of(KvCode::kInt4Page, 4, 2, dim, page_size), {{1, kTokens}}, 11);
  const Means means(2, dim);
  test.basis = means.basis(form, true);
  test.fill_cache();
  const KvBasis basis = means.basis(form, false);
  const Oracle exact = append_on_host(test, KvCode::kF32, {}, basis);
  const Oracle same = append_on_host(test, KvCode::kInt4, {}, basis);
  double ours = 0.0, theirs = 0.0, values = 0.0, power = 0.0;
  for (int i = 0; i < kTokens * 2 * dim; ++i) {
    const int token = i / (2 * dim), head = i / dim % 2, d = i % dim;
    const double key = oracle_value(exact, token, head, false, d);
    ASSERT_NEAR(test.residual_key(0, token, head, d), key, 0.006 * std::fabs(key) + 0.004)
        << token << " " << d;
    const double value = oracle_value(exact, token, head, true, d);
    values += std::pow(test.cached(0, token, head, true, d) - value, 2);
    theirs += std::pow(oracle_value(same, token, head, true, d) - value, 2);
    if (token < kTokens / kChannelTokens * kChannelTokens) {
      ours += std::pow(test.cached(0, token, head, false, d) - key, 2);
      power += key * key;
    }
  }
  EXPECT_LE(values, 1.05 * theirs);
  // Normal numbers of a channel: INT4 with the best line loses 1.0 % of their power.
  EXPECT_LE(ours, 0.012 * power);
  EXPECT_GE(ours, 0.004 * power);
}

TEST(RopeAppend, CodesKeysOfAFullGroupByChannels) {
  NIBBLE_NEEDS_GPU();
  for (const int dim : {64, 128, 256}) {
    for (const int page_size : {64, 128}) {
      check_page_append(dim, page_size, {});
      check_page_append(dim, page_size, {.turned = true});
      check_page_append(dim, page_size, {.centred = true, .turned = true});
    }
  }
}

// A group that steps of one row fill has the codes of one that is filled at once.
TEST(RopeAppend, CodesAGroupTheSameHoweverItFills) {
  NIBBLE_NEEDS_GPU();
  const AttentionShape shape = shape_of(KvCode::kInt4Page, 4, 2, 128);
  AttentionCase at_once(shape, {{1, 192}}, 5);
  at_once.fill_cache();
  AttentionCase by_rows(shape, {{1, 192}}, 5);
  by_rows.append_in_steps({64, 62, 1, 1, 63, 1});
  for (int i = 0; i < 192 * 2 * 128; ++i) {
    const int token = i / 256, head = i / 128 % 2, d = i % 128;
    ASSERT_EQ(by_rows.cached(0, token, head, false, d), at_once.cached(0, token, head, false, d));
    ASSERT_EQ(by_rows.cached(0, token, head, true, d), at_once.cached(0, token, head, true, d));
  }
}

// Codes differ where rotations put a number on the other side of a tie alone.
void check_static_append(int dim, HeadForm form) {
  SCOPED_TRACE(fmt::format("{} {}", dim, head_form_name(form)));
  AttentionCase test(shape_of(KvCode::kInt4Static, 4, 2, dim), {{1, 150}}, 11);
  const Means means(2, dim);
  const float* device_step = test.basis.key_step;
  test.basis = means.basis(form, true);
  test.basis.key_step = test.basis.value_step = device_step;
  test.fill_cache();
  KvBasis basis = means.basis(form, false);
  basis.key_step = basis.value_step = test.steps.data();
  const Oracle same = append_on_host(test, KvCode::kInt4Static, {}, basis);
  int others = 0;
  const int count = 150 * 2 * 2 * dim;
  for (int i = 0; i < count; ++i) {
    const int token = i / (4 * dim), head = i / dim % 2, d = i % dim;
    const bool value = i / (2 * dim) % 2 == 1;
    const double want = oracle_value(same, token, head, value, d);
    const double got = test.cached(0, token, head, value, d);
    ASSERT_LE(std::fabs(got - want), 1.0) << "token " << token << " element " << d;
    others += got != want ? 1 : 0;
  }
  EXPECT_LE(others, count / 1000);
  const std::vector<uint16_t> rotated = test.device_qkv->host();
  for (size_t i = 0; i < same.qkv.size(); ++i) {
    if (i % static_cast<size_t>(8 * dim) < 4 * static_cast<size_t>(dim)) {
      ASSERT_NEAR(bf16_to_f32(rotated[i]), same.qkv[i], 0.004 * std::fabs(same.qkv[i]) + 1e-5);
    }
  }
}

TEST(RopeAppend, StaticCodesAreTheOracles) {
  NIBBLE_NEEDS_GPU();
  for (const HeadForm form : kHeadForms) {
    for (const int dim : {64, 128, 256}) {
      check_static_append(dim, form);
    }
  }
}

TEST(RopeAppend, CentresAndTurnsAsTheOracle) {
  NIBBLE_NEEDS_GPU();
  for (const HeadForm form : kHeadForms) {
    SCOPED_TRACE(head_form_name(form));
    for (const int dim : {64, 128, 256}) {
      const AttentionShape shape = shape_of(KvCode::kInt4, 4, 2, dim);
      check_append(shape, {1, 150}, {.form = form});
      check_append(shape, {1, 90}, {.norm = HeadNorm::kWeighted, .form = form});
    }
  }
}

// The kernel of short sequences changes a step's keys and values as the one that appends alone.
TEST(RopeAppend, CentresAndTurnsInShortDecodes) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "the device has no kernels for short sequences";
  }
  for (const HeadForm form : kHeadForms) {
    SCOPED_TRACE(head_form_name(form));
    for (const int dim : {64, 128}) {
      const Means means(2, dim);
      AttentionCase test(shape_of(KvCode::kInt4, 8, 2, dim), decode_lengths(), 5);
      test.longest = kShortAttention;
      test.basis = means.basis(form, true);
      test.fill_cache();
      for (const bool overlap : {false, true}) {
        test.run_appending({nullptr, overlap});
        test.check(kTolerance);
      }
    }
  }
}

TEST(RopeAppend, DynamicRopeRotatesAsTheOracle) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : kOwnCodes) {
    for (const int dim : {64, 128, 256}) {
      const AttentionShape shape = shape_of(code, 4, 2, dim);
      check_append(shape, {1, 150, 100}, {.dynamic = {40, 4.0}});
      check_append(shape, {1, 90, 20}, {HeadNorm::kWeighted, {40, 4.0}});
    }
  }
}

// The kernel of short sequences leaves the cache and the results as the one that rotates alone.
TEST(RopeAppend, DynamicRopeOfShortDecodes) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "the device has no kernels for short sequences";
  }
  for (const KvCode code : kCodes) {
    for (const int dim : {64, 128}) {
      if (kv_has_residual(code)) {
        continue;  // such kernels cannot code a group
      }
      AttentionCase test(shape_of(code, 8, 2, dim),
                         {{1, 30, 20}, {1, 41, 40}, {1, 90, 20}, {1, 257, 200}, {1, 700, 1}}, 5);
      test.longest = kShortAttention;
      test.dynamic = {.original = 40, .factor = 4.0};
      test.fill_cache();
      for (const bool overlap : {false, true}) {
        test.run_appending({nullptr, overlap});
        test.check(kTolerance);
      }
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
