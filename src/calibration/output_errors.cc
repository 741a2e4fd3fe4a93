#include "calibration/output_errors.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <set>
#include <utility>

#include "arch/family.h"
#include "calibration/layer_runner.h"
#include "calibration/window_states.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/algorithms/gram.h"
#include "quantizer/algorithms/nearest.h"
#include "quantizer/algorithms/output_error.h"

namespace nibble {
namespace {

/// A place within a layer at which rows are multiplied, in the order in which they are.
struct Place {
  std::vector<Role> roles;  // that share the input
  bool of_mlp = false;
};

const std::vector<Place>& places() {
  static const std::vector<Place> kPlaces = {{{Role::kQuery, Role::kKey, Role::kValue}, false},
                                             {{Role::kAttentionOutput}, false},
                                             {{Role::kGate, Role::kUp}, true},
                                             {{Role::kDown}, true}};
  return kPlaces;
}

/// Sums over the rows that enter a place: of what they are, and of what rounding them changes.
struct PlaceSums {
  PlaceSums(int64_t k, const std::set<ActFormat>& rounded) : rows(k) {
    for (const ActFormat act : rounded) {
      changes.emplace(act, Gram(k));
    }
  }

  Gram rows;
  std::map<ActFormat, Gram> changes;
};

/// Sees the rows of a layer's products one after the other.
class LayerObserver final : public RowObserver {
 public:
  LayerObserver(std::set<ActFormat> rounded, ThreadPool& pool)
      : rounded_(std::move(rounded)), pool_(pool) {}

  /// Before each window.
  void begin() { next_ = 0; }

  Then observe(Step& step, const InputRows& rows) override {
    const size_t place = next_++;
    if (place >= sums_.size()) {
      sums_.emplace_back(rows.width, rounded_);
    }
    PlaceSums& sums = sums_[place];
    CHECK_EQ(sums.rows.k(), rows.width);
    const int64_t count = step.rows();
    x_.resize(static_cast<size_t>(count * rows.width));
    step.input_rows(rows, x_.data());
    sums.rows.add(x_.data(), count, pool_);
    for (auto& [act, gram] : sums.changes) {
      changes_ = x_;
      pool_.parallel_for(count, [&, act = act](int64_t row, int) {
        float* at = changes_.data() + row * rows.width;
        round_row(act, at, rows.width);
        for (int64_t i = 0; i < rows.width; ++i) {
          at[i] -= x_[static_cast<size_t>(row * rows.width + i)];
        }
      });
      gram.add(changes_.data(), count, pool_);
    }
    return Then::kMultiply;
  }

  std::vector<PlaceSums> take() {
    for (PlaceSums& sums : sums_) {
      sums.rows.finish();
      for (auto& [act, gram] : sums.changes) {
        gram.finish();
      }
    }
    return std::exchange(sums_, {});
  }

 private:
  std::set<ActFormat> rounded_;
  ThreadPool& pool_;
  size_t next_ = 0;
  std::vector<PlaceSums> sums_;
  std::vector<float> x_;
  std::vector<float> changes_;
};

/// A matrix in memory, to be rounded in one scheme after the other.
class Judge final {
 public:
  static Result<Judge> open(const JudgedMatrix& judged, Dialect dialect, ThreadPool& pool) {
    NIBBLE_ASSIGN_OR_RETURN(PlainMatrix matrix, read_matrix(*judged.matrix));
    return Judge(judged.schemes, std::move(matrix), dialect, pool);
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
                            LayerRunner::open(options_.model, rows, options_.pool.threads()));
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
    LayerObserver observer(rounded_, options_.pool);
    NIBBLE_RETURN_IF_ERROR(
        states.for_each(WindowStates::Inputs::kReplaced, [&](ForwardContext& context) {
          observer.begin();
          context.observer = &observer;
          runner_->attention().forward(runner_->hidden(), context);
          if (runner_->has_experts()) {
            context.observer = nullptr;
            runner_->experts().forward(runner_->hidden(), context);
          } else {
            runner_->mlp().forward(runner_->hidden(), context);
          }
        }));
    const bool dense = !runner_->has_experts();
    runner_->unload();
    const std::vector<PlaceSums> sums = observer.take();
    for (size_t place = 0; place < sums.size(); ++place) {
      CHECK(dense || !places()[place].of_mlp);
      for (const Role role : places()[place].roles) {
        NIBBLE_RETURN_IF_ERROR(judge(layer, role, sums[place]));
      }
    }
    return {};
  }

  Status judge(int64_t layer, Role role, const PlaceSums& sums) {
    const auto found = by_module_.find(module_name(*runner_->config().family, role, layer));
    if (found == by_module_.end()) {
      return {};
    }
    const JudgedMatrix& judged = *found->second;
    const int64_t n = judged.matrix->n();
    ThreadPool& pool = options_.pool;
    NIBBLE_ASSIGN_OR_RETURN(Judge judge, Judge::open(judged, options_.dialect, pool));
    const double whole = output_error(sums.rows, {judge.w().data(), nullptr, n}, pool);
    if (!std::isfinite(whole) || whole <= 0) {
      return {};  // outputs that are infinite, or none: the weights have to do
    }
    NIBBLE_ASSIGN_OR_RETURN(errors_[found->first], judge.each([&](const QuantScheme& scheme) {
      double error = output_error(sums.rows, {judge.w().data(), judge.values().data(), n}, pool);
      if (const auto change = sums.changes.find(scheme.act); change != sums.changes.end()) {
        error += output_error(change->second, {judge.values().data(), nullptr, n}, pool);
      }
      return error / whole;
    }));
    return {};
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

Result<SchemeErrors> weight_errors(const JudgedMatrix& matrix, Dialect dialect, ThreadPool& pool) {
  NIBBLE_ASSIGN_OR_RETURN(Judge judge, Judge::open(matrix, dialect, pool));
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
