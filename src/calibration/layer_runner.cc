#include "calibration/layer_runner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "arch/kv_specs.h"
#include "base/math.h"
#include "base/process.h"
#include "layers/attention.h"

namespace nibble {
namespace {

/// Of the model's own precision; devices compute in BF16.
KvCode cache_code(const ModelConfig& config, const Backend& backend) {
  return config.dtype == DType::kBF16 || !backend.host_memory() ? KvCode::kBf16 : KvCode::kF32;
}

}  // namespace

LayerRunner::LayerRunner(WeightLoader weights,
                         std::unique_ptr<Backend> backend,
                         const ModelOptions& options)
    : backend_(std::move(backend)),
      weights_(std::move(weights)),
      options_(options),
      loader_(weights_.config(), weights_, *backend_, options.max_batch_tokens) {}

Result<std::unique_ptr<LayerRunner>> LayerRunner::open(const std::string& model_dir,
                                                       int64_t max_rows,
                                                       int threads) {
  return open(model_dir, max_rows, BackendOptions{.device = "cpu", .cpu = {.threads = threads}});
}

Result<std::unique_ptr<LayerRunner>> LayerRunner::open(const std::string& model_dir,
                                                       int64_t max_rows,
                                                       const BackendOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(auto backend, open_backend(options));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig stored, load_model_config(model_dir));
  if (stored.latent.kv_rank > 0 && !backend->host_memory()) {
    return make_error(StatusCode::kUnsupported,
                      "{}: a model with latent attention ({}) is calibrated on the CPU; leave "
                      "--device out",
                      model_dir, stored.architecture);
  }
  const Backend& device = *backend;
  const bool bf16 = stored.dtype == DType::kBF16;
  const RunsFormat runs = [&device, bf16](const WeightFormat& format, int64_t k) {
    return device.check_gemm(format, bf16 ? ActFormat::kBf16 : ActFormat::kFloat, k).ok();
  };
  NIBBLE_ASSIGN_OR_RETURN(WeightLoader weights, WeightLoader::open(model_dir, stored, runs));
  std::unique_ptr<LayerRunner> runner(new LayerRunner(
      std::move(weights), std::move(backend), {.max_batch_tokens = max_rows, .max_logit_rows = 1}));
  NIBBLE_RETURN_IF_ERROR(runner->prepare());
  return runner;
}

Status LayerRunner::prepare() {
  NIBBLE_RETURN_IF_ERROR(loader_.prepare());
  NIBBLE_ASSIGN_OR_RETURN(embeddings_, load_embeddings(config(), weights_, *backend_));
  const DecoderScratch sizes = decoder_scratch(config(), options_, *backend_);
  const int slots = backend_->host_memory() ? 1 : CalibrationMath::kSlots;
  for (int slot = 0; slot < slots; ++slot) {
    NIBBLE_ASSIGN_OR_RETURN(hidden_.emplace_back(),
                            backend_->allocate(static_cast<size_t>(sizes.hidden)));
  }
  for (size_t name = 0; name < kScratchNames; ++name) {
    if (sizes.layers.at(name) > 0) {
      NIBBLE_ASSIGN_OR_RETURN(scratch_.at(name),
                              backend_->allocate(static_cast<size_t>(sizes.layers.at(name))));
    }
  }
  page_size_ = backend_->preferred_page_size(cache_code(config(), *backend_));
  pages_.resize(static_cast<size_t>(ceil_div(options_.max_batch_tokens, page_size_)));
  std::iota(pages_.begin(), pages_.end(), 0);
  return backend_->prepare_steps(step_limits(config(), options_));
}

int64_t LayerRunner::row_bytes(ScratchName name) const {
  const auto bytes = static_cast<int64_t>(scratch_.at(static_cast<size_t>(name)).size());
  return bytes / options_.max_batch_tokens;
}

Status LayerRunner::load_attention(int64_t layer) {
  attention_.reset();
  const std::vector<KvSpec> specs = kv_specs(config(), cache_code(config(), *backend_));
  NIBBLE_ASSIGN_OR_RETURN(
      cache_, PagedKvCache::allocate(KvCacheShape::equal_pools({specs[static_cast<size_t>(layer)]},
                                                               page_size_, std::ssize(pages_)),
                                     *backend_));
  if (has_latent_attention()) {
    NIBBLE_ASSIGN_OR_RETURN(attention_, loader_.latent_attention(layer));
  } else {
    NIBBLE_ASSIGN_OR_RETURN(attention_, loader_.attention(layer));
  }
  return {};
}

Status LayerRunner::refuse_latent_attention() const {
  return has_latent_attention()
             ? make_error(StatusCode::kUnsupported,
                          "{}: what the products of latent attention multiply is not looked at",
                          config().architecture)
             : Status();
}

void LayerRunner::add_attention(ForwardContext& context) {
  RowObserver* observer = context.observer;
  context.observer = has_latent_attention() ? nullptr : observer;
  std::visit([&](auto& attention) { attention.forward(hidden(), context); }, *attention_);
  context.observer = observer;
}

Status LayerRunner::load_mlp(int64_t layer) {
  mlp_.reset();
  NIBBLE_ASSIGN_OR_RETURN(mlp_, loader_.mlp(layer));
  return {};
}

void LayerRunner::unload() {
  attention_.reset();
  mlp_.reset();
  weights_.drop_substitutes();
  weights_.release_all();
  release_free_memory();
}

std::span<std::byte> LayerRunner::hidden_rows(int64_t rows) {
  return {hidden_.at(slot_).as<std::byte>(), static_cast<size_t>(rows * hidden_row_bytes())};
}

std::span<std::byte> LayerRunner::scratch_rows(ScratchName name, int64_t rows) {
  return {scratch_.at(static_cast<size_t>(name)).as<std::byte>(),
          static_cast<size_t>(rows * row_bytes(name))};
}

void LayerRunner::embed(std::span<const int32_t> tokens) {
  const auto rows = static_cast<int32_t>(tokens.size());
  const SequenceSpan span{.q_len = rows, .kv_len = rows, .pages = pages_.data()};
  backend_->run_step({.input = {tokens, {&span, 1}, {}}, .page_size = page_size_}, [&](Step& step) {
    embeddings_.tokens->gather(step, hidden());
    if (embeddings_.positions != nullptr) {
      embeddings_.positions->add_positions(step, config().first_position, hidden());
    }
  });
  weights_.release_all();
}

void LayerRunner::run(std::span<const int32_t> tokens,
                      const std::function<void(ForwardContext&)>& work) {
  const auto rows = static_cast<int32_t>(tokens.size());
  const SequenceSpan span{
      .q_len = rows, .kv_len = rows, .pages = pages_.data(), .prompt_len = rows};
  backend_->run_step({.input = {tokens, {&span, 1}, {}}, .page_size = page_size_}, [&](Step& step) {
    ForwardContext context{.step = step, .rows = rows, .sequences = step.input().sequences};
    if (cache_) {
      context.kv = cache_->view(0);
    }
    for (size_t name = 0; name < kScratchNames; ++name) {
      context.scratch.set(ScratchName{static_cast<uint8_t>(name)},
                          {scratch_.at(name).as<void>(), activation_type()});
    }
    work(context);
  });
}

}  // namespace nibble
