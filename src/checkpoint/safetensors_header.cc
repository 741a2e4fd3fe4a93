#include "checkpoint/safetensors_header.h"

#include <unordered_set>
#include <utility>

#include "base/json_events.h"

namespace nibble {
namespace {

constexpr std::string_view kMetadata = "__metadata__";

/// Takes entries one after the other; stops at whatever is not usual.
class HeaderReader final : public JsonEvents {
 public:
  bool object_begin() override {
    ++depth_;
    if (depth_ == 2) {
      entry_ = {};
      entry_.tensor.name = std::move(name_);
      seen_ = 0;
      numbers_.clear();
    }
    return depth_ <= 2 && field_ == Field::kNone;
  }

  bool object_end() override {
    if (--depth_ != 1) {
      return true;
    }
    if (in_metadata_) {
      in_metadata_ = false;
      return true;
    }
    if (seen_ != kAll) {
      return false;
    }
    const auto bytes = tensor_bytes(entry_.tensor.dtype, entry_.tensor.shape);
    if (!bytes.ok() || entry_.end - entry_.begin != *bytes) {
      return false;
    }
    header_.entries.push_back(std::move(entry_));
    return true;
  }

  bool array_begin() override {
    in_array_ = depth_ == 2 && (field_ == Field::kShape || field_ == Field::kOffsets);
    return in_array_;
  }

  bool array_end() override {
    in_array_ = false;
    if (field_ == Field::kShape) {
      entry_.tensor.shape = numbers_;
    } else {
      if (numbers_.size() != 2) {
        return false;
      }
      entry_.begin = numbers_[0];
      entry_.end = numbers_[1];
    }
    numbers_.clear();
    return finish_field();
  }

  bool key(std::string_view text) override {
    if (depth_ == 1) {
      in_metadata_ = text == kMetadata;
      name_ = text;
      return !in_metadata_ || !std::exchange(had_metadata_, true);
    }
    if (in_metadata_) {
      name_ = text;
      return true;
    }
    field_ = text == "dtype"          ? Field::kDtype
             : text == "shape"        ? Field::kShape
             : text == "data_offsets" ? Field::kOffsets
                                      : Field::kNone;
    return field_ != Field::kNone;
  }

  bool string(std::string_view text) override {
    if (depth_ == 2 && in_metadata_) {
      return header_.metadata.emplace(std::move(name_), text).second;
    }
    if (depth_ != 2 || field_ != Field::kDtype) {
      return false;
    }
    const auto dtype = dtype_from_name(text);
    if (dtype) {
      entry_.tensor.dtype = *dtype;
    }
    return dtype && finish_field();
  }

  bool integer(int64_t value) override {
    if (!in_array_ || value < 0) {
      return false;
    }
    numbers_.push_back(value);
    return true;
  }

  bool other() override { return false; }

  SafetensorsHeader take() { return std::move(header_); }

 private:
  enum class Field : uint8_t { kNone = 0, kDtype = 1, kShape = 2, kOffsets = 4 };
  static constexpr int kAll = 7;

  /// False for a field that came before.
  bool finish_field() {
    const int bit = static_cast<int>(std::exchange(field_, Field::kNone));
    const bool first = (seen_ & bit) == 0;
    seen_ |= bit;
    return first;
  }

  SafetensorsHeader header_;
  HeaderEntry entry_;
  std::string name_;
  std::vector<int64_t> numbers_;
  int depth_ = 0;
  int seen_ = 0;  // fields of the entry
  Field field_ = Field::kNone;
  bool in_metadata_ = false;
  bool had_metadata_ = false;
  bool in_array_ = false;
};

bool has_equal_names(const std::vector<HeaderEntry>& entries) {
  std::unordered_set<std::string_view> names;
  names.reserve(entries.size());
  for (const HeaderEntry& entry : entries) {
    if (!names.insert(entry.tensor.name).second) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::optional<SafetensorsHeader> read_usual_header(std::string_view text) {
  HeaderReader reader;
  if (text.empty() || text.front() != '{' || !read_json_events(text, reader)) {
    return std::nullopt;
  }
  SafetensorsHeader header = reader.take();
  if (has_equal_names(header.entries)) {
    return std::nullopt;
  }
  return header;
}

}  // namespace nibble
