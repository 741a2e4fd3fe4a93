#include "calibration/kv_calibrator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "arch/kv_specs.h"
#include "base/f16.h"
#include "base/log.h"
#include "base/math.h"
#include "calibration/kv_ranges.h"
#include "calibration/layer_runner.h"
#include "calibration/window_states.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {
namespace {

constexpr int64_t kFewTokens = 1024;  // means of fewer are off by 3 % of a channel's spread

/// Numbers of a scratch as F32.
void widen(Activations from, std::vector<float>& to) {
  if (from.type == DType::kBF16) {
    const auto* numbers = static_cast<const uint16_t*>(from.data);
    std::transform(numbers, numbers + to.size(), to.begin(), bf16_to_f32);
  } else {
    std::memcpy(to.data(), from.data, to.size() * sizeof(float));
  }
}

/// What a layer's keys, or its values, are like.
struct HalfSums {
  std::vector<double> sums;  // by channel
  KvRanges ranges;

  HalfSums(int64_t heads, int64_t head_dim)
      : sums(static_cast<size_t>(heads * head_dim)), ranges(heads, head_dim) {}

  /// Adds those of a head in one page.
  void add(const KvView& kv, int64_t head, const std::byte* half, int64_t tokens) {
    std::vector<float> row(static_cast<size_t>(kv.head_dim));
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t d = 0; d < kv.head_dim; ++d) {
        const int64_t i = token * kv.head_dim + d;
        const float value = kv.code == KvCode::kBf16
                                ? bf16_to_f32(reinterpret_cast<const uint16_t*>(half)[i])
                                : reinterpret_cast<const float*>(half)[i];
        row[static_cast<size_t>(d)] = value;
        sums[static_cast<size_t>(head * kv.head_dim + d)] += value;
      }
      ranges.add(head, row);
    }
  }
};

/// A way for keys and values into a cache, and where its error is wanted.
struct Trial {
  KvCode code = KvCode::kInt4;
  KvBasis basis;
  double* errors[2] = {nullptr, nullptr};
  double sum = 0;
};

/// The measured form of the least error; the simplest of equal ones.
HeadForm best_form(const std::array<double, kHeadForms.size()>& errors) {
  HeadForm best;
  for (const HeadForm form : kHeadForms) {
    const double error = errors.at(head_form_index(form));
    best = error >= 0 && error < errors.at(head_form_index(best)) ? form : best;
  }
  return best;
}

/// The forms and ranges of a layer that are tried.
class LayerTrials final {
 public:
  LayerTrials(KvSidecar::Layer& layer, bool sinks, const HalfSums& keys, const HalfSums& values)
      : layer_(layer),
        sinks_(sinks),
        key_ranges_(keys.ranges.candidates(about(sinks))),
        value_ranges_(values.ranges.candidates(about(sinks))),
        range_errors_{std::vector<double>(key_ranges_.size()),
                      std::vector<double>(value_ranges_.size())} {
    add_int4();
    add_page();
    add_static();
  }
  LayerTrials(const LayerTrials&) = delete;
  LayerTrials& operator=(const LayerTrials&) = delete;

  [[nodiscard]] std::vector<Trial>& trials() { return trials_; }

  /// Writes the best of each to the layer, once the errors are there. The ranges of one form are
  /// written even where no error was measured.
  void choose() {
    layer_.keys.form = best_form(layer_.keys.errors);
    layer_.values.form = best_form(layer_.values.errors);
    layer_.keys.page_form = best_form(page_errors_);
    const auto best = [](const std::vector<double>& errors) {
      return static_cast<size_t>(std::ranges::min_element(errors) - errors.begin());
    };
    layer_.keys.ranges = key_ranges_[best(range_errors_[0])];
    layer_.values.ranges = value_ranges_[best(range_errors_[1])];
  }

 private:
  static KvRanges::About about(bool sinks) {
    return sinks ? KvRanges::About::kZero : KvRanges::About::kMiddle;
  }
  [[nodiscard]] KvBasis basis_of(HeadForm keys, HeadForm values) const {
    return {.turns_keys = keys.turned,
            .turns_values = values.turned,
            .key_mean = keys.centred ? layer_.keys.mean.data() : nullptr,
            .value_mean = values.centred ? layer_.values.mean.data() : nullptr};
  }
  static KvBasis basis_of(const KvSidecar::Ranges& keys, const KvSidecar::Ranges& values) {
    return {.turns_keys = keys.turned,
            .turns_values = values.turned,
            .key_mean = keys.mean.empty() ? nullptr : keys.mean.data(),
            .value_mean = values.mean.empty() ? nullptr : values.mean.data(),
            .key_step = keys.step.data(),
            .value_step = values.step.data()};
  }

  /// Every form of keys and of values, the other half centred, where nothing forbids it, and
  /// turned.
  void add_int4() {
    const HeadForm other{.centred = !sinks_, .turned = true};
    for (const HeadForm form : kHeadForms) {
      if (sinks_ && form.centred) {
        continue;
      }
      double* const key_error = &layer_.keys.errors.at(head_form_index(form));
      double* const value_error = &layer_.values.errors.at(head_form_index(form));
      if (form == other) {
        trials_.push_back({KvCode::kInt4, basis_of(form, form), {key_error, value_error}});
        continue;
      }
      trials_.push_back({KvCode::kInt4, basis_of(form, other), {key_error}});
      trials_.push_back({KvCode::kInt4, basis_of(other, form), {value_error}});
    }
  }

  /// Keys alone: the codes of values are those of int4. A mean changes none of a channel's codes.
  void add_page() {
    for (const bool turned : {false, true}) {
      const HeadForm form{.turned = turned};
      trials_.push_back({KvCode::kInt4Page,
                         basis_of(form, {.turned = true}),
                         {&page_errors_.at(head_form_index(form))}});
    }
  }

  /// Every range beside the largest turned one of the other half.
  void add_static() {
    const KvSidecar::Ranges& keys = key_ranges_[key_ranges_.size() / 2];
    const KvSidecar::Ranges& values = value_ranges_[value_ranges_.size() / 2];
    for (size_t i = 0; i < key_ranges_.size(); ++i) {
      trials_.push_back(
          {KvCode::kInt4Static, basis_of(key_ranges_[i], values), {&range_errors_[0][i]}});
    }
    for (size_t i = 0; i < value_ranges_.size(); ++i) {
      trials_.push_back(
          {KvCode::kInt4Static, basis_of(keys, value_ranges_[i]), {&range_errors_[1][i]}});
    }
  }

  KvSidecar::Layer& layer_;
  bool sinks_;
  std::vector<KvSidecar::Ranges> key_ranges_;
  std::vector<KvSidecar::Ranges> value_ranges_;
  std::vector<double> range_errors_[2];
  std::array<double, kHeadForms.size()> page_errors_ = {-1, -1, -1, -1};
  std::vector<Trial> trials_;
};

/// A layer's cache in one code, with a list of its pages for one window.
struct CodedCache {
  PagedKvCache cache;
  std::vector<int32_t> pages;
};

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

  Result<KvSidecar::Layer> calibrate_layer(int64_t index) {
    NIBBLE_RETURN_IF_ERROR(runner_.load_attention(index));
    NIBBLE_RETURN_IF_ERROR(runner_.load_mlp(index));
    KvSidecar::Layer layer;
    HalfSums keys(config().num_kv_heads, config().head_dim);
    HalfSums values(config().num_kv_heads, config().head_dim);
    NIBBLE_RETURN_IF_ERROR(sum_up(keys, values));
    NIBBLE_RETURN_IF_ERROR(take_means(index, keys, values, layer));
    LayerTrials trials(layer, config().sinks, keys, values);
    NIBBLE_RETURN_IF_ERROR(measure(index, trials.trials()));
    trials.choose();
    if (options_.form) {
      layer.keys.form = layer.values.form = {.centred = options_.form->centred && !config().sinks,
                                             .turned = options_.form->turned};
      layer.keys.page_form = layer.keys.form;
    }
    NIBBLE_RETURN_IF_ERROR(
        states_.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          runner_.attention().forward(runner_.hidden(), context);
          runner_.has_experts() ? runner_.experts().forward(runner_.hidden(), context)
                                : runner_.mlp().forward(runner_.hidden(), context);
        }));
    runner_.unload();
    return layer;
  }

  Status sum_up(HalfSums& keys, HalfSums& values) {
    return states_.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
      runner_.attention().project(runner_.hidden(), context);
      runner_.attention().attend(context);
      const KvView& kv = context.kv;
      for (int64_t token = 0; token < rows(); token += kv.page_size) {
        const int64_t page = context.sequences.front().pages[token / kv.page_size];
        const int64_t count = std::min(kv.page_size, rows() - token);
        for (int64_t head = 0; head < kv.kv_heads; ++head) {
          keys.add(kv, head, kv.keys(page, head), count);
          values.add(kv, head, kv.values(page, head), count);
        }
      }
    });
  }

  Status take_means(int64_t index,
                    const HalfSums& keys,
                    const HalfSums& values,
                    KvSidecar::Layer& layer) {
    const auto tokens = static_cast<double>(text_.tokens());
    for (const auto& [of_half, half] :
         {std::pair(&keys, &layer.keys), std::pair(&values, &layer.values)}) {
      if (!std::ranges::all_of(of_half->sums, [](double sum) { return std::isfinite(sum); })) {
        return not_finite(index, half == &layer.keys ? "keys" : "values");
      }
      if (config().sinks) {
        continue;
      }
      std::ranges::transform(of_half->sums, std::back_inserter(half->mean),
                             [tokens](double sum) { return static_cast<float>(sum / tokens); });
    }
    return {};
  }

  /// Attention over the codes of each trial beside that over numbers as they are.
  Status measure(int64_t index, std::vector<Trial>& trials) {
    std::map<KvCode, CodedCache> caches;
    for (const Trial& trial : trials) {
      if (!caches.contains(trial.code)) {
        NIBBLE_ASSIGN_OR_RETURN(CodedCache cache, coded_cache(index, trial.code));
        caches.emplace(trial.code, std::move(cache));
      }
    }
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
          for (Trial& trial : trials) {
            std::ranges::copy(projected, qkv.begin());
            attend(caches.at(trial.code), trial.basis, context);
            widen(context.scratch[ScratchName::kAttended], coded);
            for (size_t i = 0; i < count; ++i) {
              const double error = static_cast<double>(coded[i]) - exact[i];
              trial.sum += error * error;
            }
          }
        }));
    for (const Trial& trial : trials) {
      const double error = power > 0 ? trial.sum / power : 0;
      if (!std::isfinite(error)) {
        return not_finite(index, "results");
      }
      for (double* const wanted : trial.errors) {
        if (wanted != nullptr) {
          *wanted = error;
        }
      }
    }
    return {};
  }

  void attend(const CodedCache& coded, const KvBasis& basis, ForwardContext& context) {
    SequenceSpan span = context.sequences.front();
    span.pages = coded.pages.data();
    context.kv = coded.cache.view(0);
    context.kv.basis = basis;
    context.sequences = {&span, 1};
    context.residuals =
        kv_has_residual(context.kv.code) ? context.sequences : std::span<const SequenceSpan>();
    runner_.attention().attend(context);
    context.residuals = {};
    context.sequences = context.step.input().sequences;
  }

  [[nodiscard]] Result<CodedCache> coded_cache(int64_t index, KvCode code) const {
    const std::vector<KvSpec> specs = kv_specs(config(), code);
    const int64_t page_size = runner_.backend().preferred_page_size(code);
    std::vector<int32_t> pages(static_cast<size_t>(ceil_div(rows(), page_size)));
    std::iota(pages.begin(), pages.end(), 0);
    NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, PagedKvCache::allocate(KvCacheShape::equal_pools(
                                                    {specs[static_cast<size_t>(index)]}, page_size,
                                                    std::ssize(pages))));
    return CodedCache{std::move(cache), std::move(pages)};
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

Status check_kv_calibration(const std::string& model) {
  const auto config = load_model_config(model);
  return config.ok() && config->latent.kv_rank > 0
             ? make_error(
                   StatusCode::kUnsupported,
                   "{}: config.json: field kv_lora_rank: rows of latent attention are cached "
                   "without means and ranges, so that there is nothing to calibrate; leave "
                   "the calibration of the KV cache out, and choose any --kv-cache-dtype "
                   "that has a form for them",
                   model)
             : Status();
}

Result<KvSidecar> calibrate_kv(const KvCalibrationOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_kv_calibration(options.model));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(options.model));
  NIBBLE_ASSIGN_OR_RETURN(const CalibrationText text,
                          read_model_text(options.model, config, options.text));
  if (text.tokens() < kFewTokens) {
    NIBBLE_LOG(kWarning, "{}: {} tokens say little about the means of channels; give {} or more",
               options.text.path, text.tokens(), kFewTokens);
  }
  if (config.sinks) {
    NIBBLE_LOG(kInfo,
               "{}: attention has sinks, whose logits no mean of keys moves and whose weights have "
               "no values: nothing is centred",
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
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader weights, CheckpointReader::open(options.model));
  sidecar.weights = kv_weights_digest(weights, config);
  sidecar.calibration = Json::object({{"text_xxh3", text.digest},
                                      {"windows", options.text.windows},
                                      {"length", rows},
                                      {"seed", static_cast<int64_t>(options.text.seed)},
                                      {"tokens", text.tokens()}});
  NIBBLE_RETURN_IF_ERROR(write_kv_sidecar(sidecar, kv_sidecar_shape(config), path));
  return sidecar;
}

}  // namespace nibble
