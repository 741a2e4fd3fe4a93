#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "quantizer/encoder.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace {

using nibble::EncoderOptions;
using nibble::MatrixEncoder;
using nibble::RowsError;

constexpr size_t kHead = 4;
constexpr size_t kMostWeights = 8192;
constexpr nibble::Dialect kDialects[] = {nibble::Dialect::kCompressedTensors,
                                         nibble::Dialect::kQuark, nibble::Dialect::kFp8};

void expect(bool condition) {
  if (!condition) {
    std::abort();
  }
}

/// What an encoder makes of a matrix.
struct Outcome {
  nibble::StatusCode code = nibble::StatusCode::kOk;
  std::vector<std::vector<std::byte>> slots;
  RowsError error;
};

Outcome encode(const MatrixEncoder& encoder, const std::vector<float>& x, int64_t n, int64_t k) {
  Outcome outcome;
  nibble::Extent extent;
  if (encoder.needs_extent()) {
    const auto absmax = nibble::absmax_of(x.data(), 0, n, k);
    if (!absmax.ok()) {
      outcome.code = absmax.status().code();
      return outcome;
    }
    extent.absmax = *absmax;
  }
  for (size_t slot = 0; slot < encoder.slots().size(); ++slot) {
    outcome.slots.emplace_back(static_cast<size_t>(encoder.place(slot, 0, n).bytes));
  }
  for (int64_t row = 0; row < n; row += encoder.row_block()) {
    const int64_t rows = std::min(encoder.row_block(), n - row);
    // Rows of their own, so that what is read or written beyond them is noticed.
    const std::vector<float> values(x.begin() + row * k, x.begin() + (row + rows) * k);
    std::vector<std::vector<std::byte>> pieces;
    std::vector<std::byte*> out;
    for (size_t slot = 0; slot < outcome.slots.size(); ++slot) {
      pieces.emplace_back(static_cast<size_t>(encoder.place(slot, row, rows).bytes));
      out.push_back(pieces.back().data());
    }
    RowsError error;
    const nibble::Status status = encoder.encode(row, rows, values.data(), extent, out, error);
    if (!status.ok()) {
      outcome.code = status.code();
      return outcome;
    }
    outcome.error.add(error);
    for (size_t slot = 0; slot < pieces.size(); ++slot) {
      const auto offset = static_cast<std::ptrdiff_t>(encoder.place(slot, row, rows).offset);
      std::copy(pieces[slot].begin(), pieces[slot].end(), outcome.slots[slot].begin() + offset);
    }
  }
  return outcome;
}

// All bits, so that a NaN equals itself and 0 differs from -0.
template <typename T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

bool same_error(const RowsError& a, const RowsError& b) {
  return a.count == b.count && same(a.signal, b.signal) && same(a.noise, b.noise) &&
         same(a.product, b.product) && same(a.energy, b.energy) && same(a.max_error, b.max_error) &&
         a.clipped == b.clipped && a.zeros == b.zeros && same(a.scale_low, b.scale_low) &&
         same(a.scale_high, b.scale_high);
}

// Four bytes a weight, or one: numbers of all sizes, or of similar ones as in real matrices.
std::vector<float> read_weights(std::span<const uint8_t> bytes, bool similar, size_t count) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count && !bytes.empty(); ++i) {
    if (similar) {
      x[i] = static_cast<float>(static_cast<int8_t>(bytes[i % bytes.size()])) / 64;
    } else {
      uint32_t bits = 0;
      for (size_t b = 0; b < 4; ++b) {
        bits = bits << 8 | bytes[(i * 4 + b) % bytes.size()];
      }
      x[i] = std::bit_cast<float>(bits);
    }
  }
  return x;
}

void check(const Outcome& outcome, const std::vector<float>& x, bool quantized) {
  const bool finite = std::all_of(x.begin(), x.end(), [](float w) { return std::isfinite(w); });
  if (outcome.code != nibble::StatusCode::kOk) {
    // BF16 has no room for the largest F32 numbers.
    expect(outcome.code == nibble::StatusCode::kCorrupt && (!finite || !quantized));
    return;
  }
  expect(finite && outcome.error.count == static_cast<int64_t>(x.size()));
  expect(std::isfinite(outcome.error.signal) && std::isfinite(outcome.error.energy));
  expect(std::isfinite(outcome.error.noise) && std::isfinite(outcome.error.product));
  expect(!quantized || (outcome.error.scale_low > 0 && std::isfinite(outcome.error.scale_high)));
}

}  // namespace

// Input: scheme (top bit: weights of similar size), rule, dialect and rows, columns; then bytes
// that become the weights, over and over. Weights that are finite are encoded, all others refused,
// and every instruction set gives the same bits.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kHead) {
    return 0;
  }
  const auto schemes = nibble::all_schemes();
  const auto scale_rules = nibble::all_scale_rules();
  EncoderOptions options;
  options.scheme = schemes[(data[0] & 0x7fU) % schemes.size()];
  options.rule = scale_rules[data[1] % scale_rules.size()];
  options.dialect = kDialects[data[2] % std::size(kDialects)];
  const bool quantized = options.scheme.weight.quantized();
  if (!quantized) {
    options.dialect = nibble::Dialect::kCompressedTensors;
  }
  const int64_t n = 1 + data[2] / std::size(kDialects) % 17;
  const int64_t k = data[3] < 128 ? (data[3] + 1) * 8 : data[3] - 127;
  if (static_cast<size_t>(n * k) > kMostWeights) {
    return 0;
  }
  const std::vector<float> x = read_weights(std::span(data, size).subspan(kHead),
                                            (data[0] & 0x80U) != 0, static_cast<size_t>(n * k));
  options.isa = "scalar";
  const auto encoder = nibble::make_encoder(options, n, k);
  if (!encoder.ok()) {
    return 0;
  }
  const Outcome outcome = encode(**encoder, x, n, k);
  check(outcome, x, quantized);
  for (const std::string_view isa : {"avx2", "avx512"}) {
    if (nibble::rows::find_row_kernels(isa).ok()) {
      options.isa = isa;
      const Outcome other = encode(*nibble::make_encoder(options, n, k).value(), x, n, k);
      expect(other.code == outcome.code);
      expect(outcome.code != nibble::StatusCode::kOk ||
             (other.slots == outcome.slots && same_error(other.error, outcome.error)));
    }
  }
  return 0;
}
