#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/thread_pool.h"
#include "eval/base_rows.h"

namespace nibble {

/// How a row of log-probabilities is stored.
enum class BasePrecision : uint8_t {
  kF32,  // vocab_size f32
  kU16,  // f32 low, f32 step, vocab_size codes: low + code * step
};

/// "f32", "u16".
[[nodiscard]] std::string_view base_precision_name(BasePrecision precision);
/// kInvalidArgument lists the names.
Result<BasePrecision> parse_base_precision(std::string_view name);
[[nodiscard]] int64_t base_row_bytes(BasePrecision precision, int64_t vocab_size);

/// Writes one row; `out` has base_row_bytes(). The codes of kU16 span the row from its least logit,
/// or from 40 nats under its largest, to its largest: no logit in there is off by more than 0.0004.
void encode_base_row(BasePrecision precision,
                     std::span<const float> logits,
                     std::span<std::byte> out);
void decode_base_row(BasePrecision precision, std::span<const std::byte> row, std::span<float> out);

/// What a file of base rows belongs to.
struct BaseFacts {
  std::string model;  // its name, for messages
  std::string kv_cache_dtype;
  std::string protocol;
  int64_t window = 0;
  int64_t vocab_size = 0;
  int64_t rows = 0;
  std::string digest;  // digest_text(digest_of_windows())
  BasePrecision precision = BasePrecision::kU16;
};

/// A file of base rows: the eight bytes "NIBBLEBR", the length of a JSON object as a little-endian
/// 64-bit number, that object (BaseFacts, padded with blanks to a multiple of 64 bytes from the
/// front), and the rows one after another. It appears under its name when it is whole.
class BaseFileWriter final {
 public:
  /// kAlreadyExists when the file is there.
  static Result<BaseFileWriter> create(const std::string& path, const BaseFacts& facts);
  /// Appends logits [rows, vocab_size].
  Status write(std::span<const float> logits, ThreadPool& pool);
  Status finish();
  /// Removes what was written.
  void discard();

 private:
  BaseFileWriter(OutputFile file, std::string path, const BaseFacts& facts)
      : file_(std::move(file)), path_(std::move(path)), facts_(facts) {}

  OutputFile file_;
  std::string path_;
  BaseFacts facts_;
  int64_t written_ = 0;  // rows
  std::vector<std::byte> buffer_;
};

/// Rows of a file, as a base to compare with.
class FileBase final : public BaseRows {
 public:
  /// kCorrupt: no such file, damaged or cut off.
  static Result<FileBase> open(const std::string& path, ThreadPool& pool);

  [[nodiscard]] const BaseFacts& facts() const { return facts_; }
  Status begin(std::span<const Feed> /*feeds*/) override { return {}; }
  Result<std::span<const float>> next(int64_t rows) override;
  [[nodiscard]] Status explain_not_finite() const override;

 private:
  FileBase(MappedFile file, BaseFacts facts, ThreadPool& pool)
      : file_(std::move(file)), facts_(std::move(facts)), pool_(pool) {}

  MappedFile file_;
  BaseFacts facts_;
  ThreadPool& pool_;
  int64_t first_byte_ = 0;
  int64_t next_row_ = 0;
  std::vector<float> logits_;
};

}  // namespace nibble
