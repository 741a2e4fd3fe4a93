#include "model/decoder.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace nibble {

Decoder::Decoder(DecoderParts parts, Backend& backend, const ModelOptions& options)
    : parts_(std::move(parts)), backend_(backend), options_(options) {}

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
  const int64_t heads = config.num_heads * config.head_dim;
  const int64_t kv_heads = config.num_kv_heads * config.head_dim;
  struct Request {
    Buffer& buffer;
    int64_t rows;
    int64_t width;
  };
  const int64_t rows = options_.max_batch_tokens;
  const Request requests[] = {{hidden_, rows, config.hidden_size},
                              {picked_, options_.max_logit_rows, config.hidden_size},
                              {qkv_, rows, heads + 2 * kv_heads},
                              {attended_, rows, heads},
                              {gate_up_, rows, 2 * config.intermediate_size}};
  for (const Request& request : requests) {
    const auto bytes = static_cast<size_t>(request.rows * request.width) * sizeof(float);
    NIBBLE_ASSIGN_OR_RETURN(request.buffer, Buffer::allocate(bytes));
  }
  return {};
}

int64_t Decoder::weight_bytes() const {
  int64_t bytes = parts_.head.weight_bytes();
  for (const DecoderLayer& layer : parts_.layers) {
    bytes += layer.attention.weight_bytes() + layer.mlp.weight_bytes();
  }
  return bytes;
}

void Decoder::check_batch(const ForwardBatch& batch,
                          const PagedKvCache& cache,
                          std::span<const float> logits) const {
  const ModelConfig& config = parts_.config;
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  CHECK_LE(rows, options_.max_batch_tokens);
  CHECK_LE(static_cast<int64_t>(batch.logit_rows.size()), options_.max_logit_rows);
  CHECK_EQ(logits.size(), batch.logit_rows.size() * static_cast<size_t>(config.vocab_size));
  CHECK_EQ(cache.shape().num_layers, config.num_layers);
  CHECK_EQ(cache.shape().kv_heads, config.num_kv_heads);
  CHECK_EQ(cache.shape().head_dim, config.head_dim);
  for (const SequenceSpan& sequence : batch.sequences) {
    CHECK_LE(sequence.q_begin + sequence.q_len, rows);
    CHECK_LE(sequence.q_len, sequence.kv_len);
    CHECK_LE(sequence.kv_len, config.max_position);
  }
  for (const int32_t row : batch.logit_rows) {
    CHECK_MSG(row >= 0 && row < rows, "logit row {} of {}", row, rows);
  }
}

void Decoder::write_logits(std::span<const int32_t> rows, std::span<float> logits) {
  const int64_t width = parts_.config.hidden_size;
  const float* hidden = hidden_.as<float>().data();
  float* picked = picked_.as<float>().data();
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(hidden + rows[i] * width, width, picked + static_cast<int64_t>(i) * width);
  }
  const auto count = static_cast<int64_t>(rows.size());
  parts_.head.forward(
      {.x = picked, .m = count, .y = logits.data(), .input = parts_.final_norm.input()}, backend_);
  if (parts_.config.dtype == DType::kBF16) {
    backend_.round_bf16(logits.data(), std::ssize(logits));
  }
}

void Decoder::forward(const ForwardBatch& batch, PagedKvCache& cache, std::span<float> logits) {
  check_batch(batch, cache, logits);
  if (batch.tokens.empty()) {
    return;
  }
  float* hidden = hidden_.as<float>().data();
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  ForwardContext context{.backend = backend_,
                         .rows = rows,
                         .sequences = batch.sequences,
                         .kv = {},
                         .qkv = qkv_.as<float>().data(),
                         .attended = attended_.as<float>().data(),
                         .gate_up = gate_up_.as<float>().data()};
  parts_.embedding.gather(batch.tokens, hidden);
  int64_t index = 0;
  for (DecoderLayer& layer : parts_.layers) {
    context.kv = cache.view(index++);
    layer.attention.forward(hidden, context);
    layer.mlp.forward(hidden, context);
  }
  if (!batch.logit_rows.empty()) {
    write_logits(batch.logit_rows, logits);
  }
}

}  // namespace nibble
