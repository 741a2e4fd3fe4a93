#include "eval/base_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/json.h"
#include "base/math.h"

namespace nibble {
namespace {

constexpr std::string_view kMagic = "NIBBLEBR";
constexpr int64_t kAlignment = 64;
constexpr auto kHeadBytes = static_cast<int64_t>(kMagic.size() + sizeof(uint64_t));
constexpr float kCodes = 65535;
// Nats below the likeliest token, under which probabilities are not told apart: exp(-40) = 4e-18.
constexpr float kWidest = 40;

std::string partial(const std::string& path) { return path + ".partial"; }

std::string header_of(const BaseFacts& facts) {
  std::string json = Json::object({{"model", facts.model},
                                   {"kv_cache_dtype", facts.kv_cache_dtype},
                                   {"protocol", facts.protocol},
                                   {"window", facts.window},
                                   {"vocab_size", facts.vocab_size},
                                   {"rows", facts.rows},
                                   {"tokens_digest", facts.digest},
                                   {"precision", base_precision_name(facts.precision)}})
                         .dump();
  json.resize(static_cast<size_t>(round_up(kHeadBytes + std::ssize(json), kAlignment) - kHeadBytes),
              ' ');
  const uint64_t length = json.size();
  std::string out(kMagic);
  for (int byte = 0; byte < 8; ++byte) {
    out += static_cast<char>((length >> (8 * byte)) & 0xffU);
  }
  return out + json;
}

Result<BaseFacts> facts_of(std::string_view text, const std::string& name) {
  const auto json = Json::parse(text);
  if (!json.ok()) {
    return json.status().with_context(name);
  }
  const JsonReader reader(*json, name);
  BaseFacts facts;
  NIBBLE_ASSIGN_OR_RETURN(facts.model, reader.required_string("model"));
  NIBBLE_ASSIGN_OR_RETURN(facts.kv_cache_dtype, reader.required_string("kv_cache_dtype"));
  NIBBLE_ASSIGN_OR_RETURN(facts.protocol, reader.required_string("protocol"));
  NIBBLE_ASSIGN_OR_RETURN(facts.window, reader.required_int("window"));
  NIBBLE_ASSIGN_OR_RETURN(facts.vocab_size, reader.required_int("vocab_size"));
  NIBBLE_ASSIGN_OR_RETURN(facts.rows, reader.required_int("rows"));
  NIBBLE_ASSIGN_OR_RETURN(facts.digest, reader.required_string("tokens_digest"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string precision, reader.required_string("precision"));
  NIBBLE_ASSIGN_OR_RETURN(facts.precision, parse_base_precision(precision));
  return facts;
}

Status damaged(const std::string& path, std::string_view why) {
  return make_error(StatusCode::kCorrupt,
                    "{}: {}; write it again with nibble eval kld BASE --save-base FILE", path, why);
}

}  // namespace

std::string_view base_precision_name(BasePrecision precision) {
  return precision == BasePrecision::kF32 ? "f32" : "u16";
}

Result<BasePrecision> parse_base_precision(std::string_view name) {
  for (const BasePrecision precision : {BasePrecision::kF32, BasePrecision::kU16}) {
    if (name == base_precision_name(precision)) {
      return precision;
    }
  }
  return make_error(StatusCode::kInvalidArgument, "precision '{}': must be f32 or u16", name);
}

int64_t base_row_bytes(BasePrecision precision, int64_t vocab_size) {
  return precision == BasePrecision::kF32 ? 4 * vocab_size : 8 + 2 * vocab_size;
}

void encode_base_row(BasePrecision precision,
                     std::span<const float> logits,
                     std::span<std::byte> out) {
  if (precision == BasePrecision::kF32) {
    std::memcpy(out.data(), logits.data(), out.size());
    return;
  }
  const auto [least, largest] = std::ranges::minmax_element(logits);
  const float low = std::max(*least, *largest - kWidest);
  const float parameters[] = {low, (*largest - low) / kCodes};
  std::memcpy(out.data(), parameters, sizeof parameters);
  std::byte* place = out.data() + sizeof parameters;
  for (const float logit : logits) {
    const float code = parameters[1] > 0 ? std::nearbyint((logit - low) / parameters[1]) : 0;
    const auto stored = static_cast<uint16_t>(std::clamp(code, 0.0F, kCodes));
    std::memcpy(place, &stored, sizeof stored);
    place += sizeof stored;
  }
}

void decode_base_row(BasePrecision precision,
                     std::span<const std::byte> row,
                     std::span<float> out) {
  if (precision == BasePrecision::kF32) {
    std::memcpy(out.data(), row.data(), row.size());
    return;
  }
  float parameters[2];
  std::memcpy(parameters, row.data(), sizeof parameters);
  const std::byte* place = row.data() + sizeof parameters;
  for (float& logit : out) {
    uint16_t code = 0;
    std::memcpy(&code, place, sizeof code);
    place += sizeof code;
    logit = parameters[0] + static_cast<float>(code) * parameters[1];
  }
}

Result<BaseFileWriter> BaseFileWriter::create(const std::string& path, const BaseFacts& facts) {
  if (file_exists(path)) {
    return make_error(StatusCode::kAlreadyExists, "{} exists already; choose another name", path);
  }
  std::remove(partial(path).c_str());  // of a run that was killed
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(partial(path)));
  NIBBLE_RETURN_IF_ERROR(file.write(header_of(facts)));
  return BaseFileWriter(std::move(file), path, facts);
}

Status BaseFileWriter::write(std::span<const float> logits, ThreadPool& pool) {
  const auto vocab = static_cast<size_t>(facts_.vocab_size);
  const auto bytes = static_cast<size_t>(base_row_bytes(facts_.precision, facts_.vocab_size));
  const size_t rows = logits.size() / vocab;
  buffer_.resize(rows * bytes);
  pool.parallel_for(static_cast<int64_t>(rows), [&](int64_t chunk, int) {
    const auto row = static_cast<size_t>(chunk);
    encode_base_row(facts_.precision, logits.subspan(row * vocab, vocab),
                    std::span(buffer_).subspan(row * bytes, bytes));
  });
  written_ += static_cast<int64_t>(rows);
  return file_.write(buffer_);
}

Status BaseFileWriter::finish() {
  CHECK_EQ(written_, facts_.rows);
  NIBBLE_RETURN_IF_ERROR(file_.finish());
  return rename_file(partial(path_), path_);
}

void BaseFileWriter::discard() { std::remove(partial(path_).c_str()); }

Status FileBase::explain_not_finite() const {
  return damaged(file_.path(), "a row has a NaN or an infinity");
}

Result<FileBase> FileBase::open(const std::string& path, ThreadPool& pool) {
  NIBBLE_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  const auto bytes = file.bytes();
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(kMagic) || std::ssize(text) < kHeadBytes) {
    return damaged(path, "no file of base log-probabilities");
  }
  uint64_t length = 0;
  std::memcpy(&length, text.data() + kMagic.size(), sizeof length);
  if (length > text.size() - static_cast<size_t>(kHeadBytes)) {
    return damaged(path, "cut off within its header");
  }
  NIBBLE_ASSIGN_OR_RETURN(
      BaseFacts facts,
      facts_of(text.substr(static_cast<size_t>(kHeadBytes), length), std::string(file_name(path))));
  const int64_t rest = std::ssize(text) - kHeadBytes - static_cast<int64_t>(length);
  if (facts.vocab_size < 1 || facts.rows < 1 || facts.vocab_size > rest || facts.rows > rest ||
      rest != facts.rows * base_row_bytes(facts.precision, facts.vocab_size)) {
    return damaged(path, fmt::format("{} bytes of rows, but {} rows of {} tokens are announced",
                                     rest, facts.rows, facts.vocab_size));
  }
  FileBase base(std::move(file), std::move(facts), pool);
  base.first_byte_ = kHeadBytes + static_cast<int64_t>(length);
  return base;
}

Result<std::span<const float>> FileBase::next(int64_t rows) {
  CHECK_LE(next_row_ + rows, facts_.rows);
  const auto vocab = static_cast<size_t>(facts_.vocab_size);
  const auto bytes = static_cast<size_t>(base_row_bytes(facts_.precision, facts_.vocab_size));
  const auto part = file_.bytes().subspan(
      static_cast<size_t>(first_byte_) + static_cast<size_t>(next_row_) * bytes,
      static_cast<size_t>(rows) * bytes);
  logits_.resize(static_cast<size_t>(rows) * vocab);
  pool_.parallel_for(rows, [&](int64_t chunk, int) {
    const auto row = static_cast<size_t>(chunk);
    decode_base_row(facts_.precision, part.subspan(row * bytes, bytes),
                    std::span(logits_).subspan(row * vocab, vocab));
  });
  file_.drop_pages(part);
  next_row_ += rows;
  return std::span<const float>(logits_);
}

}  // namespace nibble
