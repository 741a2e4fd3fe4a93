#include "calibration/kv_calibrator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "arch/kv_specs.h"
#include "base/f16.h"
#include "base/log.h"
#include "base/math.h"
#include "calibration/layer_runner.h"
#include "calibration/window_states.h"

namespace nibble {
namespace {

constexpr KvCode kCode = KvCode::kInt4;
static_assert(kv_format(kCode).turned);
constexpr int64_t kFewTokens = 1024;  // means of fewer are off by 3 % of a channel's spread
constexpr size_t kNotMeasured = kHeadForms.size();

/// Numbers of a scratch as F32.
void widen(Activations from, std::vector<float>& to) {
  if (from.type == DType::kBF16) {
    const auto* numbers = static_cast<const uint16_t*>(from.data);
    std::transform(numbers, numbers + to.size(), to.begin(), bf16_to_f32);
  } else {
    std::memcpy(to.data(), from.data, to.size() * sizeof(float));
  }
}

/// Adds the keys or values of a head in one page to `sums` [head_dim].
void add_rows(const KvView& kv, const std::byte* half, int64_t tokens, double* sums) {
  for (int64_t i = 0; i < tokens * kv.head_dim; ++i) {
    const double value = kv.code == KvCode::kBf16
                             ? bf16_to_f32(reinterpret_cast<const uint16_t*>(half)[i])
                             : reinterpret_cast<const float*>(half)[i];
    sums[i % kv.head_dim] += value;
  }
}

/// A form for keys and one for values, and whose error it tells: an index of errors, or none.
struct Trial {
  HeadForm keys;
  HeadForm values;
  size_t key_error = kNotMeasured;
  size_t value_error = kNotMeasured;
};

/// Every form of keys beside one of values, then the other forms of values.
std::vector<Trial> all_trials(bool sinks) {
  constexpr HeadForm kKeys{.centred = true, .turned = true};
  const HeadForm values{.centred = !sinks, .turned = true};
  std::vector<Trial> trials;
  trials.reserve(2 * kHeadForms.size());
  for (const HeadForm form : kHeadForms) {
    trials.push_back({form, values, head_form_index(form),
                      form == kKeys ? head_form_index(values) : kNotMeasured});
  }
  for (const HeadForm form : kHeadForms) {
    if (form != values && !(sinks && form.centred)) {
      trials.push_back({kKeys, form, kNotMeasured, head_form_index(form)});
    }
  }
  return trials;
}

/// The measured form of the least error; the simplest of equal ones.
HeadForm best_form(const std::array<double, kHeadForms.size()>& errors) {
  HeadForm best;
  for (const HeadForm form : kHeadForms) {
    const double error = errors.at(head_form_index(form));
    best = error >= 0 && error < errors.at(head_form_index(best)) ? form : best;
  }
  return best;
}

class KvCalibrator final {
 public:
  KvCalibrator(const KvCalibrationOptions& options,
               const CalibrationText& text,
               LayerRunner& runner,
               WindowStates states)
      : options_(options), text_(text), runner_(runner), states_(std::move(states)) {}

  Result<std::vector<KvSidecar::Layer>> run() {
    std::vector<KvSidecar::Layer> layers;
    for (int64_t index = 0; index < config().num_layers; ++index) {
      NIBBLE_ASSIGN_OR_RETURN(KvSidecar::Layer layer, calibrate_layer(index));
      layers.push_back(std::move(layer));
      if (options_.progress) {
        options_.progress(index + 1, config().num_layers);
      }
    }
    return layers;
  }

 private:
  [[nodiscard]] const ModelConfig& config() const { return runner_.config(); }
  [[nodiscard]] int64_t rows() const { return std::ssize(text_.windows.front()); }
  [[nodiscard]] size_t channels() const {
    return static_cast<size_t>(config().num_kv_heads * config().head_dim);
  }

  Result<KvSidecar::Layer> calibrate_layer(int64_t index) {
    NIBBLE_RETURN_IF_ERROR(runner_.load_attention(index));
    NIBBLE_RETURN_IF_ERROR(runner_.load_mlp(index));
    const bool chosen = options_.form.has_value();
    KvSidecar::Layer layer;
    NIBBLE_RETURN_IF_ERROR(take_means(index, layer));
    if (!chosen) {
      NIBBLE_RETURN_IF_ERROR(measure(index, layer));
    }
    layer.keys.form = chosen ? *options_.form : best_form(layer.keys.errors);
    layer.values.form = chosen ? *options_.form : best_form(layer.values.errors);
    layer.values.form.centred = layer.values.form.centred && !config().sinks;
    NIBBLE_RETURN_IF_ERROR(
        states_.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          runner_.attention().forward(runner_.hidden(), context);
          runner_.has_experts() ? runner_.experts().forward(runner_.hidden(), context)
                                : runner_.mlp().forward(runner_.hidden(), context);
        }));
    runner_.unload();
    return layer;
  }

  Status take_means(int64_t index, KvSidecar::Layer& layer) {
    std::vector<double> keys(channels());
    std::vector<double> values(channels());
    NIBBLE_RETURN_IF_ERROR(
        states_.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
          runner_.attention().project(runner_.hidden(), context);
          runner_.attention().attend(context);
          const KvView& kv = context.kv;
          for (int64_t token = 0; token < rows(); token += kv.page_size) {
            const int64_t page = context.sequences.front().pages[token / kv.page_size];
            const int64_t count = std::min(kv.page_size, rows() - token);
            for (int64_t head = 0; head < kv.kv_heads; ++head) {
              add_rows(kv, kv.keys(page, head), count, keys.data() + head * kv.head_dim);
              add_rows(kv, kv.values(page, head), count, values.data() + head * kv.head_dim);
            }
          }
        }));
    const auto tokens = static_cast<double>(text_.tokens());
    for (const auto& [sums, half] :
         {std::pair(&keys, &layer.keys), std::pair(&values, &layer.values)}) {
      if (!std::ranges::all_of(*sums, [](double sum) { return std::isfinite(sum); })) {
        return not_finite(index, half == &layer.keys ? "keys" : "values");
      }
      if (half == &layer.values && config().sinks) {
        continue;
      }
      std::ranges::transform(*sums, std::back_inserter(half->mean),
                             [tokens](double sum) { return static_cast<float>(sum / tokens); });
    }
    return {};
  }

  Status measure(int64_t index, KvSidecar::Layer& layer) {
    NIBBLE_ASSIGN_OR_RETURN(const PagedKvCache cache, coded_cache(index));
    const std::vector<Trial> trials = all_trials(config().sinks);
    std::vector<double> errors(trials.size());
    double power = 0;
    const auto count = static_cast<size_t>(rows() * config().num_heads * config().head_dim);
    std::vector<float> exact(count);
    std::vector<float> coded(count);
    NIBBLE_RETURN_IF_ERROR(
        states_.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
          runner_.attention().project(runner_.hidden(), context);
          const std::span<std::byte> qkv = runner_.scratch_rows(ScratchName::kQkv, rows());
          const std::vector<std::byte> projected(qkv.begin(), qkv.end());
          runner_.attention().attend(context);
          widen(context.scratch[ScratchName::kAttended], exact);
          for (const float x : exact) {
            power += static_cast<double>(x) * x;
          }
          context.kv = cache.view(0);
          for (size_t trial = 0; trial < trials.size(); ++trial) {
            std::ranges::copy(projected, qkv.begin());
            context.kv.basis = basis_of_trial(trials[trial], layer);
            runner_.attention().attend(context);
            widen(context.scratch[ScratchName::kAttended], coded);
            for (size_t i = 0; i < count; ++i) {
              const double error = static_cast<double>(coded[i]) - exact[i];
              errors[trial] += error * error;
            }
          }
        }));
    for (size_t trial = 0; trial < trials.size(); ++trial) {
      const double error = power > 0 ? errors[trial] / power : 0;
      if (!std::isfinite(error)) {
        return not_finite(index, "results");
      }
      if (trials[trial].key_error != kNotMeasured) {
        layer.keys.errors.at(trials[trial].key_error) = error;
      }
      if (trials[trial].value_error != kNotMeasured) {
        layer.values.errors.at(trials[trial].value_error) = error;
      }
    }
    return {};
  }

  [[nodiscard]] Result<PagedKvCache> coded_cache(int64_t index) const {
    const std::vector<KvSpec> specs = kv_specs(config(), kCode);
    const int64_t page_size = runner_.page_size();
    return PagedKvCache::allocate(KvCacheShape::equal_pools(
        {specs[static_cast<size_t>(index)]}, page_size, ceil_div(rows(), page_size)));
  }

  static KvBasis basis_of_trial(const Trial& trial, const KvSidecar::Layer& layer) {
    return {.turns_keys = trial.keys.turned,
            .turns_values = trial.values.turned,
            .key_mean = trial.keys.centred ? layer.keys.mean.data() : nullptr,
            .value_mean = trial.values.centred ? layer.values.mean.data() : nullptr};
  }

  [[nodiscard]] Status not_finite(int64_t index, std::string_view what) const {
    return make_error(StatusCode::kCorrupt,
                      "{}: layer {}: attention's {} are not finite on the text; its weights are "
                      "damaged, or overflow",
                      options_.model, index, what);
  }

  const KvCalibrationOptions& options_;
  const CalibrationText& text_;
  LayerRunner& runner_;
  WindowStates states_;  // a layer's inputs
};

}  // namespace

Result<KvSidecar> calibrate_kv(const KvCalibrationOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(options.model));
  NIBBLE_ASSIGN_OR_RETURN(const CalibrationText text,
                          read_model_text(options.model, config, options.text));
  if (text.tokens() < kFewTokens) {
    NIBBLE_LOG(kWarning, "{}: {} tokens say little about the means of channels; give {} or more",
               options.text.path, text.tokens(), kFewTokens);
  }
  if (config.sinks) {
    NIBBLE_LOG(kInfo,
               "{}: attention has sinks, whose weights do not add up to 1: values are not centred, "
               "keys may be",
               options.model);
  }
  const int64_t rows = std::ssize(text.windows.front());
  NIBBLE_ASSIGN_OR_RETURN(const auto runner,
                          LayerRunner::open(options.model, rows, options.threads));
  const std::string path = kv_sidecar_path(options.model);
  NIBBLE_ASSIGN_OR_RETURN(
      WindowStates states,
      WindowStates::create({.runner = *runner, .windows = text.windows, .stop = options.stop},
                           path));
  KvSidecar sidecar;
  NIBBLE_ASSIGN_OR_RETURN(sidecar.layers,
                          KvCalibrator(options, text, *runner, std::move(states)).run());
  sidecar.calibration = Json::object({{"text_xxh3", text.digest},
                                      {"windows", options.text.windows},
                                      {"length", rows},
                                      {"seed", static_cast<int64_t>(options.text.seed)},
                                      {"tokens", text.tokens()}});
  NIBBLE_RETURN_IF_ERROR(write_kv_sidecar(sidecar, kv_sidecar_shape(config), path));
  return sidecar;
}

}  // namespace nibble
