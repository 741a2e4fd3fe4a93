#include "server/embedding_text.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace nibble {
namespace {

constexpr int64_t kLongestNumber = 16;  // "-1.23456789e-10,"

/// RFC 4648.
std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(bytes.size() - i, 3);
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) {
      bits = bits << 8 | (j < count ? static_cast<unsigned char>(bytes[i + j]) : 0U);
    }
    for (size_t j = 0; j < 4; ++j) {
      out += j <= count ? kDigits[bits >> (18 - 6 * j) & 63U] : '=';
    }
  }
  return out;
}

}  // namespace

std::vector<float> embedding_of(std::span<const float> pooled,
                                int64_t dimensions,
                                VectorLength length) {
  const std::span<const float> kept = pooled.first(static_cast<size_t>(dimensions));
  double squares = 0.0;
  for (const float x : kept) {
    squares += static_cast<double>(x) * x;
  }
  const bool divided = length == VectorLength::kOne && squares > 0;
  const double scale = divided ? 1.0 / std::sqrt(squares) : 1.0;
  std::vector<float> out(kept.size());
  std::ranges::transform(kept, out.begin(), [&](float x) { return static_cast<float>(x * scale); });
  return out;
}

std::string embedding_json(std::span<const float> embedding, EmbeddingEncoding encoding) {
  if (encoding == EmbeddingEncoding::kFloat) {
    return fmt::format("[{}]", fmt::join(embedding, ","));
  }
  std::string bytes;
  bytes.reserve(embedding.size_bytes());
  for (const float x : embedding) {
    const auto bits = std::bit_cast<uint32_t>(x);
    for (int shift = 0; shift < 32; shift += 8) {
      bytes += static_cast<char>(bits >> shift & 0xffU);
    }
  }
  return fmt::format("\"{}\"", base64(bytes));
}

int64_t longest_embedding(int64_t dimensions, EmbeddingEncoding encoding) {
  return encoding == EmbeddingEncoding::kFloat ? dimensions * kLongestNumber + 2
                                               : (dimensions * 4 + 2) / 3 * 4 + 2;
}

}  // namespace nibble
