#include "quantizer/journal.h"

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "base/file.h"
#include "base/json.h"

namespace nibble {
namespace {

constexpr int64_t kVersion = 1;
constexpr size_t kChecksumDigits = 32;
constexpr size_t kErrorFields = 10;

// Numbers as their bits: reading decimal digits may round the last one.
Json bits_json(double value) { return std::bit_cast<int64_t>(value); }
double from_bits(const Json& json) { return std::bit_cast<double>(json.as_int()); }

Json error_json(const RowsError& error) {
  return JsonArray{error.count,
                   bits_json(error.signal),
                   bits_json(error.noise),
                   bits_json(error.product),
                   bits_json(error.energy),
                   bits_json(error.max_error),
                   error.clipped,
                   error.zeros,
                   bits_json(error.scale_low),
                   bits_json(error.scale_high)};
}

std::optional<RowsError> error_from_json(const Json* json) {
  if (json == nullptr || !json->is_array() || json->as_array().size() != kErrorFields) {
    return std::nullopt;
  }
  const JsonArray& fields = json->as_array();
  if (!std::all_of(fields.begin(), fields.end(),
                   [](const Json& field) { return field.is_int(); })) {
    return std::nullopt;
  }
  RowsError error;
  error.count = fields[0].as_int();
  error.signal = from_bits(fields[1]);
  error.noise = from_bits(fields[2]);
  error.product = from_bits(fields[3]);
  error.energy = from_bits(fields[4]);
  error.max_error = static_cast<float>(from_bits(fields[5]));
  error.clipped = fields[6].as_int();
  error.zeros = fields[7].as_int();
  error.scale_low = static_cast<float>(from_bits(fields[8]));
  error.scale_high = static_cast<float>(from_bits(fields[9]));
  return error;
}

std::optional<CalibrationRecord> calibration_from_json(const Json& json) {
  constexpr size_t kFields = 4;  // and one more of some
  if (!json.is_array() || json.as_array().size() < kFields ||
      json.as_array().size() > kFields + 1) {
    return std::nullopt;
  }
  const JsonArray& fields = json.as_array();
  if (!fields[0].is_string() || !fields[1].is_int() || !fields[2].is_int() || !fields[3].is_int() ||
      !fields.back().is_string() == (fields.size() > kFields)) {
    return std::nullopt;
  }
  return CalibrationRecord{fields[0].as_string(), from_bits(fields[1]), from_bits(fields[2]),
                           fields[3].as_int(),
                           fields.size() > kFields ? fields[kFields].as_string() : std::string()};
}

int hex_value(char digit) {
  if (digit >= '0' && digit <= '9') {
    return digit - '0';
  }
  return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

std::optional<Digest> digest_from_json(const Json& json) {
  Digest digest{};
  if (!json.is_string() || json.as_string().size() != 2 * digest.size()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < digest.size(); ++i) {
    const int high = hex_value(json.as_string()[2 * i]);
    const int low = hex_value(json.as_string()[2 * i + 1]);
    if (high < 0 || low < 0) {
      return std::nullopt;
    }
    digest[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return digest;
}

std::optional<JobRecord> record_from_json(const Json& line) {
  const auto error = error_from_json(line.find("error"));
  const Json* hashes = line.find("xxh3");
  if (!error || hashes == nullptr || !hashes->is_array()) {
    return std::nullopt;
  }
  JobRecord record;
  record.error = *error;
  if (const Json* calibration = line.find("calibration"); calibration != nullptr) {
    record.calibration = calibration_from_json(*calibration);
    if (!record.calibration) {
      return std::nullopt;
    }
  }
  for (const Json& hash : hashes->as_array()) {
    const auto digest = digest_from_json(hash);
    if (!digest) {
      return std::nullopt;
    }
    record.digests.push_back(*digest);
  }
  return record;
}

// The JSON of a whole line; empty when the line is damaged.
std::string_view checked(std::string_view line) {
  if (line.size() <= kChecksumDigits || line[kChecksumDigits] != ' ') {
    return {};
  }
  const std::string_view json = line.substr(kChecksumDigits + 1);
  return digest_text(digest_of(json)) == line.substr(0, kChecksumDigits) ? json
                                                                         : std::string_view();
}

// False when the line says nothing that is understood.
bool read_line(std::string_view text, JournalContent& content) {
  const auto line = Json::parse(text);
  if (!line.ok()) {
    return false;
  }
  if (content.plan.empty()) {
    const Json* version = line->find("nibble_journal");
    const Json* plan = line->find("plan");
    if (version == nullptr || !version->is_int() || version->as_int() != kVersion ||
        plan == nullptr || !plan->is_string()) {
      return false;
    }
    content.plan = plan->as_string();
    return !content.plan.empty();
  }
  if (const Json* shard = line->find("shard"); shard != nullptr && shard->is_string()) {
    content.shards.insert(shard->as_string());
    return true;
  }
  const Json* name = line->find("job");
  auto record = record_from_json(*line);
  if (name == nullptr || !name->is_string() || !record) {
    return false;
  }
  content.jobs.insert_or_assign(name->as_string(), std::move(*record));
  return true;
}

}  // namespace

Result<JournalContent> read_journal(const std::string& path) {
  JournalContent content;
  if (!file_exists(path)) {
    return content;
  }
  NIBBLE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const std::string_view all(reinterpret_cast<const char*>(file.bytes().data()),
                             file.bytes().size());
  for (size_t at = 0; at < all.size();) {
    const size_t end = all.find('\n', at);
    if (end == std::string_view::npos) {
      break;
    }
    const std::string_view json = checked(all.substr(at, end - at));
    if (json.empty() || !read_line(json, content)) {
      break;
    }
    at = end + 1;
    content.valid_bytes = static_cast<int64_t>(at);
  }
  return content;
}

Result<Journal> Journal::open(const std::string& path,
                              const std::string& plan,
                              JournalContent& content) {
  NIBBLE_ASSIGN_OR_RETURN(SharedFile file, SharedFile::open_locked(path));
  NIBBLE_ASSIGN_OR_RETURN(content, read_journal(path));  // only now: nobody appends to it
  Journal journal(std::move(file));
  journal.end_ = content.valid_bytes;
  NIBBLE_RETURN_IF_ERROR(journal.file_.resize(journal.end_));
  if (content.plan.empty()) {
    content.plan = plan;
    NIBBLE_RETURN_IF_ERROR(
        journal.append(Json::object({{"nibble_journal", kVersion}, {"plan", plan}}).dump()));
  }
  return journal;
}

Status Journal::append(const std::string& json) {
  const std::string line = fmt::format("{} {}\n", digest_text(digest_of(json)), json);
  NIBBLE_RETURN_IF_ERROR(file_.write_at(end_, std::as_bytes(std::span(line.data(), line.size()))));
  end_ += static_cast<int64_t>(line.size());
  return {};
}

Status Journal::add_job(const std::string& name, const JobRecord& record) {
  JsonArray hashes;
  for (const Digest& digest : record.digests) {
    hashes.emplace_back(digest_text(digest));
  }
  Json line = Json::object(
      {{"job", name}, {"xxh3", std::move(hashes)}, {"error", error_json(record.error)}});
  if (record.calibration) {
    const CalibrationRecord& calibration = *record.calibration;
    JsonArray fields{calibration.rounding, bits_json(calibration.error),
                     bits_json(calibration.rtn_error), calibration.rows};
    if (!calibration.fallback.empty()) {
      fields.emplace_back(calibration.fallback);
    }
    line.set("calibration", std::move(fields));
  }
  return append(line.dump());
}

Status Journal::add_shard(const std::string& file) {
  return append(Json::object({{"shard", file}}).dump());
}

}  // namespace nibble
