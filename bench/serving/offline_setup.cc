#include "bench/serving/offline_setup.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <utility>

#include "arch/kv_specs.h"
#include "base/file.h"
#include "base/process.h"
#include "bench/serving/dummy_weights.h"
#include "engine/memory_plan.h"
#include "engine/page_shares.h"
#include "model/made_model.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

/// Of a GPU, beside weights, scratch memory and cache: what serving leaves to the driver,
/// libraries and recorded steps.
constexpr int64_t kReserve = int64_t{1} << 30;
/// Of a step, where a batch is to fit: what the prefix cache lacks of prompts then enters quickly.
constexpr int64_t kTokensOfSequence = 4;

/// What loading a model took of the memory that it computes in. Read once: the host's figure is
/// that of the whole process and differs from one reading to the next.
class MemoryUse final {
 public:
  explicit MemoryUse(const Backend& backend) : backend_(backend), before_(now()) {}

  /// Reads what the model took since this was made.
  void read() { taken_ = backend_.host_memory() ? now() - before_ : before_ - now(); }
  /// What a cache may take of `limit` bytes, or of what there is. kResourceExhausted,
  /// kInvalidArgument.
  [[nodiscard]] Result<int64_t> room(int64_t limit) const {
    if (backend_.host_memory() && limit == 0) {
      return make_error(StatusCode::kInvalidArgument,
                        "--fit-batch: {} computes in the host's memory; say how much of it counts, "
                        "like --gpu-memory 8GB",
                        backend_.name());
    }
    const int64_t counted = limit > 0 ? limit - taken_ : std::numeric_limits<int64_t>::max();
    const int64_t room =
        backend_.host_memory() ? counted : std::min(counted, before_ - taken_) - kReserve;
    return room > 0 ? Result<int64_t>(room) : exhausted(0, limit);
  }
  /// Whether a cache of so many bytes keeps within the limit; 0: there is none.
  [[nodiscard]] Status check(int64_t cache, int64_t limit) const {
    return limit == 0 || taken_ + cache <= limit ? Status() : exhausted(cache, limit);
  }

 private:
  [[nodiscard]] int64_t now() const {
    release_free_memory();
    return backend_.host_memory() ? rss_bytes() : backend_.free_memory();
  }
  [[nodiscard]] Status exhausted(int64_t cache, int64_t limit) const {
    return make_error(StatusCode::kResourceExhausted,
                      "weights and scratch memory take {} MiB, the cache {} MiB: more than the {} "
                      "MiB that count; lower --batch, --context or --max-num-batched-tokens, or "
                      "raise --gpu-memory",
                      taken_ >> 20, cache >> 20, (limit > 0 ? limit : before_) >> 20);
  }

  const Backend& backend_;
  int64_t before_;
  int64_t taken_ = 0;
};

/// The folder of a model, or of a config.json that stands for one.
std::string folder_of(const OfflineRequest& request) {
  const fs::path path(request.model.model_dir);
  const bool file = !request.dummy_scheme.empty() && fs::is_regular_file(path);
  return file ? path.parent_path().string() : path.string();
}

Result<ModelConfig> config_of(const OfflineRequest& request) {
  const std::string& path = request.model.model_dir;
  if (request.dummy_scheme.empty() || !fs::is_regular_file(path)) {
    return load_model_config(path);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  return parse_model_config({.text = text, .path = path});
}

Result<std::unique_ptr<Model>> load(const OfflineRequest& request,
                                    OfflineSetup& setup,
                                    const ModelOptions& options) {
  if (request.dummy_scheme.empty()) {
    return load_model(request.model.model_dir, *setup.backend, options);
  }
  NIBBLE_ASSIGN_OR_RETURN(const QuantScheme scheme, find_scheme(request.dummy_scheme));
  DummyWeights weights(setup.config, scheme, request.seed);
  const std::string folder = folder_of(request);
  return load_made_model(
      {.path = folder.empty() ? "." : folder, .config = setup.config, .maker = weights},
      *setup.backend, options);
}

/// Options of the largest batch, up to the shape's, whose sequences fit into `room` bytes.
Result<EngineOptions> fit_batch(const EngineOptions& base,
                                const OfflineSetup& setup,
                                int64_t room,
                                OfflineShape& shape) {
  EngineOptions options = base;  // resolved for the shape as it was asked for
  KvCacheShape cache{.layers = kv_specs(setup.config, options.kv_code),
                     .page_size = options.page_size,
                     .num_pages = {}};
  // A page more for each: of what the prefix cache holds of a prompt the last is computed again.
  EngineOptions longer = options;
  longer.max_model_len += options.page_size;
  NIBBLE_ASSIGN_OR_RETURN(
      cache.num_pages,
      share_pages(cache, useful_pages(longer, kv_pools(cache.layers)), room, setup.backend.get()));
  const int64_t fits = cache.sequences_of(longer.max_model_len);
  if (fits < 1) {
    return make_error(StatusCode::kResourceExhausted,
                      "{} MiB are left for the cache, too few for one sequence of {} tokens; lower "
                      "--input-len, --output-len or --context, or raise --gpu-memory",
                      room >> 20, options.max_model_len);
  }
  shape.batch = std::min(shape.batch, fits);
  options.max_num_seqs = shape.batch;
  options.num_pages = 0;
  options.pool_pages = cache.num_pages;
  return EngineCore::resolve(options, setup.config, setup.backend.get());
}

int64_t cache_bytes(const EngineOptions& options, const OfflineSetup& setup) {
  const KvCacheShape shape{.layers = kv_specs(setup.config, options.kv_code),
                           .page_size = options.page_size,
                           .num_pages = options.pool_pages};
  return shape.bytes(setup.backend.get());
}

}  // namespace

Result<OfflineSetup> set_up_offline(const OfflineRequest& request) {
  using Clock = std::chrono::steady_clock;
  OfflineSetup setup{.shapes = request.shapes};
  if (!request.dummy_scheme.empty()) {
    NIBBLE_RETURN_IF_ERROR(find_scheme(request.dummy_scheme).status());  // before all else
  }
  EngineOptions base;
  base.max_num_batched_tokens = request.max_num_batched_tokens;
  if (request.batch == OfflineRequest::Batch::kThatFits) {  // few decode before the last begins
    base.max_num_batched_tokens =
        std::max(base.max_num_batched_tokens, kTokensOfSequence * request.shapes.front().batch);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::optional<KvCode> asked,
                          parse_kv_cache_dtype(request.model.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(setup.config, config_of(request));
  const auto begin = Clock::now();
  NIBBLE_ASSIGN_OR_RETURN(setup.backend, open_backend(backend_of(request.model)));
  base.kv_code = setup.kv_code = kv_code_for(asked, setup.config, *setup.backend);
  base.page_size = setup.backend->preferred_page_size(base.kv_code);
  base.ignore_fmpq = request.model.ignore_fmpq;
  NIBBLE_ASSIGN_OR_RETURN(EngineOptions options,
                          OfflineBench::options_for(setup.shapes, base, setup.config));
  MemoryUse memory(*setup.backend);
  ModelOptions of_model = model_options(options);
  of_model.experts = request.experts;
  NIBBLE_ASSIGN_OR_RETURN(auto model, load(request, setup, of_model));
  memory.read();
  setup.scheme = model->scheme();
  setup.weight_bytes = model->weight_bytes();
  if (request.batch == OfflineRequest::Batch::kThatFits) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t room, memory.room(request.memory));
    NIBBLE_ASSIGN_OR_RETURN(options, fit_batch(options, setup, room, setup.shapes.front()));
  }
  setup.cache_bytes = cache_bytes(options, setup);
  NIBBLE_RETURN_IF_ERROR(memory.check(setup.cache_bytes, request.memory));
  NIBBLE_ASSIGN_OR_RETURN(setup.core, EngineCore::create(std::move(model), options));
  setup.load_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  return setup;
}

}  // namespace nibble
