#include "gguf/split.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include <fmt/ranges.h>

namespace nibble::gguf {
namespace {

constexpr std::string_view kNumberKey = "split.no";
constexpr std::string_view kCountKey = "split.count";
constexpr std::string_view kTensorsKey = "split.tensors.count";
constexpr size_t kNamedMissing = 5;  // of the missing files

// "x-00002-of-00003.gguf"
struct PartName {
  std::string stem;     // "x", with its folder
  uint64_t number = 0;  // 2
  uint64_t count = 0;   // 3
};

std::optional<uint64_t> five_digits(std::string_view text) {
  uint64_t number = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '9') {
      return std::nullopt;
    }
    number = number * 10 + static_cast<uint64_t>(digit - '0');
  }
  return number;
}

std::optional<PartName> parse_name(const std::string& path) {
  constexpr std::string_view kForm = "-00000-of-00000.gguf";
  if (path.size() < kForm.size()) {
    return std::nullopt;
  }
  const size_t begin = path.size() - kForm.size();
  const std::string_view end = std::string_view(path).substr(begin);
  const auto number = five_digits(end.substr(1, 5));
  const auto count = five_digits(end.substr(10, 5));
  if (end[0] != '-' || end.substr(6, 4) != "-of-" || end.substr(15) != ".gguf" || !number ||
      !count) {
    return std::nullopt;
  }
  return PartName{.stem = path.substr(0, begin), .number = *number, .count = *count};
}

std::string part_path(const PartName& name, uint64_t number) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", name.stem, number, name.count);
}

Result<Part> open_part(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  NIBBLE_ASSIGN_OR_RETURN(Content content, parse_gguf(file.bytes(), path));
  return Part{.file = std::move(file), .content = std::move(content)};
}

// What the metadata of a file says of its set; count 1 without a set.
struct SplitFacts {
  uint64_t number = 0;  // from 0
  uint64_t count = 1;
};

Result<SplitFacts> split_facts(const Metadata& metadata) {
  SplitFacts facts;
  NIBBLE_ASSIGN_OR_RETURN(facts.number, metadata.optional_uint(kNumberKey, 0));
  NIBBLE_ASSIGN_OR_RETURN(facts.count, metadata.optional_uint(kCountKey, 1));
  facts.count = std::max(facts.count, uint64_t{1});  // 0 is a file that was never split
  if (facts.number >= facts.count) {
    return make_error(StatusCode::kCorrupt,
                      "{}: {} is {}, but {} is {}; the file is damaged: download it again",
                      metadata.where(), kNumberKey, facts.number, kCountKey, facts.count);
  }
  return facts;
}

// The name of the first file of a set of several; nothing for a whole model.
Result<std::optional<PartName>> set_of(const std::string& path, const Metadata& metadata) {
  NIBBLE_ASSIGN_OR_RETURN(const SplitFacts facts, split_facts(metadata));
  std::optional<PartName> name = parse_name(path);
  if (facts.count == 1 && (!name || name->count <= 1)) {
    return std::optional<PartName>();
  }
  if (!name) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: is file {} of a split set of {}, whose names must end in "
                      "\"-00001-of-{:05}.gguf\" and so on; give its files the names that they were "
                      "downloaded from, and the path of the first",
                      path, facts.number + 1, facts.count, facts.count);
  }
  if (name->count != facts.count || name->number != facts.number + 1) {
    return make_error(StatusCode::kCorrupt,
                      "{}: the name says file {} of {}, the metadata file {} of {}; give the file "
                      "the name that it was downloaded from",
                      path, name->number, name->count, facts.number + 1, facts.count);
  }
  if (name->number != 1) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: is file {} of {}; give the path of the first: {}", path, name->number,
                      name->count, part_path(*name, 1));
  }
  return name;
}

Status check_present(const PartName& name) {
  std::vector<std::string> missing;
  uint64_t count = 0;
  for (uint64_t number = 2; number <= name.count; ++number) {
    const std::string path = part_path(name, number);
    if (!file_exists(path) && ++count <= kNamedMissing) {
      missing.emplace_back(file_name(path));
    }
  }
  if (count == 0) {
    return {};
  }
  return make_error(
      StatusCode::kNotFound,
      "{}: of its set of {} files, {} missing beside it: {}{}; download what is missing "
      "into the same folder",
      part_path(name, 1), name.count, count == 1 ? "1 is" : fmt::format("{} are", count),
      fmt::join(missing, ", "), count > missing.size() ? ", ..." : "");
}

Status check_later(const Part& part, uint64_t number, uint64_t count) {
  const Metadata& metadata = part.content.metadata;
  NIBBLE_ASSIGN_OR_RETURN(const SplitFacts facts, split_facts(metadata));
  if (facts.count != count || facts.number + 1 != number) {
    return make_error(StatusCode::kCorrupt,
                      "{}: the name says file {} of {}, the metadata file {} of {}; the files are "
                      "of different sets or were renamed: download them again",
                      metadata.where(), number, count, facts.number + 1, facts.count);
  }
  return {};
}

}  // namespace

Status FileSet::add(Part part) {
  const std::vector<Tensor>& tensors = part.content.tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [found, added] = index_.emplace(tensors[i].name, std::pair(parts_.size(), i));
    if (!added) {
      return make_error(StatusCode::kCorrupt,
                        "{}: tensor {} is in {}, too; the files are of different sets: download "
                        "them again",
                        part.content.metadata.where(), tensors[i].name,
                        file_name(parts_[found->second.first].content.metadata.where()));
    }
  }
  parts_.push_back(std::move(part));
  return {};
}

const Tensor* FileSet::find(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    return nullptr;
  }
  const auto [part, tensor] = found->second;
  return &parts_[part].content.tensors()[tensor];
}

bool is_gguf_path(const std::string& path) {
  const auto file = MappedFile::open(path);
  return file.ok() && is_gguf(file->bytes());
}

Result<FileSet> FileSet::open(const std::string& path) {
  FileSet set;
  NIBBLE_ASSIGN_OR_RETURN(Part first, open_part(path));
  NIBBLE_ASSIGN_OR_RETURN(const auto name, set_of(path, first.content.metadata));
  NIBBLE_RETURN_IF_ERROR(set.add(std::move(first)));
  if (!name) {
    return set;
  }
  NIBBLE_RETURN_IF_ERROR(check_present(*name));
  for (uint64_t number = 2; number <= name->count; ++number) {
    NIBBLE_ASSIGN_OR_RETURN(Part part, open_part(part_path(*name, number)));
    NIBBLE_RETURN_IF_ERROR(check_later(part, number, name->count));
    NIBBLE_RETURN_IF_ERROR(set.add(std::move(part)));
  }
  NIBBLE_ASSIGN_OR_RETURN(const uint64_t tensors,
                          set.metadata().optional_uint(kTensorsKey, set.tensor_count()));
  if (tensors != set.tensor_count()) {
    return make_error(StatusCode::kCorrupt,
                      "{}: {} is {}, but its {} files hold {} tensors; the files are of different "
                      "sets: download them again",
                      path, kTensorsKey, tensors, name->count, set.tensor_count());
  }
  return set;
}

}  // namespace nibble::gguf
