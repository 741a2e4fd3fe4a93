#include "calibration/layer_rounder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "arch/family.h"
#include "base/log.h"
#include "calibration/progress_file.h"
#include "quant/codec.h"
#include "quantizer/algorithms/activations.h"

namespace nibble {
namespace {

struct SiteRole {
  Site site;
  Role role;
};
constexpr std::array kRoles = {
    SiteRole{Site::kQkv, Role::kQuery}, SiteRole{Site::kQkv, Role::kKey},
    SiteRole{Site::kQkv, Role::kValue}, SiteRole{Site::kOutput, Role::kAttentionOutput},
    SiteRole{Site::kUp, Role::kGate},   SiteRole{Site::kUp, Role::kUp},
    SiteRole{Site::kDown, Role::kDown}};

}  // namespace

LayerJobs::LayerJobs(const QuantizePlan& plan, const ModelConfig& config)
    : jobs_(static_cast<size_t>(config.num_layers) * kSites) {
  std::map<std::string, size_t, std::less<>> by_name;
  for (size_t job = 0; job < plan.jobs.size(); ++job) {
    if (plan.jobs[job].matrix != nullptr && plan.jobs[job].scheme.weight.quantized()) {
      by_name.emplace(plan.jobs[job].name(), job);
    }
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    for (const auto& [site, role] : kRoles) {
      const bool mlp = site == Site::kUp || site == Site::kDown;
      if ((mlp && has_experts(config, layer)) ||
          (role == Role::kGate && !has_gate(config.activation))) {
        continue;
      }
      const auto found = by_name.find(module_name(*config.family, role, layer));
      if (found != by_name.end()) {
        jobs_[static_cast<size_t>(layer) * kSites + static_cast<size_t>(site)].push_back(
            found->second);
        all_.insert(found->second);
      }
    }
  }
}

bool LayerJobs::all_done(const ShardStore& store) const {
  return std::all_of(all_.begin(), all_.end(), [&](size_t job) { return store.done(job); });
}

bool LayerJobs::layer_done(int64_t layer, const ShardStore& store) const {
  bool done = true;
  for (size_t site = 0; site < kSites; ++site) {
    for (const size_t job : of(layer, Site{static_cast<uint8_t>(site)})) {
      done = done && store.done(job);
    }
  }
  return done;
}

/// Adds up the rows of one site.
class LayerRounder::SiteObserver final : public RowObserver {
 public:
  SiteObserver(int64_t k, ActFormat act, ThreadPool& pool) : gram(k), act_(act), pool_(pool) {}

  Then observe(Step& step, const InputRows& rows) override {
    CHECK_EQ(rows.width, gram.k());
    rows_.resize(static_cast<size_t>(step.rows() * rows.width));
    step.input_rows(rows, rows_.data());
    round_activations(act_, {rows_.data(), step.rows(), rows.width}, pool_);
    gram.add(rows_.data(), step.rows(), pool_);
    return Then::kSkip;
  }

  Gram gram;

 private:
  ActFormat act_;
  ThreadPool& pool_;
  std::vector<float> rows_;
};

LayerRounder::LayerRounder(const Parts& parts) : parts_(parts), progress_(parts.context.begin) {}

Status LayerRounder::open_files() {
  for (const char* name : {"states-0.bin", "states-1.bin"}) {
    NIBBLE_ASSIGN_OR_RETURN(StateFile file,
                            StateFile::open(calibration_file(parts_.context.folder, name),
                                            rows() * parts_.runner.hidden_row_bytes()));
    states_.push_back(std::move(file));
  }
  for (const auto& [name, scratch] :
       {std::pair("attended.bin", ScratchName::kAttended), std::pair("up.bin", ScratchName::kUp)}) {
    NIBBLE_ASSIGN_OR_RETURN(StateFile file,
                            StateFile::open(calibration_file(parts_.context.folder, name),
                                            rows() * parts_.runner.row_bytes(scratch)));
    between_.push_back(std::move(file));
  }
  return {};
}

Result<int64_t> LayerRounder::first_layer() {
  const auto progress = read_calibration_progress(parts_.context.folder);
  if (progress && progress->layer <= parts_.runner.config().num_layers) {
    bool usable = true;
    for (int64_t layer = 0; layer < progress->layer; ++layer) {
      usable = usable && parts_.jobs.layer_done(layer, parts_.context.store);
    }
    const auto file = static_cast<size_t>(progress->file);
    const auto digest = states_[file].digest(std::ssize(parts_.windows));
    if (usable && digest.ok() && digest_text(*digest) == progress->digest) {
      input_ = file;
      return progress->layer;
    }
  }
  NIBBLE_RETURN_IF_ERROR(embed_all());
  return 0;
}

Status LayerRounder::embed_all() {
  input_ = 0;
  for (int64_t window = 0; window < std::ssize(parts_.windows); ++window) {
    parts_.runner.embed(parts_.windows[static_cast<size_t>(window)]);
    NIBBLE_RETURN_IF_ERROR(states_[input_].write(window, parts_.runner.hidden_rows(rows())));
  }
  return {};
}

Status LayerRounder::for_windows(const Work& work) {
  for (int64_t window = 0; window < std::ssize(parts_.windows); ++window) {
    if (stopped()) {
      return make_error(StatusCode::kCancelled, "stopped");
    }
    NIBBLE_RETURN_IF_ERROR(work.before(window));
    parts_.runner.run(parts_.windows[static_cast<size_t>(window)], work.run);
    if (work.after) {
      NIBBLE_RETURN_IF_ERROR(work.after(window));
    }
  }
  return {};
}

std::unique_ptr<LayerRounder::SiteObserver> LayerRounder::observer_of(int64_t layer, Site site) {
  const std::vector<size_t>& jobs = parts_.jobs.of(layer, site);
  if (jobs.empty()) {
    return nullptr;
  }
  const PlanJob& first = parts_.context.plan.jobs[jobs.front()];
  return std::make_unique<SiteObserver>(first.matrix->k(), first.scheme.act, parts_.pool);
}

Status LayerRounder::round_layer(int64_t layer) {
  LayerRunner& runner = parts_.runner;
  NIBBLE_RETURN_IF_ERROR(runner.load_attention(layer));
  NIBBLE_RETURN_IF_ERROR(runner.load_mlp(layer));
  NIBBLE_RETURN_IF_ERROR(round_attention(layer));
  NIBBLE_RETURN_IF_ERROR(runner.has_experts() ? run_experts() : round_dense(layer));
  runner.unload();
  return finish_layer(layer);
}

Status LayerRounder::round_attention(int64_t layer) {
  LayerRunner& runner = parts_.runner;
  const auto read_input = [&](int64_t window) {
    return states_[input_].read(window, runner.hidden_rows(rows()));
  };
  if (const auto observer = observer_of(layer, Site::kQkv)) {
    NIBBLE_RETURN_IF_ERROR(for_windows({.before = read_input,
                                        .run =
                                            [&](ForwardContext& context) {
                                              context.observer = observer.get();
                                              runner.attention().project(runner.hidden(), context);
                                            },
                                        .after = {}}));
    NIBBLE_RETURN_IF_ERROR(round_site(layer, Site::kQkv, observer->gram));
    NIBBLE_RETURN_IF_ERROR(runner.load_attention(layer));
  }
  const auto observer = observer_of(layer, Site::kOutput);
  NIBBLE_RETURN_IF_ERROR(for_windows(
      {.before = read_input,
       .run =
           [&](ForwardContext& context) {
             runner.attention().project(runner.hidden(), context);
             runner.attention().attend(context);
             if (observer != nullptr) {
               context.observer = observer.get();
               runner.attention().add_output(runner.hidden(), context);
             }
           },
       .after =
           [&](int64_t window) {
             return between_[0].write(window, runner.scratch_rows(ScratchName::kAttended, rows()));
           }}));
  if (observer != nullptr) {
    NIBBLE_RETURN_IF_ERROR(round_site(layer, Site::kOutput, observer->gram));
    NIBBLE_RETURN_IF_ERROR(runner.load_attention(layer));
  }
  return {};
}

Status LayerRounder::round_dense(int64_t layer) {
  LayerRunner& runner = parts_.runner;
  const size_t output = 1 - input_;
  const auto write_output = [&](int64_t window) {
    return states_[output].write(window, runner.hidden_rows(rows()));
  };
  auto observer = observer_of(layer, Site::kUp);
  NIBBLE_RETURN_IF_ERROR(for_windows(
      {.before = [&](int64_t window) -> Status {
         NIBBLE_RETURN_IF_ERROR(states_[input_].read(window, runner.hidden_rows(rows())));
         return between_[0].read(window, runner.scratch_rows(ScratchName::kAttended, rows()));
       },
       .run =
           [&](ForwardContext& context) {
             runner.attention().add_output(runner.hidden(), context);
             if (observer != nullptr) {
               context.observer = observer.get();
               runner.mlp().project(runner.hidden(), context);
             }
           },
       .after = write_output}));
  if (observer != nullptr) {
    NIBBLE_RETURN_IF_ERROR(round_site(layer, Site::kUp, observer->gram));
    NIBBLE_RETURN_IF_ERROR(runner.load_mlp(layer));
  }
  observer = observer_of(layer, Site::kDown);
  const auto read_between = [&](int64_t window) {
    return states_[output].read(window, runner.hidden_rows(rows()));
  };
  NIBBLE_RETURN_IF_ERROR(for_windows(
      {.before = read_between,
       .run =
           [&](ForwardContext& context) {
             runner.mlp().project(runner.hidden(), context);
             if (observer != nullptr) {
               context.observer = observer.get();
               runner.mlp().add_output(runner.hidden(), context);
             }
           },
       .after =
           [&](int64_t window) {
             return between_[1].write(window, runner.scratch_rows(ScratchName::kUp, rows()));
           }}));
  if (observer != nullptr) {
    NIBBLE_RETURN_IF_ERROR(round_site(layer, Site::kDown, observer->gram));
    NIBBLE_RETURN_IF_ERROR(runner.load_mlp(layer));
  }
  return for_windows(
      {.before = [&](int64_t window) -> Status {
         NIBBLE_RETURN_IF_ERROR(read_between(window));
         return between_[1].read(window, runner.scratch_rows(ScratchName::kUp, rows()));
       },
       .run = [&](ForwardContext& context) { runner.mlp().add_output(runner.hidden(), context); },
       .after = write_output});
}

// Experts are run as the source has them.
Status LayerRounder::run_experts() {
  LayerRunner& runner = parts_.runner;
  return for_windows(
      {.before = [&](int64_t window) -> Status {
         NIBBLE_RETURN_IF_ERROR(states_[input_].read(window, runner.hidden_rows(rows())));
         return between_[0].read(window, runner.scratch_rows(ScratchName::kAttended, rows()));
       },
       .run =
           [&](ForwardContext& context) {
             runner.attention().add_output(runner.hidden(), context);
             runner.experts().forward(runner.hidden(), context);
           },
       .after =
           [&](int64_t window) {
             return states_[1 - input_].write(window, runner.hidden_rows(rows()));
           }});
}

Status LayerRounder::finish_layer(int64_t layer) {
  input_ = 1 - input_;
  NIBBLE_RETURN_IF_ERROR(parts_.context.store.flush());
  NIBBLE_RETURN_IF_ERROR(states_[input_].sync());
  NIBBLE_ASSIGN_OR_RETURN(const Digest digest, states_[input_].digest(std::ssize(parts_.windows)));
  return write_calibration_progress(parts_.context.folder,
                                    {layer + 1, static_cast<int64_t>(input_), digest_text(digest)});
}

Status LayerRounder::round_site(int64_t layer, Site site, Gram& gram) {
  gram.finish();
  const SiteStatistics statistics = make_site_statistics(gram, parts_.rounding, parts_.pool);
  const std::vector<size_t>& jobs = parts_.jobs.of(layer, site);
  if (statistics.gram == nullptr) {
    NIBBLE_LOG(kWarning,
               "{}: what it multiplies holds numbers that are infinite or none; it is rounded to "
               "the nearest codes",
               parts_.context.plan.jobs[jobs.front()].name());
  }
  for (const size_t job : jobs) {
    NIBBLE_RETURN_IF_ERROR(round_job(job, statistics));
  }
  return {};
}

Status LayerRounder::round_job(size_t index, const SiteStatistics& site) {
  const PlanJob& job = parts_.context.plan.jobs[index];
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  std::vector<float> w(static_cast<size_t>(n * k));
  NIBBLE_RETURN_IF_ERROR(job.matrix->decode(0, n, w.data()));
  NIBBLE_RETURN_IF_ERROR(absmax_of(w.data(), 0, n, k).status().with_context(job.matrix->where()));
  const RoundedMatrix rounded = round_matrix(
      {.w = w.data(), .n = n, .k = k, .format = job.scheme.weight, .encoder = job.encoder},
      parts_.rounding, site, parts_.pool);
  ++kept_[std::string(rounding_name(rounded.rounding))];
  NIBBLE_RETURN_IF_ERROR(substitute(index, rounded));
  if (parts_.context.store.done(index)) {  // by a run that was interrupted in this layer
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(store_rounded(parts_.context, index, w, rounded));
  progress_.bytes_done += job.bytes_in;
  ++progress_.tensors_done;
  progress_.tensor = job.name();
  if (parts_.context.progress) {
    parts_.context.progress(progress_);
  }
  return {};
}

Status LayerRounder::substitute(size_t index, const RoundedMatrix& rounded) {
  const PlanJob& job = parts_.context.plan.jobs[index];
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  const WeightFormat& format = job.scheme.weight;
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, QuantTensor::allocate(format, n, k));
  const int64_t groups = format.groups(k);
  std::copy(rounded.scales.begin(), rounded.scales.end(), weight.scales.as<float>().data());
  auto* zeros = rounded.zeros.empty() ? nullptr : weight.zeros.as<int8_t>().data();
  for (size_t i = 0; i < rounded.zeros.size(); ++i) {
    zeros[i] = static_cast<int8_t>(rounded.zeros[i]);
  }
  parts_.pool.parallel_for(n, [&](int64_t row, int) {
    encode_row(
        format, rounded.values.data() + row * k, k,
        {rounded.scales.data() + row * groups, zeros == nullptr ? nullptr : zeros + row * groups},
        weight.codes.data() + row * weight.row_bytes());
  });
  parts_.runner.substitute(job.name(), std::move(weight), job.scheme.act);
  return {};
}

void LayerRounder::report() const {
  for (const auto& [name, count] : kept_) {
    NIBBLE_LOG(kInfo, "calibration: {} matrices rounded by {}", count, name);
  }
}

}  // namespace nibble
