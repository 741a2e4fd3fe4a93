#include "calibration/output_errors.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <set>
#include <utility>

#include "arch/family.h"
#include "calibration/expert_errors.h"
#include "calibration/layer_runner.h"
#include "calibration/place_sums.h"
#include "calibration/window_states.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/algorithms/output_error.h"

namespace nibble {
namespace {

/// Matrices that share the input of one place within a layer.
using Place = std::vector<Role>;
/// In the order in which they multiply.
const std::vector<Place> kAttention = {{Role::kQuery, Role::kKey, Role::kValue},
                                       {Role::kAttentionOutput}};
const std::vector<Place> kMlp = {{Role::kGate, Role::kUp}, {Role::kDown}};
const std::vector<Place> kShared = {{Role::kSharedGate, Role::kSharedUp}, {Role::kSharedDown}};

/// Sees the rows of a layer's products one after the other.
class LayerObserver final : public RowObserver {
 public:
  LayerObserver(const std::set<ActFormat>& rounded, ThreadPool& pool)
      : rounded_(rounded), pool_(pool) {}

  /// Before each window.
  void begin() { next_ = 0; }

  Then observe(Step& step, const InputRows& rows) override {
    const size_t place = next_++;
    if (place >= sums_.size()) {
      sums_.emplace_back(rows.width, rounded_);
    }
    CHECK_EQ(sums_[place].rows().k(), rows.width);
    x_.resize(static_cast<size_t>(step.rows() * rows.width));
    step.input_rows(rows, x_.data());
    sums_[place].add(x_, pool_);
    return Then::kMultiply;
  }

  std::vector<PlaceSums> take() {
    for (PlaceSums& sums : sums_) {
      sums.finish();
    }
    return std::exchange(sums_, {});
  }

 private:
  const std::set<ActFormat>& rounded_;
  ThreadPool& pool_;
  size_t next_ = 0;
  std::vector<PlaceSums> sums_;
  std::vector<float> x_;
};

/// A matrix in memory, to be rounded in one scheme after the other.
class Judge final {
 public:
  static Result<Judge> open(const JudgedMatrix& judged, const Judging& how) {
    NIBBLE_ASSIGN_OR_RETURN(PlainMatrix matrix, read_matrix(*judged.matrix, how.reader));
    return Judge(judged.schemes, std::move(matrix), how.dialect, how.pool);
  }

  /// By `error` of the scheme, of the weights in w() and in values().
  Result<SchemeErrors> each(const std::function<double(const QuantScheme&)>& error) {
    SchemeErrors errors(schemes_.size());
    for (size_t i = 0; i < errors.size(); ++i) {
      if (schemes_[i] != nullptr) {
        NIBBLE_ASSIGN_OR_RETURN(const QuantTensor codes,
                                nearest_codes(matrix_, *schemes_[i], dialect_, pool_));
        decode_rows(codes, values_.data(), pool_);
        errors[i] = error(*schemes_[i]);
      }
    }
    return errors;
  }

  [[nodiscard]] const std::vector<float>& w() const { return matrix_.w; }
  [[nodiscard]] const std::vector<float>& values() const { return values_; }

 private:
  Judge(const std::vector<const QuantScheme*>& schemes,
        PlainMatrix matrix,
        Dialect dialect,
        ThreadPool& pool)
      : schemes_(schemes),
        matrix_(std::move(matrix)),
        dialect_(dialect),
        pool_(pool),
        values_(matrix_.w.size()) {}

  const std::vector<const QuantScheme*>& schemes_;
  PlainMatrix matrix_;
  Dialect dialect_;
  ThreadPool& pool_;
  std::vector<float> values_;
};

class OutputJudge final {
 public:
  OutputJudge(const std::vector<JudgedMatrix>& matrices, const OutputErrorOptions& options)
      : options_(options) {
    for (const JudgedMatrix& judged : matrices) {
      by_module_.emplace(judged.matrix->module(), &judged);
      for (const QuantScheme* scheme : judged.schemes) {
        if (scheme != nullptr && rounds_rows(scheme->act)) {
          rounded_.insert(scheme->act);
        }
      }
    }
  }

  Result<std::map<std::string, SchemeErrors>> run() {
    const auto rows = std::ssize(options_.windows.front());
    NIBBLE_ASSIGN_OR_RETURN(runner_,
                            LayerRunner::open(options_.model, rows, options_.how.pool.threads()));
    NIBBLE_RETURN_IF_ERROR(runner_->refuse_latent_attention());
    std::error_code error;
    const std::string beside = std::filesystem::temp_directory_path(error) / "nibble";
    NIBBLE_ASSIGN_OR_RETURN(
        WindowStates states,
        WindowStates::create({.runner = *runner_, .windows = options_.windows}, beside));
    for (int64_t layer = 0; layer < runner_->config().num_layers; ++layer) {
      NIBBLE_RETURN_IF_ERROR(run_layer(layer, states));
      options_.progress(layer + 1);
    }
    return std::move(errors_);
  }

 private:
  Status run_layer(int64_t layer, WindowStates& states) {
    NIBBLE_RETURN_IF_ERROR(runner_->load_attention(layer));
    NIBBLE_RETURN_IF_ERROR(runner_->load_mlp(layer));
    const bool dense = !runner_->has_experts();
    LayerObserver observer(rounded_, options_.how.pool);
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          observer.begin();
          context.observer = &observer;
          runner_->attention().forward(runner_->hidden(), context);
          if (dense) {
            runner_->mlp().forward(runner_->hidden(), context);
          }
        }));
    std::vector<Place> places = kAttention;
    if (dense) {
      runner_->unload();
      places.insert(places.end(), kMlp.begin(), kMlp.end());
    }
    NIBBLE_RETURN_IF_ERROR(judge_places(layer, places, observer.take()));
    return dense ? Status() : run_experts(layer, states);
  }

  /// The shared expert and the routed ones of a layer whose attention has run.
  Status run_experts(int64_t layer, WindowStates& states) {
    Moe& experts = runner_->experts();
    if (experts.has_shared()) {
      LayerObserver observer(rounded_, options_.how.pool);
      NIBBLE_RETURN_IF_ERROR(
          states.for_each(WindowStates::Inputs::kKept, [&](ForwardContext& context) {
            observer.begin();
            context.observer = &observer;
            experts.normalize(runner_->hidden(), context);
            experts.project_shared(context);
            experts.add_shared(runner_->hidden(), context);
          }));
      NIBBLE_RETURN_IF_ERROR(judge_places(layer, kShared, observer.take()));
    }
    std::map<Role, ExpertNoise> noises;
    if (of_experts(layer, 0, Role::kExpertDown) != nullptr) {
      NIBBLE_RETURN_IF_ERROR(
          judge_experts({.runner = *runner_,
                         .states = states,
                         .pool = options_.how.pool,
                         .rounded = rounded_,
                         .memory = options_.memory,
                         .judge = [&](const ExpertSite& site) -> Status {
                           const JudgedMatrix* judged = of_experts(layer, site.expert, site.role);
                           if (judged == nullptr) {
                             return {};
                           }
                           NIBBLE_ASSIGN_OR_RETURN(Noise noise, noise_of(*judged, site.sums));
                           ExpertNoise& role = noises[site.role];
                           role.whole += noise.whole;
                           role.of[judged->matrix->module()] = std::move(noise.errors);
                           return {};
                         }}));
    }
    for (auto& [role, noise] : noises) {
      enter(std::move(noise));
    }
    NIBBLE_RETURN_IF_ERROR(states.for_each(
        WindowStates::Inputs::kReplaced,
        [&](ForwardContext& context) { experts.forward(runner_->hidden(), context); }));
    runner_->unload();
    return {};
  }

  /// Squared errors of outputs, and the squares of the outputs themselves.
  struct Noise {
    double whole = 0;
    SchemeErrors errors;
  };
  /// The same of one of the matrices of all experts.
  struct ExpertNoise {
    double whole = 0;
    std::map<std::string, SchemeErrors> of;  // by module
  };

  [[nodiscard]] const JudgedMatrix* of_experts(int64_t layer, int64_t expert, Role role) const {
    const auto found = by_module_.find(module_name(*runner_->config().family, role, layer, expert));
    return found == by_module_.end() ? nullptr : found->second;
  }

  /// An expert's error is its share of the mean output, so that those with few rows count little.
  void enter(ExpertNoise noise) {
    const double mean = noise.whole / static_cast<double>(noise.of.size());
    for (auto& [module, errors] : noise.of) {
      if (std::isfinite(mean) && mean > 0) {
        divide(errors, mean);
        errors_[module] = std::move(errors);
      }
    }
  }

  static void divide(SchemeErrors& errors, double by) {
    for (std::optional<double>& error : errors) {
      if (error) {
        *error /= by;
      }
    }
  }

  Status judge_places(int64_t layer,
                      const std::vector<Place>& places,
                      const std::vector<PlaceSums>& sums) {
    CHECK_EQ(sums.size(), places.size());
    for (size_t place = 0; place < sums.size(); ++place) {
      for (const Role role : places[place]) {
        const auto found = by_module_.find(module_name(*runner_->config().family, role, layer));
        if (found == by_module_.end()) {
          continue;
        }
        NIBBLE_ASSIGN_OR_RETURN(Noise noise, noise_of(*found->second, sums[place]));
        if (std::isfinite(noise.whole) && noise.whole > 0) {  // else the weights have to do
          divide(noise.errors, noise.whole);
          errors_[found->first] = std::move(noise.errors);
        }
      }
    }
    return {};
  }

  [[nodiscard]] Result<Noise> noise_of(const JudgedMatrix& judged, const PlaceSums& sums) const {
    ThreadPool& pool = options_.how.pool;
    const int64_t n = judged.matrix->n();
    NIBBLE_ASSIGN_OR_RETURN(Judge judge, Judge::open(judged, options_.how));
    Noise noise;
    noise.whole = output_error(sums.rows(), {judge.w().data(), nullptr, n}, pool);
    NIBBLE_ASSIGN_OR_RETURN(noise.errors, judge.each([&](const QuantScheme& scheme) {
      double error = output_error(sums.rows(), {judge.w().data(), judge.values().data(), n}, pool);
      if (const Gram* change = sums.changes(scheme.act); change != nullptr) {
        error += output_error(*change, {judge.values().data(), nullptr, n}, pool);
      }
      return error;
    }));
    return noise;
  }

  const OutputErrorOptions& options_;
  std::map<std::string, const JudgedMatrix*> by_module_;
  std::set<ActFormat> rounded_;
  std::unique_ptr<LayerRunner> runner_;
  std::map<std::string, SchemeErrors> errors_;
};

}  // namespace

Result<std::map<std::string, SchemeErrors>> output_errors(const std::vector<JudgedMatrix>& matrices,
                                                          const OutputErrorOptions& options) {
  CHECK(!options.windows.empty());
  return OutputJudge(matrices, options).run();
}

Result<SchemeErrors> weight_errors(const JudgedMatrix& matrix, const Judging& how) {
  NIBBLE_ASSIGN_OR_RETURN(Judge judge, Judge::open(matrix, how));
  return judge.each([&](const QuantScheme&) {
    double signal = 0;
    double noise = 0;
    for (size_t i = 0; i < judge.w().size(); ++i) {
      const double w = judge.w()[i];
      const double e = w - judge.values()[i];
      signal += w * w;
      noise += e * e;
    }
    return signal > 0 ? noise / signal : 0;
  });
}

}  // namespace nibble
