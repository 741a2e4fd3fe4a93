#include <algorithm>
#include <bit>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "base/json.h"
#include "bench/bench_commands.h"
#include "engine/memory_plan.h"
#include "ops/kv_name.h"
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
  int64_t page_size = 0;
  int64_t pages = 0;
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

/// Writes keys and values of random tokens to every page of every layer.
Status fill(Backend& backend, const ModelConfig& config, const PagedKvCache& cache, int64_t rows) {
  const int64_t page_size = cache.shape().page_size;
  const int64_t stride = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
  const auto per_step = std::max<int64_t>(1, rows / page_size);  // pages
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer qkv,
                          backend.upload(random_bf16_pairs(per_step * page_size * stride / 2)));
  const std::vector<float> frequencies(static_cast<size_t>(config.head_dim / 2), 0.01F);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer inv_freq, backend.upload(frequencies));
  const std::vector<int32_t> tokens(static_cast<size_t>(per_step * page_size), 0);
  for (int64_t first = 0; first < cache.shape().num_pages; first += per_step) {
    const int64_t count = std::min(per_step, cache.shape().num_pages - first);
    std::vector<int32_t> pages;
    for (int64_t i = 0; i < count; ++i) {
      pages.push_back(static_cast<int32_t>(first + i));
    }
    std::vector<SequenceSpan> spans;  // each page a sequence
    for (int64_t i = 0; i < count; ++i) {
      spans.push_back({.q_begin = static_cast<int32_t>(i * page_size),
                       .q_len = static_cast<int32_t>(page_size),
                       .kv_len = static_cast<int32_t>(page_size),
                       .pages = &pages[static_cast<size_t>(i)]});
    }
    const StepInput input{.tokens = std::span(tokens).first(static_cast<size_t>(count * page_size)),
                          .sequences = spans,
                          .logit_rows = {}};
    const StepPlan plan{.input = input, .page_size = page_size, .program = cache.program()};
    backend.run_step(plan, [&](Step& step) {
      for (int64_t layer = 0; layer < config.num_layers; ++layer) {
        step.rope_append_kv({.qkv = Activations(qkv.as<void>(), DType::kBF16),
                             .stride = stride,
                             .heads = config.num_heads,
                             .inv_freq = inv_freq.as<float>(),
                             .kv = cache.view(layer),
                             .sequences = spans});
      }
    });
  }
  float last = 0;
  backend.read(inv_freq.as<float>(), {&last, 1});  // waits
  return {};
}

/// Milliseconds of a decode step of `report.sequences` sequences that share all pages.
Result<double> decode(Model& model, PagedKvCache& cache, const CapacityReport& report) {
  const auto sequences = static_cast<size_t>(report.sequences);
  std::vector<int32_t> pages(static_cast<size_t>(report.pages));
  for (size_t i = 0; i < pages.size(); ++i) {
    pages[i] = static_cast<int32_t>(i);
  }
  const int64_t per_sequence = report.context / report.page_size;
  std::vector<SequenceSpan> spans;
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < report.sequences; ++i) {
    rows.push_back(static_cast<int32_t>(i));
    spans.push_back({.q_begin = static_cast<int32_t>(i),
                     .q_len = 1,
                     .kv_len = static_cast<int32_t>(report.context),
                     .pages = &pages[static_cast<size_t>(i * per_sequence)]});
  }
  const std::vector<int32_t> tokens(sequences, 1);
  const std::vector<RowSampling> greedy(sequences);
  std::vector<SampledRow> sampled(sequences);
  double ms = 0;
  for (int round = 0; round < 2; ++round) {  // the first may record
    const auto begin = std::chrono::steady_clock::now();
    model.start({.tokens = tokens, .sequences = spans, .logit_rows = rows}, cache,
                {.rows = greedy, .edits = {}});
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
  KvCacheShape shape{.code = options.kv_code,
                     .num_layers = config.num_layers,
                     .kv_heads = config.num_kv_heads,
                     .head_dim = config.head_dim,
                     .page_size = options.page_size};
  const int64_t page_bytes = PagedKvCache::page_bytes(shape, *backend);
  options.num_pages = std::max<int64_t>(1, report.plan.cache() / page_bytes);
  NIBBLE_ASSIGN_OR_RETURN(options, resolve_in_memory(options, folder, config, *backend));
  shape.num_pages = options.num_pages;
  NIBBLE_ASSIGN_OR_RETURN(const auto model,
                          load_model(folder, *backend,
                                     {.max_batch_tokens = options.max_num_batched_tokens,
                                      .max_logit_rows = options.max_num_seqs}));
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(shape));
  report.scheme = model->scheme();
  report.backend = backend->name();
  report.cache_bytes = page_bytes * shape.num_pages;
  report.page_size = shape.page_size;
  report.pages = shape.num_pages;
  const int64_t most_pages = std::max<int64_t>(1, config.max_position / shape.page_size);
  report.longest = std::min(most_pages, report.pages) * shape.page_size;
  report.longest_count = report.pages * shape.page_size / report.longest;
  report.sequences = std::min(options.max_num_seqs, report.pages);
  report.context = std::min(most_pages, report.pages / report.sequences) * shape.page_size;

  const auto begin = std::chrono::steady_clock::now();
  NIBBLE_RETURN_IF_ERROR(fill(*backend, config, cache,
                              std::min({kFillRows, options.max_num_batched_tokens,
                                        options.max_num_seqs * shape.page_size})));
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
                       {"tokens", report.pages * report.page_size},
                       {"page_size", report.page_size},
                       {"pages", report.pages},
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
                        giga(report.cache_bytes), report.pages * report.page_size,
                        report.longest_count, report.longest, report.sequences, report.context));
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
