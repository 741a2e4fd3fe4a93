#include "calibration/expert_errors.h"

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "arch/family.h"
#include "calibration/output_errors.h"
#include "calibration/testing/calibration_test_base.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/model_files.h"

namespace nibble {
namespace {

constexpr double kShare = 4;  // of the columns: so many rows the layer's sums count as

/// Keeps the rows of every expert.
class Rows final : public ExpertObserver {
 public:
  explicit Rows(int64_t k) : k_(k) {}
  [[nodiscard]] bool wants(int32_t /*expert*/) const override { return true; }
  void observe(int32_t expert, std::span<const int64_t> of, const float* rows) override {
    std::vector<float>& to = seen[expert];
    to.insert(to.end(), rows, rows + std::ssize(of) * k_);
  }

  std::map<int64_t, std::vector<float>> seen;

 private:
  int64_t k_;
};

using ExpertRows = std::map<int64_t, std::vector<float>>;

ExpertRows rows_of(const std::string& model,
                   const std::vector<std::vector<int32_t>>& windows,
                   ExpertPart part) {
  const auto runner = LayerRunner::open(model, std::ssize(windows[0]), 1).value();
  EXPECT_TRUE(runner->load_attention(0).ok() && runner->load_mlp(0).ok());
  const ModelConfig& config = runner->config();
  Rows rows(part == ExpertPart::kDown ? config.moe.width : config.hidden_size);
  for (const auto& window : windows) {
    runner->embed(window);
    runner->run(window, [&](ForwardContext& context) {
      runner->attention().forward(runner->hidden(), context);
      runner->experts().normalize(runner->hidden(), context);
      const ConstActivations x = context.scratch[ScratchName::kNormed];
      runner->experts().routed().show_rows(
          {.x = x, .chosen_by = x, .x_stride = config.hidden_size, .m = context.rows, .part = part},
          rows);
    });
  }
  return rows.seen;
}

/// Squares of rows times the weights, and of rounded rows times their values less these.
struct Squares {
  double whole = 0;
  double noise = 0;
};

Squares squares_of(const std::vector<float>& rows,
                   const PlainMatrix& w,
                   const std::vector<float>& values,
                   ActFormat act) {
  Squares out;
  const auto k = static_cast<size_t>(w.k);
  for (size_t at = 0; at < rows.size(); at += k) {
    std::vector<float> rounded(rows.begin() + static_cast<int64_t>(at),
                               rows.begin() + static_cast<int64_t>(at + k));
    if (rounds_rows(act)) {
      round_row(act, rounded.data(), w.k);
    }
    for (size_t n = 0; n < static_cast<size_t>(w.n); ++n) {
      double whole = 0;
      double weights = 0;
      double inputs = 0;
      for (size_t i = 0; i < k; ++i) {
        const double x = rows[at + i];
        whole += x * w.w[n * k + i];
        weights += x * (static_cast<double>(w.w[n * k + i]) - values[n * k + i]);
        inputs += (rounded[i] - x) * values[n * k + i];
      }
      out.whole += whole * whole;
      out.noise += weights * weights + inputs * inputs;  // as if independent of each other
    }
  }
  return out;
}

class ExpertErrors : public Calibration, public testing::WithParamInterface<const char*> {};

/// Routed rows of the experts, one after the other.
std::vector<float> joined(const ExpertRows& experts) {
  std::vector<float> all;
  for (const auto& [expert, rows] : experts) {
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

TEST_P(ExpertErrors, AreThoseOfTheRowsThatAreRouted) {
  const std::string model = dummy(GetParam());
  const CheckpointReader reader = CheckpointReader::open(model).value();
  const SourceModel source = list_source_matrices(reader, read_config(model).value()).value();
  const auto runner = LayerRunner::open(model, 20, 1).value();
  const ModelConfig& config = runner->config();
  std::vector<std::vector<int32_t>> windows(2, std::vector<int32_t>(20));
  for (size_t i = 0; i < 40; ++i) {
    windows[i / 20][i % 20] = static_cast<int32_t>((i * i * 37 + 11) % 250);
  }
  const std::vector<QuantScheme> schemes = {find_scheme("w4a16_channel").value(),
                                            find_scheme("w4a8").value()};
  std::map<std::string, const SourceMatrix*> by_module;
  std::vector<JudgedMatrix> judged;
  for (const auto& matrix : source.matrices) {
    by_module[matrix->module()] = matrix.get();
    judged.push_back({.matrix = matrix.get(), .schemes = {&schemes[0], &schemes[1]}});
  }
  ThreadPool pool(2);
  OutputErrorOptions options{
      .model = model, .windows = windows, .how = {.reader = &reader, .pool = pool}};
  const auto errors = output_errors(judged, options);
  ASSERT_TRUE(errors.ok()) << errors.status().message();
  options.memory = 0;  // one expert at a time
  EXPECT_EQ(output_errors(judged, options).value(), *errors);
  for (const Role role : {Role::kExpertGate, Role::kExpertUp, Role::kExpertDown}) {
    const ExpertRows rows = rows_of(
        model, windows, role == Role::kExpertDown ? ExpertPart::kDown : ExpertPart::kGateUp);
    const std::vector<float> all = joined(rows);
    for (size_t scheme = 0; scheme < schemes.size(); ++scheme) {
      double whole = 0;
      std::map<std::string, double> noise;
      for (int64_t expert = 0; expert < config.moe.experts; ++expert) {
        const std::string module = module_name(*config.family, role, 0, expert);
        const PlainMatrix plain = read_matrix(*by_module.at(module)).value();
        std::vector<float> values(plain.w.size());
        decode_rows(
            nearest_codes(plain, schemes[scheme], Dialect::kCompressedTensors, pool).value(),
            values.data(), pool);
        const auto own = rows.find(expert);
        const Squares routed = own == rows.end()
                                   ? Squares{}
                                   : squares_of(own->second, plain, values, schemes[scheme].act);
        const Squares layer = squares_of(all, plain, values, schemes[scheme].act);
        const double share = static_cast<double>(plain.k) / kShare /
                             (static_cast<double>(all.size()) / static_cast<double>(plain.k));
        whole += (routed.whole + share * layer.whole) / static_cast<double>(config.moe.experts);
        noise[module] = routed.noise + share * layer.noise;
      }
      for (const auto& [module, squares] : noise) {
        EXPECT_NEAR(*errors->at(module)[scheme] / (squares / whole), 1, 1e-3) << module;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families,
                         ExpertErrors,
                         testing::Values("mixtral", "qwen2_moe", "gpt_oss"));

TEST_F(Calibration, SharedExpertsAreJudgedByOutputs) {
  const std::string model = dummy("qwen2_moe");
  const CheckpointReader reader = CheckpointReader::open(model).value();
  const SourceModel source = list_source_matrices(reader, read_config(model).value()).value();
  const QuantScheme scheme = find_scheme("w8a16_channel").value();
  std::vector<JudgedMatrix> judged;
  size_t layers = 0;
  for (const auto& matrix : source.matrices) {
    if (matrix->module().find(".layers.") != std::string::npos) {
      judged.push_back({.matrix = matrix.get(), .schemes = {&scheme}});
      layers += matrix->module().ends_with(".gate") || matrix->module().ends_with("expert_gate");
    }
  }
  ThreadPool pool(1);
  const std::vector<std::vector<int32_t>> windows(1, std::vector<int32_t>(16, 7));
  const auto errors =
      output_errors(judged, {.model = model, .windows = windows, .how = {.pool = pool}});
  ASSERT_TRUE(errors.ok()) << errors.status().message();
  EXPECT_EQ(errors->size(), judged.size() - layers);  // all but routers and gates
}

}  // namespace
}  // namespace nibble
