#include "model/decoder.h"

#include <utility>

#include "base/check.h"
#include "checkpoint/finite.h"
#include "model/decoder_scratch.h"

namespace nibble {

Decoder::Decoder(DecoderParts parts, Backend& backend, const ModelOptions& options)
    : parts_(std::move(parts)),
      backend_(backend),
      options_(options),
      activation_type_(backend.activation_type(parts_.config.dtype)) {}

Result<std::unique_ptr<Model>> Decoder::create(DecoderParts parts,
                                               Backend& backend,
                                               const ModelOptions& options) {
  CHECK_EQ(static_cast<int64_t>(parts.layers.size()), parts.config.num_layers);
  std::unique_ptr<Decoder> decoder(new Decoder(std::move(parts), backend, options));
  NIBBLE_RETURN_IF_ERROR(decoder->allocate_scratch());
  return std::unique_ptr<Model>(std::move(decoder));
}

Status Decoder::allocate_scratch() {
  const ModelConfig& config = parts_.config;
  const DecoderScratch scratch = decoder_scratch(config, options_, backend_);
  const auto allocate = [&](DeviceBuffer& buffer, int64_t bytes) -> Status {
    if (bytes > 0) {
      NIBBLE_ASSIGN_OR_RETURN(buffer, backend_.allocate(static_cast<size_t>(bytes)));
    }
    return {};
  };
  NIBBLE_RETURN_IF_ERROR(allocate(hidden_, scratch.hidden));
  NIBBLE_RETURN_IF_ERROR(allocate(logit_hidden_, scratch.logit_hidden));
  NIBBLE_RETURN_IF_ERROR(allocate(logits_, scratch.logits));
  for (size_t name = 0; name < kScratchNames; ++name) {
    NIBBLE_RETURN_IF_ERROR(allocate(layer_scratch_.at(name), scratch.layers.at(name)));
  }
  return backend_.prepare_steps(step_limits(config, options_));
}

Result<PagedKvCache> Decoder::make_cache(const KvCacheShape& shape) {
  NIBBLE_RETURN_IF_ERROR(shape.check(backend_, parts_.config.num_heads));
  return PagedKvCache::allocate(shape, backend_);
}

int64_t Decoder::weight_bytes() const {
  int64_t bytes = parts_.head.weight_bytes();
  for (const DecoderLayer& layer : parts_.layers) {
    bytes += std::visit([](const auto& part) { return part.weight_bytes(); }, layer.attention);
    bytes += std::visit([](const auto& mlp) { return mlp.weight_bytes(); }, layer.mlp);
  }
  return bytes;
}

Status Decoder::check_weights() const {
  const auto reader = CheckpointReader::open(parts_.folder);
  return reader.ok() ? check_all_finite(*reader) : Status();  // gone meanwhile: nothing is known
}

void Decoder::check_batch(const StepInput& batch, const PagedKvCache& cache) const {
  const ModelConfig& config = parts_.config;
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  CHECK_LE(rows, options_.max_batch_tokens);
  CHECK_LE(static_cast<int64_t>(batch.logit_rows.size()), options_.max_logit_rows);
  CHECK_EQ(std::ssize(cache.shape().layers), config.num_layers);
  CHECK(batch.other_pools.empty() ||
        std::ssize(batch.other_pools) == (cache.num_pools() - 1) * std::ssize(batch.sequences));
  for (const SequenceSpan& sequence : batch.sequences) {
    CHECK_LE(sequence.q_begin + sequence.q_len, rows);
    CHECK_LE(sequence.q_len, sequence.kv_len);
    CHECK_LE(sequence.kv_len, config.max_position);
  }
  for (const int32_t row : batch.logit_rows) {  // of a step without tokens: of the one before
    CHECK_MSG(row >= 0 && (row < rows || rows == 0), "logit row {} of {}", row, rows);
  }
}

void Decoder::write_logits(Step& step, float* logits) {
  auto* logit_rows = logit_hidden_.as<float>();
  step.take_logit_rows(hidden_.as<float>(), parts_.config.hidden_size, logit_rows);
  parts_.head.forward(
      {.x = logit_rows, .m = step.logit_rows(), .y = logits, .input = parts_.final_norm.input()});
  if (parts_.config.dtype == DType::kBF16) {
    backend_.round_bf16(logits, step.logit_rows() * parts_.config.vocab_size);
  }
}

void Decoder::run_layers(Step& step, const PagedKvCache& cache) {
  const DType type = activation_type_;
  auto* hidden = hidden_.as<float>();
  ForwardContext context{.step = step,
                         .rows = step.rows(),
                         .sequences = step.input().sequences,
                         .kv = {},
                         .scratch = {}};
  for (size_t name = 0; name < kScratchNames; ++name) {
    context.scratch.set(ScratchName{static_cast<uint8_t>(name)},
                        {layer_scratch_.at(name).as<void>(), type});
  }
  parts_.embedding->gather(step, hidden);
  if (parts_.positions != nullptr) {
    parts_.positions->add_positions(step, parts_.config.first_position, hidden);
  }
  int64_t index = 0;
  for (DecoderLayer& layer : parts_.layers) {
    context.kv = cache.view(index++);
    context.sequences =
        sequences_in_pool(step.input().sequences, step.input().other_pools, context.kv.pool);
    context.residuals = residuals_in(context.kv, step.input().sequences, step.input().other_pools);
    std::visit([&](auto& part) { part.forward(hidden, context); }, layer.attention);
    std::visit([&](auto& mlp) { mlp.forward(hidden, context); }, layer.mlp);
  }
}

void Decoder::run(const StepInput& batch,
                  const PagedKvCache& cache,
                  const SamplingInput& sampling,
                  float* logits) {
  check_batch(batch, cache);
  if (batch.tokens.empty() && sampling.rows.empty()) {
    return;
  }
  const StepPlan plan{.input = batch,
                      .page_size = cache.shape().page_size,
                      .program = cache.program(),
                      .sampling = sampling};
  backend_.run_step(plan, [&](Step& step) {
    if (step.rows() > 0) {  // else it samples the logits that the step before has left
      run_layers(step, cache);
    }
    if (step.rows() > 0 && step.logit_rows() > 0) {
      write_logits(step, logits);
    }
    if (!sampling.rows.empty()) {
      step.sample(logits, parts_.config.vocab_size);
    }
  });
}

void Decoder::forward(const StepInput& batch, PagedKvCache& cache, std::span<float> logits) {
  const auto vocab = static_cast<size_t>(parts_.config.vocab_size);
  CHECK_EQ(logits.size(), batch.logit_rows.size() * vocab);
  if (backend_.host_memory()) {
    run(batch, cache, {}, logits.data());
    return;
  }
  run(batch, cache, {}, logits_.as<float>());
  backend_.read(logits_.as<float>(), logits);
}

void Decoder::final_states(int64_t first, std::span<float> out) {
  const int64_t width = parts_.config.hidden_size;
  CHECK_LE(first * width + std::ssize(out), options_.max_batch_tokens * width);
  backend_.read(hidden_.as<float>() + first * width, out);
  parts_.final_norm.apply(backend_, out);
}

void Decoder::start(const StepInput& batch, PagedKvCache& cache, const SamplingInput& input) {
  CHECK(input.rows.empty() || input.rows.size() == batch.logit_rows.size());
  run(batch, cache, input, logits_.as<float>());
}

void Decoder::finish(std::span<SampledRow> out) {
  if (!out.empty()) {
    backend_.finish_step(out);
  }
}

}  // namespace nibble
