#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "calibration/model_transform.h"
#include "quant/hadamard.h"
#include "quantizer/plan_config.h"

namespace nibble {
namespace {

bool is_turned(Role role) { return role == Role::kDown || role == Role::kSharedDown; }

/// Whether the sign of an element of up is that of the activation's result.
bool keeps_signs(Role up, GemmInput::Kind activation) {
  return up == Role::kSharedUp || activation == GemmInput::Kind::kSiluMul;
}

std::vector<float> signs_of(int64_t width) {
  const int64_t block = hadamard_block(width);
  std::vector<float> signs;
  for (int64_t i = 0; i < width; ++i) {
    signs.push_back(hadamard_flips(i % block) ? -1.0F : 1.0F);
  }
  return signs;
}

class TurnTransform final : public ModelTransform {
 public:
  explicit TurnTransform(const ModelConfig& config) : activation_(config.activation) {}

  [[nodiscard]] bool unties_head() const override { return false; }

  Result<TensorFold> fold_of(const ModelTensor& tensor, const Vectors&) const override {
    TensorFold fold;
    const bool bias = tensor.kind == TensorKind::kBias;
    const bool up = tensor.role == Role::kUp || tensor.role == Role::kSharedUp;
    const Role of_up = tensor.role == Role::kSharedDown ? Role::kSharedUp : tensor.role;
    if (up && keeps_signs(tensor.role, activation_)) {
      (bias ? fold.column_factors : fold.row_factors) = signs_of(tensor.shape.front());
    }
    if (is_turned(tensor.role) && !bias) {
      const int64_t width = tensor.shape.back();
      fold.column_turn = hadamard_block(width);
      if (keeps_signs(of_up, activation_)) {
        fold.column_factors = signs_of(width);
      }
    }
    return fold;
  }

  [[nodiscard]] std::vector<TurnedInputs> turned_inputs(const ModelConfig& config) const override {
    std::map<int64_t, std::vector<std::string>> by_block;
    std::vector<std::string> others;
    for (const ModelTensor& tensor : list_tensors(config)) {
      if (tensor.kind == TensorKind::kMatrix) {
        (is_turned(tensor.role) ? by_block[hadamard_block(tensor.shape.back())] : others)
            .push_back(tensor.module);
      }
    }
    std::vector<TurnedInputs> turned;
    for (const auto& [block, modules] : by_block) {
      std::vector<std::string> rest = others;
      for (const auto& [other, names] : by_block) {
        if (other != block) {
          rest.insert(rest.end(), names.begin(), names.end());
        }
      }
      turned.push_back({.targets = module_patterns(modules, rest), .block = block});
    }
    return turned;
  }

 private:
  GemmInput::Kind activation_;
};

}  // namespace

Result<std::unique_ptr<ModelTransform>> make_turn(const ModelConfig& config) {
  const bool dense = !has_experts_everywhere(config);
  if (!dense && config.moe.shared_width == 0) {
    return make_error(StatusCode::kUnsupported,
                      "--online-rotation: {} has neither dense MLPs nor an expert that every token "
                      "takes, and others are not turned; leave it out",
                      config.architecture);
  }
  for (const int64_t width : {dense ? config.intermediate_size : 0, config.moe.shared_width}) {
    if (width % 2 != 0) {
      return make_error(StatusCode::kUnsupported,
                        "--online-rotation: MLPs of {} are {} wide, which no power of two divides; "
                        "leave it out",
                        config.architecture, width);
    }
  }
  return std::unique_ptr<ModelTransform>(std::make_unique<TurnTransform>(config));
}

}  // namespace nibble
