#include "calibration/output_errors.h"

#include <cmath>

#include <gtest/gtest.h>

#include "calibration/layer_runner.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/model_files.h"

namespace nibble {
namespace {

constexpr const char* kModel = "models/storyteller";

std::vector<std::vector<int32_t>> two_windows() {
  std::vector<std::vector<int32_t>> windows(2, std::vector<int32_t>(48));
  uint32_t state = 5;
  for (auto& window : windows) {
    for (int32_t& token : window) {
      state = state * 1664525U + 1013904223U;
      token = static_cast<int32_t>(state % 4000U);
    }
  }
  return windows;
}

/// All rows of the first products of layer 0: those of q, k and v, and of what follows.
class Rows final : public RowObserver {
 public:
  explicit Rows(size_t place) : place_(place) {}

  void begin() { next_ = 0; }
  Then observe(Step& step, const InputRows& input) override {
    if (next_++ == place_) {
      const auto count = static_cast<size_t>(step.rows() * input.width);
      std::vector<float> x(count);
      step.input_rows(input, x.data());
      rows.insert(rows.end(), x.begin(), x.end());
    }
    return Then::kMultiply;
  }

  std::vector<float> rows;

 private:
  size_t place_;
  size_t next_ = 0;
};

std::vector<float> rows_of(size_t place, const std::vector<std::vector<int32_t>>& windows) {
  const auto runner = LayerRunner::open(kModel, std::ssize(windows[0]), 1).value();
  EXPECT_TRUE(runner->load_attention(0).ok() && runner->load_mlp(0).ok());
  Rows rows(place);
  for (const auto& window : windows) {
    runner->embed(window);
    rows.begin();
    runner->run(window, [&](ForwardContext& context) {
      context.observer = &rows;
      runner->attention().forward(runner->hidden(), context);
      runner->mlp().forward(runner->hidden(), context);
    });
  }
  return rows.rows;
}

/// |Q(X) V^T - X W^T|^2 / |X W^T|^2, product by product.
double error_by_hand(const std::vector<float>& rows,
                     const PlainMatrix& w,
                     const std::vector<float>& v,
                     ActFormat act) {
  const auto k = static_cast<size_t>(w.k);
  double noise = 0;
  double signal = 0;
  for (size_t at = 0; at < rows.size(); at += k) {
    std::vector<float> rounded(rows.begin() + static_cast<int64_t>(at),
                               rows.begin() + static_cast<int64_t>(at + k));
    round_row(act, rounded.data(), w.k);
    for (size_t n = 0; n < static_cast<size_t>(w.n); ++n) {
      double exact = 0;
      double changed = 0;
      for (size_t i = 0; i < k; ++i) {
        exact += static_cast<double>(rows[at + i]) * static_cast<double>(w.w[n * k + i]);
        changed += static_cast<double>(rounded[i]) * static_cast<double>(v[n * k + i]);
      }
      noise += (exact - changed) * (exact - changed);
      signal += exact * exact;
    }
  }
  return noise / signal;
}

TEST(OutputErrors, AreThoseOfTheProducts) {
  const CheckpointReader reader = CheckpointReader::open(kModel).value();
  const SourceModel source = list_source_matrices(reader, read_config(kModel).value()).value();
  std::vector<QuantScheme> schemes;
  for (const char* name : {"w4a16_g32", "w4a8", "w8a8_int8", "w8a8_fp8", "w8a8_fp8_block"}) {
    schemes.push_back(find_scheme(name).value());
  }
  const auto windows = two_windows();
  ThreadPool pool(2);
  const std::pair<const char*, size_t> modules[] = {{"model.layers.0.self_attn.k_proj", 0},
                                                    {"model.layers.0.self_attn.o_proj", 1},
                                                    {"model.layers.0.mlp.down_proj", 3}};
  std::vector<JudgedMatrix> judged;
  for (const auto& matrix : source.matrices) {
    if (matrix->module().find("layers.0.") != std::string::npos) {
      judged.push_back({.matrix = matrix.get(), .schemes = {}});
      for (const QuantScheme& scheme : schemes) {
        judged.back().schemes.push_back(&scheme);
      }
      judged.back().schemes.push_back(nullptr);
    }
  }
  const auto errors =
      output_errors(judged, {.model = kModel, .windows = windows, .how = {.pool = pool}});
  ASSERT_TRUE(errors.ok()) << errors.status().message();
  EXPECT_EQ(errors->size(), 7U);
  for (const auto& [module, place] : modules) {
    const auto matrix = std::ranges::find_if(
        source.matrices, [&, name = module](const auto& one) { return one->module() == name; });
    const PlainMatrix plain = read_matrix(**matrix).value();
    const std::vector<float> rows = rows_of(place, windows);
    ASSERT_EQ(std::ssize(rows), 96 * plain.k);
    const SchemeErrors& found = errors->at(module);
    ASSERT_EQ(found.size(), schemes.size() + 1);
    EXPECT_FALSE(found.back().has_value());
    for (size_t i = 0; i < schemes.size(); ++i) {
      std::vector<float> values(plain.w.size());
      decode_rows(nearest_codes(plain, schemes[i], Dialect::kCompressedTensors, pool).value(),
                  values.data(), pool);
      const double exact = error_by_hand(rows, plain, values, schemes[i].act);
      // Sums in single precision; rows that are rounded, too, count as independent of weights.
      const double tolerance = rounds_rows(schemes[i].act) ? 0.05 : 1e-3;
      EXPECT_NEAR(*found[i] / exact, 1, tolerance) << schemes[i].name << " " << module;
    }
  }
}

TEST(OutputErrors, OfWeightsAloneAreTheirNoise) {
  const CheckpointReader reader = CheckpointReader::open(kModel).value();
  const SourceModel source = list_source_matrices(reader, read_config(kModel).value()).value();
  const auto matrix = std::ranges::find_if(source.matrices, [](const auto& one) {
    return one->module() == "model.layers.2.mlp.up_proj";
  });
  const QuantScheme scheme = find_scheme("mxfp4").value();
  ThreadPool pool(1);
  const auto errors =
      weight_errors({.matrix = matrix->get(), .schemes = {&scheme, nullptr}}, {.pool = pool});
  ASSERT_TRUE(errors.ok());
  EXPECT_NEAR(-10 * std::log10(*(*errors)[0]), 19.0, 0.3);  // dB: docs/quantization.md
  EXPECT_FALSE((*errors)[1].has_value());
}

}  // namespace
}  // namespace nibble
