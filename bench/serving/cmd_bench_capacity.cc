#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "arch/kv_specs.h"
#include "base/json.h"
#include "bench/bench_commands.h"
#include "engine/memory_plan.h"
#include "engine/page_shares.h"
#include "tools/flag_checks.h"
#include "tools/model_flags.h"
#include "tools/output.h"

namespace nibble {

namespace {

constexpr int64_t kMostSequences = 4096;
constexpr int64_t kFillRows = 8192;  // tokens of a step that writes pages

struct CapacityFlags {
  ModelFlags model;
  int64_t max_num_seqs = 256;
  int64_t max_num_batched_tokens = 8192;
  bool json = false;
};

struct CapacityReport {
  std::string scheme;
  std::string backend;
  KvCode kv_code = KvCode::kBf16;
  MemoryPlan plan;
  int64_t cache_bytes = 0;
  KvCacheShape shape;
  int64_t tokens = 0;         // that layers without a window hold, or sequences of the longest
  int64_t longest = 0;        // tokens of one sequence
  int64_t longest_count = 0;  // sequences of that length
  int64_t sequences = 0;      // of the decode step
  int64_t context = 0;        // of each
  double fill_ms = 0;
  double decode_ms = 0;
  int64_t free_at_end = 0;
};

/// Floats whose halves are BF16 numbers from 0.5 to 2.
std::vector<float> random_bf16_pairs(int64_t count) {
  std::mt19937 random(1);
  std::vector<float> out(static_cast<size_t>(count));
  std::ranges::generate(out, [&] {
    return std::bit_cast<float>((static_cast<uint32_t>(random()) & 0x80ff80ffU) | 0x3f003f00U);
  });
  return out;
}

/// Writes keys and values, or latents, of random tokens to every page of every layer.
class Filler final {
 public:
  static Result<Filler> create(Backend& backend,
                               const ModelConfig& config,
                               const PagedKvCache& cache,
                               int64_t rows) {
    Filler filler(backend, config, cache);
    const int64_t page_size = cache.shape().page_size;
    const bool latent = config.latent.kv_rank > 0;
    filler.stride_ = latent ? config.latent.row_dim()
                            : (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
    filler.pages_per_step_ = std::max<int64_t>(1, rows / page_size);
    const int64_t most_rows = filler.pages_per_step_ * page_size;
    NIBBLE_ASSIGN_OR_RETURN(filler.rows_,
                            backend.upload(random_bf16_pairs(most_rows * filler.stride_ / 2)));
    const int64_t turned = latent ? config.latent.rope_dim : config.head_dim;
    const std::vector<float> frequencies(static_cast<size_t>(turned / 2), 0.01F);
    NIBBLE_ASSIGN_OR_RETURN(filler.inv_freq_, backend.upload(frequencies));
    const std::vector<float> ones(static_cast<size_t>(config.latent.kv_rank), 1.0F);
    if (latent) {
      NIBBLE_ASSIGN_OR_RETURN(filler.latent_norm_, backend.upload(ones));
    }
    filler.tokens_.assign(static_cast<size_t>(most_rows), 0);
    return filler;
  }

  void fill() {
    for (int32_t pool = 0; pool < cache_->num_pools(); ++pool) {
      const int64_t pages = cache_->shape().num_pages[static_cast<size_t>(pool)];
      for (int64_t first = 0; first < pages; first += pages_per_step_) {
        fill_pages(pool, first, std::min(pages_per_step_, pages - first));
      }
    }
    float last = 0;
    backend_->read(inv_freq_.as<float>(), {&last, 1});  // waits
  }

 private:
  Filler(Backend& backend, const ModelConfig& config, const PagedKvCache& cache)
      : backend_(&backend), config_(&config), cache_(&cache) {}

  /// Each page as a sequence of its own.
  void fill_pages(int32_t pool, int64_t first, int64_t count) {
    const int64_t page_size = cache_->shape().page_size;
    std::vector<int32_t> pages(static_cast<size_t>(count));
    std::iota(pages.begin(), pages.end(), static_cast<int32_t>(first));
    std::vector<SequenceSpan> spans;
    for (int64_t i = 0; i < count; ++i) {
      spans.push_back({.q_begin = static_cast<int32_t>(i * page_size),
                       .q_len = static_cast<int32_t>(page_size),
                       .kv_len = static_cast<int32_t>(page_size),
                       .pages = &pages[static_cast<size_t>(i)]});
    }
    const StepInput input{
        .tokens = std::span(tokens_).first(static_cast<size_t>(count * page_size)),
        .sequences = spans,
        .logit_rows = {}};
    const StepPlan plan{.input = input, .page_size = page_size, .program = cache_->program()};
    backend_->run_step(plan, [&](Step& step) {
      for (int64_t layer = 0; layer < config_->num_layers; ++layer) {
        const KvView view = cache_->view(layer);
        if (view.pool == pool) {
          append(step, view, spans);
        }
      }
    });
  }

  void append(Step& step, const KvView& view, std::span<const SequenceSpan> spans) {
    const Activations rows(rows_.as<void>(), DType::kBF16);
    if (view.latent()) {
      step.append_latent({.rows = rows,
                          .stride = stride_,
                          .latent_norm = latent_norm_.as<float>(),
                          .norm_eps = 1e-6F,
                          .rope = {.inv_freq = inv_freq_.as<float>(), .dim = view.rope_dim()},
                          .kv = view,
                          .sequences = spans});
      return;
    }
    step.rope_append_kv({.qkv = rows,
                         .stride = stride_,
                         .heads = config_->num_heads,
                         .inv_freq = inv_freq_.as<float>(),
                         .kv = view,
                         .sequences = spans});
  }

  Backend* backend_;
  const ModelConfig* config_;
  const PagedKvCache* cache_;
  int64_t stride_ = 0;
  int64_t pages_per_step_ = 0;
  DeviceBuffer rows_;  // of a step: q, k and v of all heads, or latents and keys
  DeviceBuffer inv_freq_;
  DeviceBuffer latent_norm_;
  std::vector<int32_t> tokens_;
};

/// The sequences of a decode step, which share the pages of each pool.
class DecodeStep final {
 public:
  explicit DecodeStep(const CapacityReport& report) {
    const int64_t per_sequence = report.context / report.shape.page_size;
    for (const int64_t pool_pages : report.shape.num_pages) {
      std::vector<int32_t>& pages = pages_.emplace_back();
      for (int64_t i = 0; i < report.sequences * per_sequence; ++i) {
        pages.push_back(static_cast<int32_t>(i % pool_pages));
      }
    }
    for (size_t pool = 0; pool < pages_.size(); ++pool) {
      for (int64_t i = 0; i < report.sequences; ++i) {
        (pool == 0 ? sequences_ : others_)
            .push_back({.q_begin = static_cast<int32_t>(i),
                        .q_len = 1,
                        .kv_len = static_cast<int32_t>(report.context),
                        .pages = &pages_[pool][static_cast<size_t>(i * per_sequence)]});
      }
    }
    rows_.resize(sequences_.size());
    std::iota(rows_.begin(), rows_.end(), 0);
    tokens_.assign(sequences_.size(), 1);
  }

  [[nodiscard]] StepInput batch() const {
    return {
        .tokens = tokens_, .sequences = sequences_, .logit_rows = rows_, .other_pools = others_};
  }

 private:
  std::vector<std::vector<int32_t>> pages_;  // by pool
  std::vector<SequenceSpan> sequences_, others_;
  std::vector<int32_t> rows_, tokens_;
};

/// Milliseconds of a decode step of `report.sequences` sequences that share all pages.
Result<double> decode(Model& model, PagedKvCache& cache, const CapacityReport& report) {
  const DecodeStep step(report);
  const auto sequences = static_cast<size_t>(report.sequences);
  const std::vector<RowSampling> greedy(sequences);
  std::vector<SampledRow> sampled(sequences);
  double ms = 0;
  for (int round = 0; round < 2; ++round) {  // the first may record
    const auto begin = std::chrono::steady_clock::now();
    model.start(step.batch(), cache, {.rows = greedy, .edits = {}});
    model.finish(sampled);
    ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
  if (!std::ranges::all_of(sampled,
                           [](const SampledRow& row) { return row.status == SampleStatus::kOk; })) {
    return make_error(StatusCode::kUnavailable, "a step over the full cache gave no numbers");
  }
  return ms;
}

/// What fits: the longest sequence and how many of them, and how long the most sequences can be.
void count_tokens(const ModelConfig& config, const EngineOptions& options, CapacityReport& report) {
  const KvCacheShape& shape = report.shape;
  const int64_t page_size = shape.page_size;
  const auto fits = [&](int64_t pages, int64_t sequences) {
    return shape.sequences_of(pages * page_size) >= sequences;
  };
  const auto most_pages = [&](int64_t sequences) {  // of each of so many
    int64_t low = 1;
    int64_t high = std::max<int64_t>(1, config.max_position / page_size);
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      fits(middle, sequences) ? low = middle : high = middle - 1;
    }
    return low;
  };
  report.longest = most_pages(1) * page_size;
  report.longest_count = shape.sequences_of(report.longest);
  report.sequences = std::min(options.max_num_seqs, shape.sequences_of(page_size));
  report.context = most_pages(report.sequences) * page_size;
  report.tokens = report.longest_count * report.longest;
  const std::vector<KvPool> pools = kv_pools(shape.layers);
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    if (pools[pool].spec.window == 0) {
      report.tokens = shape.num_pages[pool] * page_size;
    }
  }
}

JsonArray json_of(const KvCacheShape& shape) {
  JsonArray pools;
  const std::vector<KvPool> found = kv_pools(shape.layers);
  for (size_t pool = 0; pool < found.size(); ++pool) {
    pools.push_back(Json::object({{"layers", found[pool].num_layers},
                                  {"window", found[pool].spec.window},
                                  {"pages", shape.num_pages[pool]}}));
  }
  return pools;
}

Result<CapacityReport> measure(const CapacityFlags& flags) {
  const std::string& folder = flags.model.model_dir;
  CapacityReport report;
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(folder));
  EngineOptions options;
  options.max_num_seqs = flags.max_num_seqs;
  options.max_num_batched_tokens = flags.max_num_batched_tokens;
  NIBBLE_ASSIGN_OR_RETURN(const std::optional<KvCode> asked,
                          parse_kv_cache_dtype(flags.model.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, open_backend(backend_of(flags.model)));
  if (backend->host_memory()) {
    return make_error(StatusCode::kUnsupported,
                      "memory is planned for GPUs alone, and {} is none; choose --device cuda",
                      backend->name());
  }
  options.kv_code = kv_code_for(asked, config, *backend);
  report.kv_code = options.kv_code;
  NIBBLE_ASSIGN_OR_RETURN(report.plan, plan_memory(options, folder, config, *backend));
  options.page_size = backend->preferred_page_size(options.kv_code);
  options.max_model_len = config.max_position;
  report.shape = {.layers = kv_specs(config, options.kv_code), .page_size = options.page_size};
  const std::vector<KvPool> pools = kv_pools(report.shape.layers);
  std::vector<int64_t> most = useful_pages(options, pools);
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    if (pools[pool].spec.window == 0) {  // however many sequences there are
      most[pool] = std::numeric_limits<int64_t>::max();
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(options.pool_pages,
                          share_pages(report.shape, most, report.plan.cache(), backend.get()));
  NIBBLE_ASSIGN_OR_RETURN(options, resolve_in_memory(options, folder, config, *backend));
  report.shape.num_pages = options.pool_pages;
  NIBBLE_ASSIGN_OR_RETURN(const auto model, load_model(folder, *backend, model_options(options)));
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(report.shape));
  report.scheme = model->scheme();
  report.backend = backend->name();
  report.cache_bytes = report.shape.bytes(backend.get());
  count_tokens(config, options, report);

  const auto begin = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(Filler filler,
                          Filler::create(*backend, config, cache,
                                         std::min({kFillRows, options.max_num_batched_tokens,
                                                   options.max_num_seqs * options.page_size})));
  filler.fill();
  report.fill_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  NIBBLE_ASSIGN_OR_RETURN(report.decode_ms, decode(*model, cache, report));
  report.free_at_end = backend->free_memory();
  return report;
}

/// What weights, scratch memory and everything beside the cache took.
int64_t measured_without_cache(const CapacityReport& report) {
  return report.plan.free - report.free_at_end - report.cache_bytes;
}

int64_t planned_without_cache(const CapacityReport& report) {
  return report.plan.weights + report.plan.scratch + report.plan.reserve;
}

Json to_json(const CapacityReport& report) {
  return Json::object({{"scheme", report.scheme},
                       {"kv_cache_dtype", kv_code_name(report.kv_code)},
                       {"backend", report.backend},
                       {"tokens", report.tokens},
                       {"page_size", report.shape.page_size},
                       {"pages", std::ranges::max(report.shape.num_pages)},
                       {"pools", json_of(report.shape)},
                       {"longest_context", report.longest},
                       {"sequences_of_longest", report.longest_count},
                       {"sequences", report.sequences},
                       {"context_of_each", report.context},
                       {"free_bytes_before", report.plan.free},
                       {"cache_bytes", report.cache_bytes},
                       {"planned_weight_bytes", report.plan.weights},
                       {"planned_scratch_bytes", report.plan.scratch},
                       {"planned_reserve_bytes", report.plan.reserve},
                       {"measured_other_bytes", measured_without_cache(report)},
                       {"free_bytes_after", report.free_at_end},
                       {"fill_ms", report.fill_ms},
                       {"decode_ms", report.decode_ms}});
}

void print_table(const CapacityReport& report, const CapacityFlags& flags) {
  const auto giga = [](int64_t bytes) { return static_cast<double>(bytes) / 1e9; };
  print_out(fmt::format("{}: {} on {}, {:.1f} GB free\n", flags.model.model_dir, report.scheme,
                        report.backend, giga(report.plan.free)));
  print_out(fmt::format("  KV cache  {:8.2f} GB: {} tokens, that is {} x {}, or {} x {}\n",
                        giga(report.cache_bytes), report.tokens, report.longest_count,
                        report.longest, report.sequences, report.context));
  if (report.shape.num_pages.size() > 1) {
    print_out(fmt::format("            {}\n", report.shape.describe()));
  }
  print_out(fmt::format("  the rest  {:8.2f} GB of {:.2f} planned\n",
                        giga(measured_without_cache(report)), giga(planned_without_cache(report))));
  print_out(
      fmt::format("  left      {:8.2f} GB, all pages written in {:.0f} ms and read by a "
                  "decode step in {:.1f} ms\n",
                  giga(report.free_at_end), report.fill_ms, report.decode_ms));
}

Status run(const CapacityFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(const CapacityReport report, measure(flags));
  if (flags.json) {
    print_out(to_json(report).dump() + "\n");
  } else {
    print_table(report, flags);
  }
  if (report.free_at_end <= 0 || measured_without_cache(report) > planned_without_cache(report)) {
    return make_error(StatusCode::kResourceExhausted,
                      "the plan was exceeded: {} MiB beside the cache instead of {}, {} MiB free",
                      measured_without_cache(report) >> 20, planned_without_cache(report) >> 20,
                      report.free_at_end >> 20);
  }
  return {};
}

}  // namespace

void add_bench_capacity(CLI::App& bench, CommandContext& context) {
  auto flags = std::make_shared<CapacityFlags>();
  CLI::App* command = bench.add_subcommand(
      "capacity", "Context and sequences that fit a GPU beside the model: planned, then filled");
  add_model_flags(*command, flags->model);
  command->add_option("--max-num-seqs", flags->max_num_seqs, "Sequences at once")
      ->check(whole_number(1, kMostSequences))
      ->capture_default_str();
  command
      ->add_option("--max-num-batched-tokens", flags->max_num_batched_tokens, "Tokens of one step")
      ->check(whole_number(1, int64_t{1} << 20))
      ->capture_default_str();
  command->add_flag("--json", flags->json, "Print one JSON object: tokens, longest_context, ...");
  command->footer(
      "The cache gets what `nibble serve` would give it. Every page of every layer is written, and "
      "one decode\nstep reads them all; the command fails when that took more memory than "
      "planned.\n\n" +
      bench.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
